"""The benchmark of the store."""
