"""Plans of the reductions: all_reduce, reduce, reduce_scatter.

Called by `operations`. Narrow floats (float16, bfloat16, float8) are accumulated in float32. Where a schedule passes
partial sums on, they travel as float32; where each rank receives the contributions themselves, those travel narrow and
are widened on arrival.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from asyncdist.algorithms import pairwise, recursive_doubling, ring, tree
from asyncdist.algorithms.schedule import Schedule
from asyncdist.base.ops import Collective, PremulSum, Reduction
from asyncdist.collectives import sparse, validation
from asyncdist.collectives.data_movement import GroupContext, fingerprint, segments, striped_blocks, stripes
from asyncdist.collectives.validation import reduction
from asyncdist.engine.operation import Plan
from asyncdist.errors import UsageError
from asyncdist.memory.buffers import Memory, OutputTensor, TensorBlocks, copy_overlapping_inputs, input_memory
from asyncdist.memory.reduce_kernels import Arithmetic, accumulator, arithmetic, divide, has_arithmetic
from asyncdist.transport.native import CallSignature

# Number of elements of a segment that is accumulated in separate memory.
_SEGMENT_COUNT = 1 << 20


def _scaled(tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
    if not isinstance(op, PremulSum):
        return tensor
    if has_arithmetic(tensor.dtype):
        return tensor * op.factor
    return (tensor.to(accumulator(tensor.dtype)) * op.factor).to(tensor.dtype)


def _prescale(memory: Memory, op: Reduction) -> None:
    if type(op) is PremulSum:
        memory.tensor.copy_(_scaled(memory.tensor, op))


def _kind(
    collective: Collective, call: int, tensor: torch.Tensor, op: Reduction, how: Arithmetic, root: int = -1
) -> CallSignature | None:
    """Return the signature that equal calls share; None if a call needs more work than the reduction."""
    return None if type(op) is PremulSum else CallSignature(collective, call, tensor.dtype, tensor.shape, how, root)


def all_reduce(who: GroupContext, tensor: Any, op: Reduction) -> Plan:
    """Reduce a tensor over the ranks, in place, the same bits on every rank."""
    op = reduction(op)
    if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
        return sparse.all_reduce(who, tensor, op)
    target = OutputTensor(tensor)
    memory = target.memory
    call, how = _all_reduce_call(memory.dtype, target.tensor.shape, op)

    def finish() -> Any:
        target.store()
        return tensor

    native = who.native_for("all_reduce")
    if native is not None:
        _prescale(memory, op)
        start = functools.partial(native.all_reduce, memories=(memory,), how=how)
        kind = _kind(Collective.all_reduce, call, target.tensor, op, how)
        return Plan(native=start, fingerprint=call, finish=finish, nbytes=memory.nbytes, kind=kind)
    islands = who.islands_for("all_reduce")
    if islands is not None:
        _prescale(memory, op)
        return Plan(islands.all_reduce([memory], op, call), call, how.fold, finish, islands.window, memory.nbytes)
    return Plan(_all_reduce_parts(who, memory, op, how), call, how.fold, finish, who.window, memory.nbytes)


@lru_cache(maxsize=4096)
def _all_reduce_call(dtype: torch.dtype, shape: tuple[int, ...], op: Reduction) -> tuple[int, Arithmetic]:
    return fingerprint(Collective.all_reduce, dtype, shape, op, None), arithmetic(op, dtype)


def all_reduce_coalesced(who: GroupContext, tensors: Sequence[Any], op: Reduction) -> Plan:
    """Reduce several tensors of one dtype over the ranks, in place, as one operation."""
    op = reduction(op)
    if not tensors:
        raise UsageError("at least one tensor is needed")
    targets = [OutputTensor(tensor) for tensor in tensors]
    memories = validation.one_dtype([target.memory for target in targets], "tensors")
    how = arithmetic(op, memories[0].dtype)
    counts = tuple(memory.count for memory in memories)
    count = sum(counts)
    call = fingerprint(Collective.all_reduce_coalesced, memories[0].dtype, count, op, None, counts)
    finish, nbytes = validation.storing(targets, list(tensors)), count * memories[0].itemsize
    native = who.native_for("all_reduce")
    if native is not None:
        for memory in memories:
            _prescale(memory, op)
        start = functools.partial(native.all_reduce, memories=memories, how=how)
        return Plan(native=start, fingerprint=call, finish=finish, nbytes=nbytes)
    islands = who.islands_for("all_reduce")
    if islands is not None:
        for memory in memories:
            _prescale(memory, op)
        return Plan(islands.all_reduce(memories, op, call), call, how.fold, finish, islands.window, nbytes)
    return Plan(
        (part for memory in memories for part in _all_reduce_parts(who, memory, op, how)),
        call,
        how.fold,
        finish,
        who.window,
        nbytes,
    )


def _all_reduce_parts(
    who: GroupContext, memory: Memory, op: Reduction, how: Arithmetic
) -> Sequence[Schedule] | Iterator[Schedule]:
    _prescale(memory, op)
    algorithm = who.choose("all_reduce", memory.nbytes)
    if how.widens:
        return (_all_reduce_wide(who, part, how, algorithm) for part in segments(memory, _SEGMENT_COUNT))
    return [_all_reduce(who, part, how, algorithm) for part in stripes(who, memory)]


def _all_reduce(who: GroupContext, memory: Memory, how: Arithmetic, algorithm: str) -> Schedule:
    rank, size = who.rank, who.size
    if algorithm == "doubling":
        scratch = who.scratch.take(memory.count, memory.dtype)
        yield from recursive_doubling.all_reduce(rank, size, memory, scratch)
        who.scratch.give(scratch)
        if how.averages:
            divide(memory.tensor, size)
    elif algorithm == "halving":
        blocks = TensorBlocks.split(memory, recursive_doubling.floor_power_of_two(size))
        yield from recursive_doubling.halving_all_reduce(rank, size, blocks)
        if how.averages:
            divide(memory.tensor, size)
    else:
        blocks = TensorBlocks.split(memory, size)
        yield from ring.reduce_scatter(rank, size, blocks)
        # Each rank divides its own block before the other ranks receive it.
        if how.averages:
            divide(blocks[rank].tensor, size)
        yield from ring.all_gather(rank, size, blocks)


def _all_reduce_wide(who: GroupContext, memory: Memory, how: Arithmetic, algorithm: str) -> Schedule:
    """All-reduce narrow floats with every sum accumulated in float32 and rounded once.

    Small ones travel as float32. Large ones travel narrow: each rank receives all contributions to its own block.
    """
    rank, size = who.rank, who.size
    small = algorithm == "doubling"
    blocks = TensorBlocks.split(memory, 1 if small else size)
    mine = blocks[0 if small else rank]
    own = Memory(mine.tensor.to(how.accumulator), wire=None if small else memory.dtype)
    if small:
        yield from recursive_doubling.all_reduce(rank, size, own, Memory(torch.empty_like(own.tensor)))
    else:
        yield from pairwise.reduce_scatter(rank, size, blocks, own)
    if how.averages:
        divide(own.tensor, size)
    mine.tensor.copy_(own.tensor)
    if not small:
        yield from ring.all_gather(rank, size, blocks)


def reduce(who: GroupContext, tensor: Any, root: int, op: Reduction) -> Plan:
    """Reduce the tensor to ``root``; the tensors of the other ranks keep their content."""
    who.peer(root, "dst")
    op = reduction(op)
    at_root = who.rank == root
    target = OutputTensor(tensor) if at_root else None
    memory = target.memory if target is not None else input_memory(tensor)
    dtype = memory.dtype
    how = arithmetic(op, dtype)

    def finish() -> Any:
        if target is not None:
            target.store()
        return tensor

    call = fingerprint(Collective.reduce, dtype, tuple(tensor.shape), op, root)
    native, islands = who.native_for("reduce"), who.islands_for("reduce")
    if native is not None or islands is not None:
        if at_root:
            _prescale(memory, op)
        own = memory if at_root or not isinstance(op, PremulSum) else Memory(_scaled(memory.tensor, op))
        if islands is not None:
            return Plan(islands.reduce(own, root, op, call), call, how.fold, finish, islands.window, memory.nbytes)
        assert native is not None
        start = functools.partial(native.reduce, memory=own, root=root, how=how)
        kind = _kind(Collective.reduce, call, tensor, op, how, root)
        return Plan(native=start, fingerprint=call, finish=finish, nbytes=memory.nbytes, kind=kind)
    algorithm = who.choose("reduce", memory.nbytes)
    run = _reduce_tree if algorithm == "tree" else _reduce_scattered
    return Plan(
        (run(who, segment, root, op, how) for segment in segments(memory, _SEGMENT_COUNT)),
        call,
        how.fold,
        finish,
        window=who.window,
        nbytes=memory.nbytes,
    )


def _reduce_tree(who: GroupContext, memory: Memory, root: int, op: Reduction, how: Arithmetic) -> Schedule:
    in_place = who.rank == root and not how.widens and not isinstance(op, PremulSum)
    own = memory if in_place else Memory(_scaled(memory.tensor, op).to(how.accumulator, copy=True))
    yield from tree.reduce(who.rank, who.size, root, own)
    if who.rank == root:
        if how.averages:
            divide(own.tensor, who.size)
        if own is not memory:
            memory.tensor.copy_(own.tensor)


def _reduce_scattered(who: GroupContext, memory: Memory, root: int, op: Reduction, how: Arithmetic) -> Schedule:
    """Each rank reduces a block of its own, and the root collects them: twice the bytes of a leaf, no hot spot."""
    rank, size = who.rank, who.size
    blocks = TensorBlocks.split(Memory(_scaled(memory.tensor, op)), size)
    own = Memory(blocks[rank].tensor.to(how.accumulator, copy=True), wire=memory.dtype)
    yield from pairwise.reduce_scatter(rank, size, blocks, own)
    if how.averages:
        divide(own.tensor, size)
    result = Memory(own.tensor.to(memory.dtype))
    results = TensorBlocks.split(memory, size)
    if rank == root:
        results[rank].tensor.copy_(result.tensor)
    yield from pairwise.gather(rank, size, root, result, results)


def reduce_scatter_list(who: GroupContext, output: Any, input_list: Sequence[Any], op: Reduction) -> Plan:
    """Reduce ``input_list[i]`` over the ranks into rank ``i``'s output."""
    return reduce_scatter(who, output, validation.listed(input_list, who.size, "input_list"), op)


def reduce_scatter_single(who: GroupContext, output: Any, tensor: Any, op: Reduction) -> Plan:
    """Reduce the ``i``-th equal part of a tensor over the ranks into rank ``i``'s output."""
    return reduce_scatter(who, output, validation.even(input_memory(tensor), who.size, "input"), op)


def reduce_scatter(who: GroupContext, output: Any, inputs: Sequence[Memory] | TensorBlocks, op: Reduction) -> Plan:
    """Reduce block ``i`` of ``inputs`` to rank ``i``'s output; inputs keep their content."""
    op = reduction(op)
    target = OutputTensor(output)
    memory, dtype = target.memory, target.memory.dtype
    how = arithmetic(op, dtype)
    own_input = inputs[who.rank]
    if own_input.count != memory.count or own_input.dtype is not dtype:
        raise UsageError(
            f"the output has {memory.count} x {dtype}, but this rank's block of the input "
            f"has {own_input.count} x {own_input.dtype}"
        )
    if isinstance(op, PremulSum):
        inputs = [Memory(_scaled(inputs[rank].tensor, op)) for rank in range(who.size)]
    inputs = copy_overlapping_inputs(inputs, [memory], {who.rank: 0})
    own_input = inputs[who.rank]
    counts = tuple(inputs[rank].count for rank in range(who.size))
    total = sum(counts)
    call = fingerprint(Collective.reduce_scatter, dtype, total, op, None, counts)
    native = who.native_for("reduce_scatter")
    if native is not None:
        start = functools.partial(native.reduce_scatter, inputs=inputs, own=memory, how=how)
        finish = validation.storing([target], output)
        alike = total == memory.count * who.size == max(counts) * who.size
        kind = _kind(Collective.reduce_scatter, call, target.tensor, op, how) if alike else None
        return Plan(native=start, fingerprint=call, finish=finish, nbytes=total * dtype.itemsize, kind=kind)
    islands = who.islands_for("reduce_scatter")
    if islands is not None:
        parts = islands.reduce_scatter(inputs, memory, op, call)
        finish = validation.storing([target], output)
        return Plan(parts, call, how.fold, finish, islands.window, total * dtype.itemsize)
    own = Memory(own_input.tensor.to(how.accumulator), wire=dtype) if how.widens else memory
    if own is memory:
        memory.tensor.copy_(own_input.tensor)

    def part(blocks: list[Memory] | TensorBlocks, accumulated: Memory) -> Schedule:
        yield from pairwise.reduce_scatter(who.rank, who.size, blocks, accumulated)

    def divided() -> Any:
        if how.averages:
            divide(own.tensor, who.size)
        if own is not memory:
            memory.tensor.copy_(own.tensor)
        target.store()
        return output

    cut = list(striped_blocks(who, inputs))
    owns = TensorBlocks.split(own, len(cut))
    return Plan(
        (part(blocks, owns[number]) for number, blocks in enumerate(cut)),
        call,
        how.fold,
        divided,
        window=who.window,
        nbytes=total * dtype.itemsize,
    )
