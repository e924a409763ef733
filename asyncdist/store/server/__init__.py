"""The store server: listeners, connections, sessions, limits, the daemon and its status."""
