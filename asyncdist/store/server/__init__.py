"""The store server: listeners, connections, sessions, limits, the daemon and its status.

The daemon, rank 0 and `TCPStore(is_master=True)` start one.
"""
