"""The benchmark of collectives and messages on CUDA tensors."""
