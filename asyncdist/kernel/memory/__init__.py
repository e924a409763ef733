"""Tensors as memory: buffers, reduction kernels, serialization of objects, the shared arena, registered tensors."""
