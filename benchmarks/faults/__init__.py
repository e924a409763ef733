"""The benchmark of failures, behind ``python -m benchmarks faults``. Reading order: `plan`, `ranks`, `benchmark`."""
