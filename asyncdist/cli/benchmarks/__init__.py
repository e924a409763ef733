"""Commands that measure. `asyncdist.cli` registers them."""
