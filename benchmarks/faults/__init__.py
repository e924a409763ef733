"""The benchmark of failures."""
