"""Registered tensors: users' tensors in shared memory, which collectives read and write in place.

A registered tensor is an ordinary tensor whose storage lies in this process's arena
(`asyncdist.kernel.memory.shared_arena`), which every rank of the host has mapped. Every tensor in the arena is registered
for all groups, and so are its slices and views. The memory is freed with the last tensor that shares it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from asyncdist.errors import UnsupportedError, UsageError
from asyncdist.kernel.memory.buffers import tensor_of
from asyncdist.kernel.memory.shared_arena import ALIGNMENT, arena, carve, unavailable

T = TypeVar("T", bound="torch.Tensor | nn.Module")

log = logging.getLogger("asyncdist")

_warned = False


def empty(
    *size: Any, dtype: torch.dtype | None = None, shared: bool = True, requires_grad: bool = False
) -> torch.Tensor:
    """Return an uninitialised CPU tensor, as `torch.empty` does, in memory that all ranks of this host have mapped.

    Collectives on such a tensor copy only their result. They treat it like an ordinary tensor if that takes less time
    (all-reduces below 32 KiB, others up to 256 KiB per rank), if it is not contiguous, if an input overlaps an output, and
    if the input is scaled (PREMUL_SUM). The call needs no process group. A forked child shares the memory of its parent's
    tensors.

    Args:
        size: Several numbers or one sequence of numbers.
        dtype: The dtype; torch's default dtype by default.
        shared: False returns an ordinary tensor, as does a machine without shared memory.
        requires_grad: As for `torch.empty`.

    Raises:
        SharedMemoryError: No memory is left.

    Example:
        >>> tensor = asyncdist.empty(1024, dtype=torch.float32)
    """
    if not shared or not _has_shared_memory():
        return torch.empty(*size, dtype=dtype, device="cpu", requires_grad=requires_grad)
    # torch checks the arguments and computes the number of bytes.
    meta = torch.empty(*size, dtype=dtype, device="meta")
    (tensor,) = carve([(meta.numel(), meta.dtype)])
    return tensor.view(meta.shape).requires_grad_(requires_grad)


def _has_shared_memory() -> bool:
    """Return whether this process can use shared memory. Log a warning once if it cannot."""
    global _warned
    reason = unavailable()
    if reason is not None and not _warned:
        _warned = True
        log.warning("this process has no shared memory, so registered tensors are ordinary tensors: %s", reason)
    return reason is None


def register(target: T, *, wanted: bool = True) -> T:
    """Move a tensor, or a module's parameters and buffers, into the arena in place; return the same object.

    Values, strides and tensor objects are kept, and tied tensors stay tied, so optimizers remain valid. Other views of
    the old memory (numpy arrays, earlier slices) keep that memory. CUDA tensors are not moved: peers can map their
    memory where it lies.

    Args:
        target: A tensor or a module.
        wanted: Whether to move anything; False only checks ``target``.

    Raises:
        UsageError: ``target`` is neither, or it is a lazy module without shapes.
        UnsupportedError: A tensor is sparse, is a conjugate or negative view, or no transport carries its device or dtype.
        SharedMemoryError: No memory is left. Nothing has moved.
    """
    tensors = _tensors(target)
    if not wanted or not _has_shared_memory():
        return target
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_cpu and tensor.numel() and arena().offset_of(tensor.data_ptr(), tensor.itemsize) is None:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    if not by_storage:
        return target
    # Tensors that share a storage move together, so that they still share memory afterwards.
    spans = [(members, *_span(members)) for members in by_storage.values()]
    areas = carve((stop - start, torch.uint8) for _, start, stop in spans)
    for (members, start, stop), area in zip(spans, areas, strict=True):
        source = torch.empty(0, dtype=torch.uint8, device="cpu")
        area.copy_(source.set_(members[0].untyped_storage(), start, (stop - start,), (1,)))
        for tensor in members:
            _move(tensor, area.untyped_storage(), start)
    return target


def _tensors(target: object) -> Sequence[torch.Tensor]:
    """Return a tensor, or those of a module, as a sequence. Raises the errors of `register`."""
    if isinstance(target, nn.Module):
        tensors = [*target.parameters(), *target.buffers()]
    elif isinstance(target, torch.Tensor):
        tensors = [target]
    else:
        raise UsageError(f"register takes a tensor or a module, not {type(target).__name__}")
    for tensor in tensors:
        if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise UsageError("a lazy module's parameters have no shape yet: run one forward before registering it")
        dense = tensor_of(tensor)
        if dense.is_neg() or dense.is_conj():
            raise UnsupportedError(
                "cannot register a conjugate or negative view: call .resolve_conj().resolve_neg() first"
            )
    return tensors


def _span(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return the first byte and the end of the bytes that tensors use of one storage, aligned down to `ALIGNMENT`."""
    starts: list[int] = []
    stops: list[int] = []
    for tensor in tensors:
        last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
        starts.append(int(tensor.storage_offset()) * tensor.itemsize)
        stops.append(starts[-1] + (last + 1) * tensor.itemsize)
    return min(starts) // ALIGNMENT * ALIGNMENT, max(stops)


def _move(tensor: torch.Tensor, storage: torch.UntypedStorage, start: int) -> None:
    """Let a tensor use ``storage``, into which the bytes of its old storage from ``start`` on have been copied."""
    offset = tensor.storage_offset() - start // tensor.itemsize
    with torch.inference_mode(tensor.is_inference()):
        moved = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, offset, tensor.shape, tensor.stride())
        tensor.data = moved
