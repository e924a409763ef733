"""``python -m benchmarks weights``: how fast published weights reach readers, and what their requests notice of it."""
