"""Weights for other libraries: a tensor transport for Ray, which programs register, and weight-transfer engines for vLLM,
which loads them by the entry point ``vllm.general_plugins``.
"""
