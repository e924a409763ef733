"""How benchmark results are shown: tables, a Markdown page and a plot. Called by `asyncdist.cli`."""
