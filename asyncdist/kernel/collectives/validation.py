"""Checks of the arguments of collectives, whose tensors `converted` has made contiguous."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

import torch

from asyncdist.base.ops import PremulSum, ReduceOp, Reduction, premul_sum
from asyncdist.errors import UsageError
from asyncdist.kernel.memory.buffers import tensor_of

TORCH_REDUCE_OP: Any = getattr(torch.distributed, "ReduceOp", None)
"""The type of torch's reductions with a factor. Objects of different factors are equal, so none is part of a key."""


def reduction(op: object) -> Reduction:
    """Return a reduction from a value of `ReduceOp` or of torch.distributed, or from its name.

    Raises:
        UsageError: ``op`` is not a reduction.
    """
    if isinstance(op, (ReduceOp, PremulSum)):
        if op is ReduceOp.PREMUL_SUM:
            raise UsageError("PREMUL_SUM needs its factor: pass asyncdist.premul_sum(factor)")
        return op
    if type(op) is TORCH_REDUCE_OP:
        named: Any = op
        op, factor = named.__getstate__()
        if factor is not None:
            return premul_sum(float(factor))
    name = op if isinstance(op, str) else getattr(op, "name", None)
    if isinstance(name, str) and name.upper() in ReduceOp.__members__:
        return reduction(ReduceOp[name.upper()])
    raise UsageError(f"{op!r} is not a reduction; use one of {', '.join(ReduceOp.__members__)}")


def check_length(values: Sequence[Any] | None, size: int, what: str) -> None:
    """Raise UsageError unless ``values`` is a list with one value for each of ``size`` ranks."""
    if values is not None and not isinstance(values, Sized):
        raise UsageError(f"{what} is not a list but {values!r}: it needs one for each of the {size} ranks of the group")
    if values is None or len(values) != size:
        has = "is missing" if values is None else f"has {len(values)} entries"
        raise UsageError(f"{what} {has}: it needs one for each of the {size} ranks of the group")


def single(value: Any) -> torch.Tensor:
    """Return a tensor; raise UsageError for None, or for a list of tensors."""
    return value if isinstance(value, torch.Tensor) else tensor_of(value)


def listed(tensors: Sequence[Any] | None, size: int, what: str) -> list[torch.Tensor]:
    """Return a list of tensors. Raises UsageError unless there is one for each rank, all of one dtype."""
    check_length(tensors, size, what)
    return one_dtype([single(tensor) for tensor in tensors or ()], what)


def one_dtype(tensors: list[torch.Tensor], what: str) -> list[torch.Tensor]:
    """Return the tensors; raise UsageError unless all have one dtype."""
    for rank, tensor in enumerate(tensors):
        if tensor.dtype is not tensors[0].dtype:
            raise UsageError(f"{what}[{rank}] is {tensor.dtype}, but {what}[0] is {tensors[0].dtype}: use one dtype")
    return tensors


def same_sizes(tensors: Sequence[torch.Tensor], own: Any, what: str) -> None:
    """Raise UsageError unless every tensor has the size and dtype of the rank's own tensor."""
    count, dtype = single(own).numel(), own.dtype
    for rank, tensor in enumerate(tensors):
        if tensor.numel() != count or tensor.dtype is not dtype:
            raise UsageError(
                f"{what}[{rank}] has {tensor.numel()} x {tensor.dtype}, but the tensor has {count} x {dtype}"
            )


def even(value: Any, size: int, what: str) -> Sequence[torch.Tensor]:
    """Return the elements of a tensor as ``size`` equal blocks. Raises UsageError if they cannot be divided."""
    tensor = single(value)
    if tensor.numel() % size:
        raise UsageError(f"{what} has {tensor.numel()} elements, which {size} ranks cannot share equally")
    return tensor.view(size, -1).unbind() if tensor.numel() else [tensor.view(-1)] * size


def split_counts(value: Any, sizes: Sequence[int] | None, ranks: int, what: str) -> list[int]:
    """Return the element counts of the blocks of a tensor that have ``sizes`` rows; of equal blocks if not given."""
    tensor = single(value)
    rows = tensor.shape[0] if tensor.shape else 1
    if not sizes:
        if rows % ranks:
            raise UsageError(f"{what} has {rows} rows, which {ranks} ranks cannot share equally: pass split sizes")
        sizes = [rows // ranks] * ranks
    check_length(sizes, ranks, f"{what}_split_sizes")
    if min(sizes) < 0:
        raise UsageError(f"{what}_split_sizes {list(sizes)} has a negative number of rows")
    if sum(sizes) != rows:
        raise UsageError(f"{what}_split_sizes {list(sizes)} do not add up to the {rows} rows of the {what}")
    row = tensor.numel() // rows if rows else 0
    return [count * row for count in sizes]
