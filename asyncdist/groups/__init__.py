"""Process groups, the world they belong to, and the awaited and default-group interfaces to them.

`asyncdist` and `asyncdist.sync` export them.
"""
