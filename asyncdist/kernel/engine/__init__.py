"""The progress engine: it moves the bytes of operations and completes their work handles.

`groups` and `devices` use it.
"""
