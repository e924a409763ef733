"""How versions pass from publishers to readers: records at the store, memory, and transfers over channels."""
