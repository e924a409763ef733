"""The results of the benchmarks as tables, Markdown pages and a plot. Called by `bench.command`."""
