"""The benchmark of failures, behind ``asyncdist bench faults``. Reading order: `plan`, `ranks`, `benchmark`."""
