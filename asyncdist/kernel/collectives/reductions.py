"""Prepares the reductions: all_reduce, reduce, reduce_scatter.

Narrow floats (float16, bfloat16, float8) are accumulated in float32. Schedules that send partial sums send float32.
Schedules that send the contributions themselves send them narrow, and the receiver widens them. `data_movement` describes
the arguments and results of these functions; `sparse` plans the all-reduce of sparse tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from asyncdist.base.ops import Collective, PremulSum, Reduction
from asyncdist.errors import UsageError
from asyncdist.kernel.algorithms import pairwise, recursive_doubling, ring, tree
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.collectives import validation
from asyncdist.kernel.collectives.arguments import list_of
from asyncdist.kernel.collectives.call_plan import CallPlan
from asyncdist.kernel.collectives.group_context import Cut, GroupContext, fingerprint, segments, striped_blocks, stripes
from asyncdist.kernel.collectives.recorded import (
    LocalCopy,
    LocalDivision,
    Recording,
    performed,
    recorded_blocks,
)
from asyncdist.kernel.collectives.validation import reduction
from asyncdist.kernel.memory.buffers import Memory, Scratch, TensorBlocks, copy_overlapping_inputs, flat_memory
from asyncdist.kernel.memory.reduce_kernels import Arithmetic, accumulator, arithmetic, divide, has_arithmetic
from asyncdist.kernel.transport.native import CallSignature

# Elements of a segment that is accumulated in separate memory.
_SEGMENT_COUNT = 1 << 20

OverLinks = Callable[[torch.Tensor], Iterable[Schedule]]
"""Makes the schedules over links of a call with one tensor."""


def _scaled(tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
    if not isinstance(op, PremulSum):
        return tensor
    if has_arithmetic(tensor.dtype):
        return tensor * op.factor
    return (tensor.to(accumulator(tensor.dtype)) * op.factor).to(tensor.dtype)


def _prescale(memory: Memory, op: Reduction) -> None:
    if type(op) is PremulSum:
        memory.tensor.copy_(_scaled(memory.tensor, op))


def _prescaling(op: PremulSum, *, in_place: bool) -> Callable[[torch.Tensor], tuple[Any, ...]]:
    """Return a function that scales the tensor of a call, in place or into a copy."""
    return lambda tensor: (tensor.copy_(_scaled(tensor, op)) if in_place else _scaled(tensor, op),)


# -- all_reduce -------------------------------------------------------------------------------------


def all_reduce(group: GroupContext, tensor: Any, op: Any) -> CallPlan:
    """Reduce a tensor over the ranks, in place, the same bits on every rank."""
    tensor, op = validation.single(tensor), reduction(op)
    dtype, nbytes = tensor.dtype, tensor.nbytes
    kernels = arithmetic(op, dtype)
    call = fingerprint(Collective.all_reduce, dtype, tensor.shape, op, None)
    signature = CallSignature(Collective.all_reduce, call, dtype, tensor.shape, kernels)
    arrange = _prescaling(op, in_place=True) if type(op) is PremulSum else None
    if (plan := group.in_memory(signature, nbytes, arrange)) is not None:
        return plan
    if (hierarchical := group.hierarchical_for("all_reduce")) is not None:
        small = hierarchical.small_all_reduce(nbytes, kernels, call)

        def scaled(tensor: torch.Tensor) -> Memory:
            memory = flat_memory(tensor)
            _prescale(memory, op)
            return memory

        if small is not None:
            return group.in_parts(call, nbytes, lambda tensor: (small(scaled(tensor)),), kernels.fold)
        return group.in_parts(
            call, nbytes, lambda tensor: hierarchical.all_reduce([scaled(tensor)], kernels, call), kernels.fold
        )
    algorithm = group.choose("all_reduce", nbytes)
    if _is_recorded(group, nbytes, op, kernels, keeps_scratch=algorithm == "doubling"):
        steps = partial(_all_reduce_steps, group, kernels, algorithm, None)
        return group.recorded(call, nbytes, steps, [tensor], kernels.fold)
    over_links = _all_reduce_over_links(group, nbytes, dtype, op, kernels)
    return group.in_parts(call, nbytes, over_links, kernels.fold, group.window)


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
        flat = [flat_memory(tensor) for tensor in tensors]
        for memory in flat:
            _prescale(memory, op)
        return (flat[0].tensor if len(flat) == 1 else [memory.tensor for memory in flat],)

    collective = Collective.all_reduce if len(counts) == 1 else Collective.all_reduce_coalesced
    sizes = () if len(counts) == 1 else counts
    signature = CallSignature(collective, call, dtype, (sum(counts),), kernels, sizes=sizes)
    if (plan := group.in_memory(signature, nbytes, arrange)) is not None:
        return plan
    hierarchical = group.hierarchical_for("all_reduce")
    each_over_links = [_all_reduce_over_links(group, count * dtype.itemsize, dtype, op, kernels) for count in counts]

    def parts(tensors: Any) -> Iterable[Schedule]:
        if hierarchical is None:
            return (part for tensor, run in zip(tensors, each_over_links, strict=True) for part in run(tensor))
        flat = [flat_memory(tensor) for tensor in tensors]
        for memory in flat:
            _prescale(memory, op)
        return hierarchical.all_reduce(flat, kernels, call)

    window = group.window if hierarchical is None else hierarchical.window
    return group.in_parts(call, nbytes, parts, kernels.fold, window)


def _all_reduce_over_links(
    group: GroupContext, nbytes: int, dtype: torch.dtype, op: Reduction, kernels: Arithmetic
) -> OverLinks:
    """Return a function that makes the schedules of an all-reduce of ``nbytes`` bytes over links."""
    algorithm = group.choose("all_reduce", nbytes, widening=kernels.accumulator.itemsize // dtype.itemsize)
    steps = partial(_all_reduce_steps, group, kernels, algorithm, group.scratch)
    small, whole = algorithm == "doubling", type(op) is not PremulSum and not group.is_striped(nbytes // group.size)

    def narrow(tensor: torch.Tensor) -> Iterable[Schedule]:
        memory = flat_memory(tensor)
        if whole:
            return (performed(steps(memory)),)
        _prescale(memory, op)
        return [performed(steps(part)) for part in stripes(group, memory, blocks=group.size)]

    def wide(tensor: torch.Tensor) -> Iterable[Schedule]:
        memory = flat_memory(tensor)
        _prescale(memory, op)
        return (_all_reduce_wide(group, part, kernels, small) for part in segments(memory, _SEGMENT_COUNT))

    return wide if kernels.widens else narrow


def _is_recorded(
    group: GroupContext, nbytes: int, op: Reduction, kernels: Arithmetic, *, keeps_scratch: bool = False
) -> bool:
    """Return whether the steps of a reduction over links are recorded: it is small, and needs no copy of its input."""
    return group.is_recorded(nbytes, keeps_scratch=keeps_scratch) and not kernels.widens and type(op) is not PremulSum


def _all_reduce_steps(
    group: GroupContext, kernels: Arithmetic, algorithm: str, pool: Scratch | None, memory: Memory
) -> Recording:
    """Return the steps of an all-reduce; without a ``pool`` its scratch is kept with them."""
    rank, size = group.rank, group.size
    if algorithm == "ring":
        blocks = TensorBlocks.split(memory, size)
        yield from ring.reduce_scatter(rank, size, blocks)
        # Each rank divides its own block before the other ranks receive it.
        if kernels.averages:
            yield LocalDivision(blocks[rank], size)
        yield from ring.all_gather(rank, size, blocks)
        return
    if algorithm == "halving":
        blocks = TensorBlocks.split(memory, recursive_doubling.floor_power_of_two(size))
        yield from recursive_doubling.halving_all_reduce(rank, size, blocks)
    else:
        scratch = (pool or Scratch()).take(memory.count, memory.dtype)
        yield from recursive_doubling.all_reduce(rank, size, memory, scratch)
        if pool is not None:
            pool.give(scratch)
    if kernels.averages:
        yield LocalDivision(memory, size)


def _all_reduce_wide(group: GroupContext, memory: Memory, kernels: Arithmetic, small: bool) -> Schedule:
    """All-reduce narrow floats; every sum is accumulated in float32 and rounded once.

    Small tensors are sent as float32. Of large ones each rank receives all contributions to its block, which are narrow.
    """
    rank, size = group.rank, group.size
    blocks = TensorBlocks.split(memory, 1 if small else size)
    mine = blocks[0 if small else rank]
    own = Memory(mine.tensor.to(kernels.accumulator), wire=None if small else memory.dtype)
    if small:
        yield from recursive_doubling.all_reduce(rank, size, own, Memory(torch.empty_like(own.tensor)))
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
    arrange = _prescaling(op, in_place=at_root) if type(op) is PremulSum else None
    if (plan := group.in_memory(signature, nbytes, arrange)) is not None:
        return plan
    if (hierarchical := group.hierarchical_for("reduce")) is not None:

        def parts(tensor: torch.Tensor) -> Iterable[Schedule]:
            memory = flat_memory(tensor)
            if at_root:
                _prescale(memory, op)
            elif isinstance(op, PremulSum):
                memory = Memory(_scaled(memory.tensor, op))
            return hierarchical.reduce(memory, root, kernels, call)

        return group.in_parts(call, nbytes, parts, kernels.fold)
    in_tree = group.choose("reduce", nbytes) == "tree"
    if in_tree and _is_recorded(group, nbytes, op, kernels, keeps_scratch=True):
        return group.recorded(call, nbytes, _recorded_reduce(group, root, kernels), [tensor], kernels.fold)
    run = _reduce_tree if in_tree else _reduce_scattered

    def segment_parts(tensor: torch.Tensor) -> Iterable[Schedule]:
        memory = flat_memory(tensor)
        return (run(group, segment, root, op, kernels) for segment in segments(memory, _SEGMENT_COUNT))

    return group.in_parts(call, nbytes, segment_parts, kernels.fold, group.window)


def _recorded_reduce(group: GroupContext, root: int, kernels: Arithmetic) -> Callable[..., Recording]:
    rank, size = group.rank, group.size

    def record(memory: Memory) -> Recording:
        own = memory
        if rank != root:
            own = Memory(torch.empty(memory.count, dtype=memory.dtype, device="cpu"))
            yield LocalCopy(own, memory)
        yield from tree.reduce(rank, size, root, own)
        if rank == root and kernels.averages:
            yield LocalDivision(own, size)

    return record


def _reduce_tree(group: GroupContext, memory: Memory, root: int, op: Reduction, kernels: Arithmetic) -> Schedule:
    in_place = group.rank == root and not kernels.widens and not isinstance(op, PremulSum)
    own = memory if in_place else Memory(_scaled(memory.tensor, op).to(kernels.accumulator, copy=True))
    yield from tree.reduce(group.rank, group.size, root, own)
    if group.rank == root:
        if kernels.averages:
            divide(own.tensor, group.size)
        if own is not memory:
            memory.tensor.copy_(own.tensor)


def _reduce_scattered(group: GroupContext, memory: Memory, root: int, op: Reduction, kernels: Arithmetic) -> Schedule:
    """Reduce one block on each rank and gather the blocks on the root; no rank receives more than twice the tensor."""
    rank, size = group.rank, group.size
    blocks = TensorBlocks.split(Memory(_scaled(memory.tensor, op)), size)
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
    return _reduce_scatter(group, output, input_list, blocks, reduction(op), group.blocks)


def reduce_scatter_single(group: GroupContext, output: Any, tensor: Any, op: Any) -> CallPlan:
    """Reduce the ``i``-th equal part of a tensor over the ranks into rank ``i``'s output."""
    blocks = validation.even(tensor, group.size, "input")
    return _reduce_scatter(group, output, tensor, blocks, reduction(op), group.equal_blocks)


def _reduce_scatter(group: GroupContext, output: Any, inputs: Any, blocks: Any, op: Reduction, cut: Cut) -> CallPlan:
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
        cut_inputs = cut(inputs)
        return output, [_scaled(cut_inputs[rank].tensor, op) for rank in range(group.size)]

    sizes = () if len(set(counts)) == 1 else counts
    signature = CallSignature(Collective.reduce_scatter, call, dtype, output.shape, kernels, sizes=sizes)
    if (plan := group.in_memory(signature, nbytes, scaled if isinstance(op, PremulSum) else None)) is not None:
        return plan
    hierarchical = group.hierarchical_for("reduce_scatter")
    if hierarchical is None and _is_recorded(group, nbytes, op, kernels):
        record = _recorded_reduce_scatter(group, counts, kernels)
        return group.recorded(call, nbytes, record, [output, inputs], kernels.fold)

    def parts(output: torch.Tensor, inputs: Any) -> Iterable[Schedule]:
        memory, blocks = flat_memory(output), cut(inputs)
        if isinstance(op, PremulSum):
            blocks = [Memory(_scaled(blocks[rank].tensor, op)) for rank in range(group.size)]
        blocks = copy_overlapping_inputs(blocks, [memory], {group.rank: 0})
        if hierarchical is not None:
            return hierarchical.reduce_scatter(blocks, memory, kernels, call)
        stripes = list(striped_blocks(group, blocks))
        results = TensorBlocks.split(memory, len(stripes))
        return [_reduce_scatter_part(group, each, results[lane], kernels) for lane, each in enumerate(stripes)]

    window = group.window if hierarchical is None else hierarchical.window
    return group.in_parts(call, nbytes, parts, kernels.fold, window)


def _recorded_reduce_scatter(
    group: GroupContext, counts: Sequence[int], kernels: Arithmetic
) -> Callable[..., Recording]:
    rank, size = group.rank, group.size

    def record(result: Memory, inputs: Memory | list[Memory]) -> Recording:
        blocks = recorded_blocks(inputs, counts)
        yield LocalCopy(result, blocks[rank])
        yield from pairwise.reduce_scatter(rank, size, blocks, result)
        if kernels.averages:
            yield LocalDivision(result, size)

    return record


def _reduce_scatter_part(
    group: GroupContext, blocks: list[Memory] | TensorBlocks, result: Memory, kernels: Arithmetic
) -> Schedule:
    mine = blocks[group.rank].tensor
    own = Memory(mine.to(kernels.accumulator), wire=result.dtype) if kernels.widens else result
    if own is result:
        result.tensor.copy_(mine)
    yield from pairwise.reduce_scatter(group.rank, group.size, blocks, own)
    if kernels.averages:
        divide(own.tensor, group.size)
    if own is not result:
        result.tensor.copy_(own.tensor)
