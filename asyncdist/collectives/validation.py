"""Checks the arguments that users pass to collectives, and turns tensors into memory.

Called by the modules that make plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncdist.base.ops import PremulSum, ReduceOp, Reduction
from asyncdist.errors import UsageError
from asyncdist.memory.buffers import Memory, OutputTensor, TensorBlocks, input_memory


def reduction(op: object) -> Reduction:
    """Return a reduction from a value of `ReduceOp` or of torch.distributed, or from its name.

    Raises:
        UsageError: ``op`` is not a reduction.
    """
    if isinstance(op, (ReduceOp, PremulSum)):
        if op is ReduceOp.PREMUL_SUM:
            raise UsageError("PREMUL_SUM needs its factor: pass asyncdist.premul_sum(factor)")
        return op
    name = op if isinstance(op, str) else getattr(op, "name", None)
    if isinstance(name, str) and name.upper() in ReduceOp.__members__:
        return reduction(ReduceOp[name.upper()])
    raise UsageError(f"{op!r} is not a reduction; use one of {', '.join(ReduceOp.__members__)}")


def check_length(values: Sequence[Any] | None, size: int, what: str) -> None:
    """Raise UsageError unless there is one value for each of ``size`` ranks."""
    if values is None or len(values) != size:
        has = "is missing" if values is None else f"has {len(values)} entries"
        raise UsageError(f"{what} {has}: it needs one for each of the {size} ranks of the group")


def listed(tensors: Sequence[Any] | None, size: int, what: str) -> list[Memory]:
    """Return the memory of a list of tensors to read, one a rank, all of one dtype."""
    check_length(tensors, size, what)
    memories = [input_memory(tensor) for tensor in tensors or ()]
    return one_dtype(memories, what)


def targets(tensors: Sequence[Any] | None, size: int, what: str) -> list[OutputTensor]:
    """Return a list of tensors to write into, one a rank, all of one dtype."""
    check_length(tensors, size, what)
    written = [OutputTensor(tensor) for tensor in tensors or ()]
    one_dtype([target.memory for target in written], what)
    return written


def one_dtype(memories: list[Memory], what: str) -> list[Memory]:
    """Return memories; UsageError unless all are of one dtype."""
    for rank, memory in enumerate(memories):
        if memory.dtype is not memories[0].dtype:
            raise UsageError(f"{what}[{rank}] is {memory.dtype}, but {what}[0] is {memories[0].dtype}: use one dtype")
    return memories


def same_sizes(memories: Sequence[Memory], own: Memory, what: str) -> None:
    """Raise UsageError unless every entry of a list is like the rank's own tensor."""
    for rank, memory in enumerate(memories):
        if memory.count != own.count or memory.dtype is not own.dtype:
            raise UsageError(
                f"{what}[{rank}] has {memory.count} x {memory.dtype}, but the tensor has {own.count} x {own.dtype}"
            )


def even(memory: Memory, size: int, what: str) -> TensorBlocks:
    """Return memory in ``size`` equal blocks."""
    if memory.count % size:
        raise UsageError(f"{what} has {memory.count} elements, which {size} ranks cannot share equally")
    return TensorBlocks.split(memory, size)


def split_by(memory: Memory, tensor: Any, sizes: Sequence[int] | None, ranks: int, what: str) -> list[Memory]:
    """Return memory in blocks of ``sizes`` rows (of the first dimension) each; in equal blocks without ``sizes``."""
    shape = tuple(tensor.shape)
    rows = shape[0] if shape else 1
    if not sizes:
        if rows % ranks:
            raise UsageError(f"{what} has {rows} rows, which {ranks} ranks cannot share equally: pass split sizes")
        sizes = [rows // ranks] * ranks
    check_length(sizes, ranks, f"{what}_split_sizes")
    if sum(sizes) != rows or min(sizes) < 0:
        raise UsageError(f"{what}_split_sizes {list(sizes)} do not add up to the {rows} rows of the {what}")
    row = memory.count // rows if rows else 0
    blocks, start = [], 0
    for count in sizes:
        blocks.append(memory.slice(start * row, (start + count) * row))
        start += count
    return blocks


def storing(written: Sequence[OutputTensor], value: Any) -> Callable[[], Any]:
    """Return what finishes an operation: every target stored, then its value."""

    def finish() -> Any:
        for target in written:
            target.store()
        return value

    return finish
