"""What a benchmark executes: collectives, and training steps of models. Used by `bench.rank`."""
