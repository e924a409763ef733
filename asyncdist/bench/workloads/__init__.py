"""What a benchmark runs: collectives, training steps and device transfers, each with a check of its result."""
