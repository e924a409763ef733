"""The benchmark of data-parallel training."""
