"""Prepares the reductions: all_reduce, reduce, reduce_scatter.

Narrow floats (float16, bfloat16, float8) are accumulated in float32. Schedules that send partial sums send float32.
Schedules that send the contributions themselves send them narrow, and the receiver widens them. `data_movement` describes
the arguments and results of these functions; `sparse` plans the all-reduce of sparse tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from asyncdist.base.ops import Collective, PremulSum, Reduction
from asyncdist.errors import UsageError
from asyncdist.kernel.algorithms import pairwise, ring, tree
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.collectives import validation
from asyncdist.kernel.collectives.arguments import list_of
from asyncdist.kernel.collectives.call_plan import Arrange, CallPlan, OverLinks
from asyncdist.kernel.collectives.first_rail import reduce_by
from asyncdist.kernel.collectives.group_context import Blocks, GroupContext, Lane, fingerprint, segments
from asyncdist.kernel.collectives.recorded import LocalCopy, LocalDivision, Recording, recorded_blocks
from asyncdist.kernel.collectives.validation import reduction
from asyncdist.kernel.memory.buffers import (
    NOTHING,
    Memory,
    TensorBlocks,
    block_memories,
    copy_overlapping_inputs,
    flat_memory,
)
from asyncdist.kernel.memory.reduce_kernels import Arithmetic, accumulator, arithmetic, divide, has_arithmetic
from asyncdist.kernel.transport.native import CallSignature

# Elements of a segment that is accumulated in separate memory.
_SEGMENT_COUNT = 1 << 20


def _scaled(tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
    if not isinstance(op, PremulSum):
        return tensor
    if has_arithmetic(tensor.dtype):
        return tensor * op.factor
    return (tensor.to(accumulator(tensor.dtype)) * op.factor).to(tensor.dtype)


def _prescaling(op: Reduction, *, in_place: bool) -> Arrange | None:
    """Return a function that scales the tensor of a call, in place or into a copy; None if the reduction does not."""
    if type(op) is not PremulSum:
        return None
    return lambda tensor: (tensor.copy_(_scaled(tensor, op)) if in_place else _scaled(tensor, op),)


# -- all_reduce -------------------------------------------------------------------------------------


def all_reduce(group: GroupContext, tensor: Any, op: Any) -> CallPlan:
    """Reduce a tensor over the ranks, in place, the same bits on every rank."""
    tensor, op = validation.single(tensor), reduction(op)
    dtype, nbytes = tensor.dtype, tensor.nbytes
    kernels = arithmetic(op, dtype)
    call = fingerprint(Collective.all_reduce, dtype, tensor.shape, op, None)
    signature = CallSignature(Collective.all_reduce, call, dtype, tensor.shape, kernels)
    arrange = _prescaling(op, in_place=True)
    if (plan := group.in_memory(signature, nbytes, arrange)) is not None:
        return plan
    if (hierarchical := group.hierarchical_for("all_reduce")) is not None:
        run = partial(hierarchical.all_reduce, kernels, call)
        return group.in_parts(call, nbytes, lambda tensor: run([flat_memory(tensor)]), kernels.fold, arrange=arrange)
    if kernels.widens:
        wide = _all_reduce_wide(group, kernels, nbytes, dtype)
        return group.in_parts(call, nbytes, wide, kernels.fold, arrange=arrange)
    algorithm = group.choose("all_reduce", nbytes)
    steps = partial(_all_reduce_steps, group, kernels, algorithm)
    records = [partial(steps, lane) for lane in group.lanes(nbytes // group.size)]
    scratch = [(tensor.numel(), dtype)] if algorithm == "doubling" else ()
    return group.recorded(call, nbytes, records, [tensor], kernels, scratch=scratch, arrange=arrange)


def all_reduce_coalesced(group: GroupContext, tensors: Any, op: Any) -> CallPlan:
    """Reduce several tensors of one dtype over the ranks, in place, as one operation."""
    op = reduction(op)
    if not (tensors := list_of("tensors", tensors, "tensors")):
        raise UsageError("at least one tensor is needed")
    validation.one_dtype([validation.single(tensor) for tensor in tensors], "tensors")
    dtype = tensors[0].dtype
    kernels = arithmetic(op, dtype)
    counts = tuple(tensor.numel() for tensor in tensors)
    call = fingerprint(Collective.all_reduce_coalesced, dtype, sum(counts), op, None, counts)
    nbytes = sum(counts) * dtype.itemsize

    def arrange(tensors: Any) -> tuple[Any, ...]:
        flat = [flat_memory(tensor).tensor for tensor in tensors]
        if type(op) is PremulSum:
            for tensor in flat:
                tensor.copy_(_scaled(tensor, op))
        return (flat[0] if len(flat) == 1 else flat,)

    collective = Collective.all_reduce if len(counts) == 1 else Collective.all_reduce_coalesced
    sizes = () if len(counts) == 1 else counts
    signature = CallSignature(collective, call, dtype, (sum(counts),), kernels, sizes=sizes)
    if (plan := group.in_memory(signature, nbytes, arrange)) is not None:
        return plan
    hierarchical = group.hierarchical_for("all_reduce")
    if hierarchical is None and not kernels.widens:
        names = [group.choose("all_reduce", count * dtype.itemsize) for count in counts]
        records = [
            partial(_coalesced_steps, group, kernels, index, name, lane)
            for index, name in enumerate(names)
            for lane in group.lanes(counts[index] * dtype.itemsize // group.size)
        ]
        scratch = [(count if name == "doubling" else 0, dtype) for count, name in zip(counts, names, strict=True)]
        arguments = tensors if len(tensors) == 1 else [tensors]
        return group.recorded(call, nbytes, records, arguments, kernels, scratch=scratch, arrange=arrange)

    wide = [_all_reduce_wide(group, kernels, count * dtype.itemsize, dtype) for count in counts]

    def parts(tensors: Any) -> Iterable[Schedule]:
        listed = tensors if type(tensors) is list else [tensors]
        if hierarchical is not None:
            return hierarchical.all_reduce(kernels, call, [Memory(tensor) for tensor in listed])
        return chain.from_iterable(run(tensor) for run, tensor in zip(wide, listed, strict=True))

    return group.in_parts(call, nbytes, parts, kernels.fold, arrange=arrange)


def _coalesced_steps(
    group: GroupContext, kernels: Arithmetic, index: int, algorithm: str, lane: Lane, tensors: Any, *scratch: Memory
) -> Recording:
    memory = tensors[index] if isinstance(tensors, list) else tensors
    return _all_reduce_steps(group, kernels, algorithm, lane, memory, scratch[index])


def _all_reduce_steps(
    group: GroupContext, kernels: Arithmetic, algorithm: str, lane: Lane, memory: Memory, scratch: Memory = NOTHING
) -> Recording:
    rank, size, memory = group.rank, group.size, lane.of(memory)
    if algorithm == "ring":
        blocks = TensorBlocks.split(memory, size)
        yield from ring.reduce_scatter(rank, size, blocks)
        # Each rank divides its own block before the other ranks receive it.
        if kernels.averages:
            yield LocalDivision(blocks[rank], size)
        yield from ring.all_gather(rank, size, blocks)
        return
    yield from reduce_by(algorithm, rank, size, memory, lane.of(scratch))
    if kernels.averages:
        yield LocalDivision(memory, size)


def _all_reduce_wide(group: GroupContext, kernels: Arithmetic, nbytes: int, dtype: torch.dtype) -> OverLinks:
    """Return a function that makes the schedules of an all-reduce of ``nbytes`` bytes of narrow floats."""
    algorithm = group.choose("all_reduce", nbytes, widening=kernels.accumulator.itemsize // dtype.itemsize)
    return lambda tensor: (
        _wide_segment(group, part, kernels, algorithm) for part in segments(flat_memory(tensor), _SEGMENT_COUNT)
    )


def _wide_segment(group: GroupContext, memory: Memory, kernels: Arithmetic, algorithm: str) -> Schedule:
    """All-reduce narrow floats; every sum is accumulated in float32 and rounded once.

    Small tensors are sent as float32. Of large ones each rank receives all contributions to its block, which are narrow.
    """
    rank, size, small = group.rank, group.size, algorithm in ("doubling", "tree")
    blocks = TensorBlocks.split(memory, 1 if small else size)
    mine = blocks[0 if small else rank]
    own = Memory(mine.tensor.to(kernels.accumulator), wire=None if small else memory.dtype)
    if small:
        yield from reduce_by(algorithm, rank, size, own, Memory(torch.empty_like(own.tensor)))
    else:
        yield from pairwise.reduce_scatter(rank, size, blocks, own)
    if kernels.averages:
        divide(own.tensor, size)
    mine.tensor.copy_(own.tensor)
    if not small:
        yield from ring.all_gather(rank, size, blocks)


# -- reduce -----------------------------------------------------------------------------------------


def reduce(group: GroupContext, tensor: Any, root: int, op: Any) -> CallPlan:
    """Reduce the tensor to ``root``; the tensors of the other ranks keep their content."""
    group.peer(root, "dst")
    tensor, op = validation.single(tensor), reduction(op)
    at_root, dtype, nbytes = group.rank == root, tensor.dtype, tensor.nbytes
    kernels = arithmetic(op, dtype)
    call = fingerprint(Collective.reduce, dtype, tensor.shape, op, root)
    signature = CallSignature(Collective.reduce, call, dtype, tensor.shape, kernels, root)
    arrange = _prescaling(op, in_place=at_root)
    if (plan := group.in_memory(signature, nbytes, arrange)) is not None:
        return plan
    if (hierarchical := group.hierarchical_for("reduce")) is not None:
        return group.in_parts(
            call,
            nbytes,
            lambda tensor: hierarchical.reduce(flat_memory(tensor), root, kernels, call),
            kernels.fold,
            arrange=arrange,
        )
    in_tree = group.choose("reduce", nbytes) == "tree"
    if in_tree and not kernels.widens and tensor.numel() <= _SEGMENT_COUNT:
        record = partial(_recorded_reduce, group, root, kernels)
        scratch = () if at_root else [(tensor.numel(), dtype)]
        return group.recorded(call, nbytes, [record], [tensor], kernels, scratch=scratch, arrange=arrange)
    run = _reduce_tree if in_tree else _reduce_scattered

    def segment_parts(tensor: torch.Tensor) -> Iterable[Schedule]:
        return (run(group, segment, root, kernels) for segment in segments(flat_memory(tensor), _SEGMENT_COUNT))

    return group.in_parts(call, nbytes, segment_parts, kernels.fold, arrange=arrange)


def _recorded_reduce(
    group: GroupContext, root: int, kernels: Arithmetic, memory: Memory, scratch: Memory | None = None
) -> Recording:
    own = scratch or memory
    if own is scratch:
        yield LocalCopy(own, memory)
    yield from tree.reduce(group.rank, group.size, root, own)
    if group.rank == root and kernels.averages:
        yield LocalDivision(own, group.size)


def _reduce_tree(group: GroupContext, memory: Memory, root: int, kernels: Arithmetic) -> Schedule:
    in_place = group.rank == root and not kernels.widens
    own = memory if in_place else Memory(memory.tensor.to(kernels.accumulator, copy=True))
    yield from tree.reduce(group.rank, group.size, root, own)
    if group.rank == root:
        if kernels.averages:
            divide(own.tensor, group.size)
        if own is not memory:
            memory.tensor.copy_(own.tensor)


def _reduce_scattered(group: GroupContext, memory: Memory, root: int, kernels: Arithmetic) -> Schedule:
    """Reduce one block on each rank and gather the blocks on the root; no rank receives more than twice the tensor."""
    rank, size = group.rank, group.size
    blocks = TensorBlocks.split(memory, size)
    own = Memory(blocks[rank].tensor.to(kernels.accumulator, copy=True), wire=memory.dtype)
    yield from pairwise.reduce_scatter(rank, size, blocks, own)
    if kernels.averages:
        divide(own.tensor, size)
    result = Memory(own.tensor.to(memory.dtype))
    results = TensorBlocks.split(memory, size)
    if rank == root:
        results[rank].tensor.copy_(result.tensor)
    yield from pairwise.gather(rank, size, root, result, results)


# -- reduce_scatter ---------------------------------------------------------------------------------


def reduce_scatter_list(group: GroupContext, output: Any, input_list: Any, op: Any) -> CallPlan:
    """Reduce ``input_list[i]`` over the ranks into rank ``i``'s output."""
    blocks = validation.listed(input_list, group.size, "input_list")
    return _reduce_scatter(group, output, input_list, blocks, reduction(op))


def reduce_scatter_single(group: GroupContext, output: Any, tensor: Any, op: Any) -> CallPlan:
    """Reduce the ``i``-th equal part of a tensor over the ranks into rank ``i``'s output."""
    blocks = validation.even(tensor, group.size, "input")
    return _reduce_scatter(group, output, tensor, blocks, reduction(op))


def _reduce_scatter(group: GroupContext, output: Any, inputs: Any, blocks: Any, op: Reduction) -> CallPlan:
    """Reduce block ``i`` of the inputs to rank ``i``'s output; inputs keep their content."""
    output, mine = validation.single(output), blocks[group.rank]
    count, dtype = output.numel(), output.dtype
    kernels = arithmetic(op, dtype)
    if mine.numel() != count or mine.dtype is not dtype:
        raise UsageError(
            f"the output has {count} x {dtype}, but this rank's block of the input has {mine.numel()} x {mine.dtype}"
        )
    counts = tuple(block.numel() for block in blocks)
    total = sum(counts)
    call, nbytes = fingerprint(Collective.reduce_scatter, dtype, total, op, None, counts), total * dtype.itemsize

    def scaled(output: torch.Tensor, inputs: Any) -> tuple[Any, ...]:
        return output, [_scaled(block.tensor, op) for block in block_memories(inputs, group.size)]

    arrange = scaled if isinstance(op, PremulSum) else None
    sizes = () if len(set(counts)) == 1 else counts
    signature = CallSignature(Collective.reduce_scatter, call, dtype, output.shape, kernels, sizes=sizes)
    if (plan := group.in_memory(signature, nbytes, arrange)) is not None:
        return plan
    hierarchical = group.hierarchical_for("reduce_scatter")
    if hierarchical is None and not kernels.widens:
        arguments = [output, inputs if arrange is None else list(blocks)]
        lanes = group.lanes(max(counts) * dtype.itemsize)
        records = [partial(_reduce_scatter_steps, group, counts, kernels, lane) for lane in lanes]
        return group.recorded(call, nbytes, records, arguments, kernels, arrange=arrange)

    def parts(output: torch.Tensor, inputs: Any) -> Iterable[Schedule]:
        memory = flat_memory(output)
        blocks = copy_overlapping_inputs(block_memories(inputs, group.size), [memory], {group.rank: 0})
        if hierarchical is not None:
            return hierarchical.reduce_scatter(blocks, memory, kernels, call)
        return [
            _reduce_scatter_wide(group, lane.of_each(blocks), lane.of(memory), kernels)
            for lane in group.lanes(max(counts) * dtype.itemsize)
        ]

    return group.in_parts(call, nbytes, parts, kernels.fold, arrange=arrange)


def _reduce_scatter_steps(
    group: GroupContext, counts: Sequence[int], kernels: Arithmetic, lane: Lane, result: Memory, inputs: Any
) -> Recording:
    blocks, result = lane.of_each(recorded_blocks(inputs, counts)), lane.of(result)
    yield LocalCopy(result, blocks[group.rank])
    yield from pairwise.reduce_scatter(group.rank, group.size, blocks, result)
    if kernels.averages:
        yield LocalDivision(result, group.size)


def _reduce_scatter_wide(group: GroupContext, blocks: Blocks, result: Memory, kernels: Arithmetic) -> Schedule:
    own = Memory(blocks[group.rank].tensor.to(kernels.accumulator), wire=result.dtype)
    yield from pairwise.reduce_scatter(group.rank, group.size, blocks, own)
    if kernels.averages:
        divide(own.tensor, group.size)
    result.tensor.copy_(own.tensor)
