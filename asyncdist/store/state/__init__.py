"""The store's replicated state machine without I/O: keys, queues, barriers, watches, sessions, ownership."""
