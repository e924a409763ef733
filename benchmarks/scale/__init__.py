"""The benchmark of how a world grows."""
