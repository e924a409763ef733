"""The store's wire protocols without I/O: operations, codec, long messages, client state machine, torch's c10d format."""
