"""The benchmark of weights."""
