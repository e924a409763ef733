"""The store's data on disk: log format, journal with snapshots, group commit. Used by the server."""
