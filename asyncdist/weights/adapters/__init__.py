"""Weights for other libraries: a tensor transport for Ray, and weight-transfer engines for vLLM."""
