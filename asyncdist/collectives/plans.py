"""From a call with tensors to a plan: which schedule, over which memory, with what arithmetic around it.

Each function takes the caller (`Member`) and the call's arguments (peers as ranks in the group), checks them, and
returns a `Plan`. Large tensors are cut into parts: one a lane where there are several, and segments where a part needs
memory of its own, of which a window of two is open at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from asyncdist.buffers import DTYPE_NUMBERS, NOTHING, Blocks, Memory, Scratch, Target, to_read
from asyncdist.collectives import arguments, doubling, pairwise, ring, tree
from asyncdist.collectives.choose import Model, choose
from asyncdist.collectives.executor import Plan
from asyncdist.collectives.schedule import Recv, Schedule, Send
from asyncdist.config import Config
from asyncdist.errors import UsageError
from asyncdist.framing import Fingerprint, shape_checksum
from asyncdist.ops import Collective, PremulSum, ReduceOp, Reduction
from asyncdist.reduce import accumulator, check, fold_of, kernel_of

_WINDOW = 2
_SEGMENT_COUNT = 1 << 20  # elements of a segment that is accumulated in memory of its own


@dataclass(frozen=True, slots=True)
class Member:
    """Who calls: rank and size in the group, and the world's settings."""

    rank: int
    size: int
    config: Config
    model: Model
    forced: dict[str, str]
    scratch: Scratch

    def choose(self, collective: str, nbytes: int, *, contiguous: bool = True) -> str:
        """Return the schedule for a size."""
        return choose(collective, nbytes, self.size, model=self.model, forced=self.forced, contiguous=contiguous)


@lru_cache(maxsize=4096)
def _fingerprint(
    collective: Collective,
    dtype: torch.dtype | None,
    shape: tuple[int, ...] | int,
    op: Reduction | None,
    root: int | None,
) -> int:
    count = shape if isinstance(shape, int) else torch.Size(shape).numel()
    return Fingerprint(
        collective=collective,
        dtype=0 if dtype is None else DTYPE_NUMBERS[dtype],
        reduction=0 if op is None else ReduceOp[op.name].value,
        root=0 if root is None else root + 1,
        count=count & 0xFFFFFF,
        shape=0 if isinstance(shape, int) else shape_checksum(shape),
    ).pack()


def _stripes(who: Member, memory: Memory) -> Iterable[Memory]:
    """Cut memory into one part a lane if it is large enough for several."""
    lanes = who.config.lanes
    if lanes <= 1 or memory.nbytes < who.config.stripe_nbytes:
        return (memory,)
    parts = Blocks.split(memory, lanes)
    return [parts[lane] for lane in range(lanes)]


def _segments(memory: Memory, count: int) -> Iterator[Memory]:
    for start in range(0, max(1, memory.count), count):
        yield memory.slice(start, min(memory.count, start + count))


def _striped_blocks(who: Member, blocks: Sequence[Memory] | Blocks) -> Iterable[list[Memory] | Blocks]:
    """Cut every block into one part a lane; block ``i`` of each part belongs to rank ``i`` still."""
    lanes = who.config.lanes
    if lanes <= 1 or sum(blocks[rank].nbytes for rank in range(who.size)) < who.config.stripe_nbytes:
        return (blocks,) if isinstance(blocks, Blocks) else (list(blocks),)
    cut = [Blocks.split(blocks[rank], lanes) for rank in range(who.size)]
    return [[block[lane] for block in cut] for lane in range(lanes)]


def _average(memory: Memory, op: Reduction, size: int) -> None:
    if op is ReduceOp.AVG:
        memory.tensor.div_(size)


def _scaled(tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
    return tensor * op.factor if isinstance(op, PremulSum) else tensor


def _widens(op: Reduction, dtype: torch.dtype) -> bool:
    """Say whether a reduction needs an accumulator of another dtype: narrow sums and products, and what lacks kernels."""
    if accumulator(op, dtype) is dtype:
        return False
    return kernel_of(op) in (ReduceOp.SUM, ReduceOp.PRODUCT) or dtype.itemsize == 1


# -- reductions -----------------------------------------------------------------------------------


def all_reduce(who: Member, tensors: Sequence[Any], op: Reduction, *, coalesced: bool = False) -> Plan:
    """Reduce each tensor over the ranks, in place, the same result on every rank."""
    targets = [Target(tensor) for tensor in tensors]
    dtype = targets[0].tensor.dtype
    if any(target.tensor.dtype is not dtype for target in targets):
        raise UsageError("all tensors of one coalesced operation must have the same dtype")
    check(op, dtype)
    collective = Collective.all_reduce_coalesced if coalesced else Collective.all_reduce
    shape: Any = targets[0].tensor.shape if len(targets) == 1 else sum(target.memory.count for target in targets)

    def parts() -> Iterator[Schedule]:
        for target in targets:
            if isinstance(op, PremulSum):
                target.memory.tensor.mul_(op.factor)
            memory = target.memory
            algorithm = who.choose("all_reduce", memory.nbytes)
            if not _widens(op, dtype):
                yield from (_all_reduce(who, stripe, op, algorithm) for stripe in _stripes(who, memory))
            else:
                yield from (_all_reduce_wide(who, s, op, algorithm) for s in _segments(memory, _SEGMENT_COUNT))

    def finish() -> Any:
        for target in targets:
            target.store()
        return list(tensors) if coalesced else tensors[0]

    return Plan(
        parts(),
        _fingerprint(collective, dtype, shape, op, None),
        fold_of(op, accumulator(op, dtype) if _widens(op, dtype) else dtype),
        finish,
        window=max(_WINDOW, who.config.lanes),
        nbytes=sum(target.memory.nbytes for target in targets),
    )


def _all_reduce(who: Member, memory: Memory, op: Reduction, algorithm: str) -> Schedule:
    rank, size = who.rank, who.size
    if algorithm == "doubling":
        scratch = who.scratch.take(memory.count, memory.dtype)
        yield from doubling.all_reduce(rank, size, memory, scratch)
        who.scratch.give(scratch)
        _average(memory, op, size)
    elif algorithm == "halving":
        blocks = Blocks.split(memory, doubling.floor_power_of_two(size))
        yield from doubling.halving_all_reduce(rank, size, blocks)
        _average(memory, op, size)
    else:
        blocks = Blocks.split(memory, size)
        yield from ring.reduce_scatter(rank, size, blocks)
        _average(blocks[rank], op, size)
        yield from ring.all_gather(rank, size, blocks)


def _all_reduce_wide(who: Member, memory: Memory, op: Reduction, algorithm: str) -> Schedule:
    """All-reduce narrow floats with every sum accumulated in float32 and rounded once.

    Small ones travel as float32. Large ones travel narrow: each rank receives all contributions to its own block.
    """
    rank, size, wide = who.rank, who.size, accumulator(op, memory.dtype)
    if algorithm == "doubling":
        own = Memory(memory.tensor.to(wide))
        yield from doubling.all_reduce(rank, size, own, Memory(torch.empty_like(own.tensor)))
        _average(own, op, size)
        memory.tensor.copy_(own.tensor)
    else:
        blocks = Blocks.split(memory, size)
        own = Memory(blocks[rank].tensor.to(wide), wire=memory.dtype)
        yield from pairwise.reduce_scatter(rank, size, blocks, own)
        _average(own, op, size)
        blocks[rank].tensor.copy_(own.tensor)
        yield from ring.all_gather(rank, size, blocks)


def reduce(who: Member, tensor: Any, root: int, op: Reduction) -> Plan:
    """Reduce the tensor to ``root``; the others' tensors keep their content."""
    at_root = who.rank == root
    target = Target(tensor) if at_root else None
    memory = target.memory if target is not None else to_read(tensor)
    dtype = memory.dtype
    check(op, dtype)
    algorithm = who.choose("reduce", memory.nbytes)
    wide = accumulator(op, dtype) if _widens(op, dtype) else dtype
    run = _reduce_tree if algorithm == "tree" else _reduce_scattered

    def finish() -> Any:
        if target is not None:
            target.store()
        return tensor

    return Plan(
        (run(who, segment, root, op, wide) for segment in _segments(memory, _SEGMENT_COUNT)),
        _fingerprint(Collective.reduce, dtype, tuple(tensor.shape), op, root),
        fold_of(op, wide),
        finish,
        window=max(_WINDOW, who.config.lanes),
        nbytes=memory.nbytes,
    )


def _reduce_tree(who: Member, memory: Memory, root: int, op: Reduction, wide: torch.dtype) -> Schedule:
    in_place = who.rank == root and wide is memory.dtype and not isinstance(op, PremulSum)
    own = memory if in_place else Memory(_scaled(memory.tensor, op).to(wide, copy=True))
    yield from tree.reduce(who.rank, who.size, root, own)
    if who.rank == root:
        _average(own, op, who.size)
        if own is not memory:
            memory.tensor.copy_(own.tensor)


def _reduce_scattered(who: Member, memory: Memory, root: int, op: Reduction, wide: torch.dtype) -> Schedule:
    """Each rank reduces a block of its own, and the root collects them: twice the bytes of a leaf, no hot spot."""
    rank, size = who.rank, who.size
    blocks = Blocks.split(Memory(_scaled(memory.tensor, op)), size)
    own = Memory(blocks[rank].tensor.to(wide, copy=True), wire=memory.dtype)
    yield from pairwise.reduce_scatter(rank, size, blocks, own)
    _average(own, op, size)
    result = Memory(own.tensor.to(memory.dtype))
    results = Blocks.split(memory, size)
    if rank == root:
        results[rank].tensor.copy_(result.tensor)
    yield from pairwise.gather(rank, size, root, result, results)


def reduce_scatter_list(who: Member, output: Any, input_list: Sequence[Any], op: Reduction) -> Plan:
    """Reduce ``input_list[i]`` over the ranks into rank ``i``'s output."""
    return reduce_scatter(who, output, arguments.listed(input_list, who.size, "input_list"), op)


def reduce_scatter_single(who: Member, output: Any, tensor: Any, op: Reduction) -> Plan:
    """Reduce the ``i``-th equal part of a tensor over the ranks into rank ``i``'s output."""
    return reduce_scatter(who, output, arguments.even(to_read(tensor), who.size, "input"), op)


def reduce_scatter(who: Member, output: Any, inputs: Sequence[Memory] | Blocks, op: Reduction) -> Plan:
    """Reduce block ``i`` of ``inputs`` to rank ``i``'s output; inputs keep their content."""
    target = Target(output)
    memory, dtype = target.memory, target.memory.dtype
    check(op, dtype)
    own_input = inputs[who.rank]
    if own_input.count != memory.count or own_input.dtype is not dtype:
        raise UsageError(
            f"the output has {memory.count} x {dtype}, but this rank's block of the input "
            f"has {own_input.count} x {own_input.dtype}"
        )
    if isinstance(op, PremulSum):
        inputs = [Memory(_scaled(inputs[rank].tensor, op)) for rank in range(who.size)]
        own_input = inputs[who.rank]
    wide = accumulator(op, dtype) if _widens(op, dtype) else dtype
    own = memory if wide is dtype else Memory(own_input.tensor.to(wide), wire=dtype)
    if own is memory:
        memory.tensor.copy_(own_input.tensor)
    total = sum(inputs[rank].count for rank in range(who.size))

    def part(blocks: list[Memory] | Blocks, accumulated: Memory) -> Schedule:
        yield from pairwise.reduce_scatter(who.rank, who.size, blocks, accumulated)

    def finish() -> Any:
        _average(own, op, who.size)
        if own is not memory:
            memory.tensor.copy_(own.tensor)
        target.store()
        return output

    stripes = list(_striped_blocks(who, inputs))
    owns = Blocks.split(own, len(stripes))
    return Plan(
        (part(blocks, owns[number]) for number, blocks in enumerate(stripes)),
        _fingerprint(Collective.reduce_scatter, dtype, total, op, None),
        fold_of(op, wide),
        finish,
        window=max(_WINDOW, who.config.lanes),
        nbytes=total * dtype.itemsize,
    )


# -- moving ---------------------------------------------------------------------------------------


def broadcast(who: Member, tensor: Any, root: int) -> Plan:
    """Copy the root's tensor to every rank."""
    target = Target(tensor)
    memory = target.memory
    if who.choose("broadcast", memory.nbytes) == "tree":
        parts: Iterable[Schedule] = (
            tree.broadcast(who.rank, who.size, root, stripe) for stripe in _stripes(who, memory)
        )
    else:
        count = max(1, who.config.segment_nbytes // memory.itemsize)
        parts = (tree.chain_broadcast(who.rank, who.size, root, segment) for segment in _segments(memory, count))

    def finish() -> Any:
        target.store()
        return tensor

    fingerprint = _fingerprint(Collective.broadcast, memory.dtype, tuple(target.tensor.shape), None, root)
    return Plan(iter(parts), fingerprint, None, finish, window=max(4, who.config.lanes), nbytes=memory.nbytes)


def all_gather_lists(
    who: Member, pairs: Sequence[tuple[Sequence[Any], Any]], value: Any, what: str = "tensor_list"
) -> Plan:
    """Gather each pair's tensor into its list, one entry a rank; several pairs are coalesced."""
    rows = [(arguments.targets(outputs, who.size, what), to_read(tensor)) for outputs, tensor in pairs]
    finish = arguments.storing([target for row, _ in rows for target in row], value)
    return all_gather(who, [([target.memory for target in row], own) for row, own in rows], finish)


def all_gather_single(who: Member, output: Any, tensor: Any) -> Plan:
    """Gather every rank's tensor into one, one after the other in its memory."""
    target = Target(output)
    blocks = arguments.even(target.memory, who.size, "output")
    return all_gather(who, [(blocks, to_read(tensor))], arguments.storing([target], output))


def all_gather(
    who: Member, pairs: Sequence[tuple[Sequence[Memory] | Blocks, Memory]], finish: Callable[[], Any]
) -> Plan:
    """Gather every rank's input into the blocks of every rank; pairs of (blocks, own input), several when coalesced."""
    total = 0
    for blocks, own in pairs:
        if blocks[who.rank].count != own.count or blocks[who.rank].dtype is not own.dtype:
            raise UsageError(
                f"this rank gives {own.count} x {own.dtype}, but its place in the output has "
                f"{blocks[who.rank].count} x {blocks[who.rank].dtype}"
            )
        blocks[who.rank].tensor.copy_(own.tensor)
        total += sum(blocks[rank].count for rank in range(who.size))
    dtype = pairs[0][1].dtype

    def part(blocks: list[Memory] | Blocks, algorithm: str) -> Schedule:
        run = {"ring": ring.all_gather, "doubling": doubling.all_gather, "direct": pairwise.all_gather}[algorithm]
        yield from run(who.rank, who.size, blocks)

    def parts() -> Iterator[Schedule]:
        for blocks, _ in pairs:
            nbytes = sum(blocks[rank].nbytes for rank in range(who.size))
            for stripe in _striped_blocks(who, blocks):
                yield part(stripe, who.choose("all_gather", nbytes, contiguous=isinstance(stripe, Blocks)))

    collective = Collective.all_gather if len(pairs) == 1 else Collective.all_gather_coalesced
    fingerprint = _fingerprint(collective, dtype, total, None, None)
    return Plan(parts(), fingerprint, None, finish, window=max(2, who.config.lanes), nbytes=total * dtype.itemsize)


def gather(who: Member, tensor: Any, gather_list: Sequence[Any] | None, root: int) -> Plan:
    """Gather every rank's tensor in the root's list."""
    own = to_read(tensor)
    written: list[Target] = []
    if who.rank == root:
        written = arguments.targets(gather_list, who.size, "gather_list on the destination rank")
        arguments.same_sizes([target.memory for target in written], own, "gather_list")
        written[who.rank].memory.tensor.copy_(own.tensor)
    elif gather_list:
        raise UsageError(f"gather_list belongs to the destination, rank {root} of the group: pass None elsewhere")
    part = pairwise.gather(who.rank, who.size, root, own, [target.memory for target in written])
    fingerprint = _fingerprint(Collective.gather, own.dtype, own.count, None, root)
    return Plan((part,), fingerprint, None, arguments.storing(written, gather_list), nbytes=own.nbytes * who.size)


def scatter(who: Member, tensor: Any, scatter_list: Sequence[Any] | None, root: int) -> Plan:
    """Give each rank its tensor of the root's list."""
    target = Target(tensor)
    memory, blocks = target.memory, []
    if who.rank == root:
        blocks = arguments.listed(scatter_list, who.size, "scatter_list on the source rank")
        arguments.same_sizes(blocks, memory, "scatter_list")
        memory.tensor.copy_(blocks[who.rank].tensor)
    elif scatter_list:
        raise UsageError(f"scatter_list belongs to the source, rank {root} of the group: pass None elsewhere")
    part = pairwise.scatter(who.rank, who.size, root, memory, blocks)
    fingerprint = _fingerprint(Collective.scatter, memory.dtype, memory.count, None, root)
    return Plan((part,), fingerprint, None, arguments.storing([target], tensor), nbytes=memory.nbytes * who.size)


def all_to_all_lists(who: Member, output_list: Sequence[Any], input_list: Sequence[Any]) -> Plan:
    """Send ``input_list[i]`` to rank ``i``, and receive from it into ``output_list[i]``."""
    written = arguments.targets(output_list, who.size, "output_tensor_list")
    outgoing = arguments.listed(input_list, who.size, "input_tensor_list")
    incoming = [target.memory for target in written]
    return all_to_all(who, incoming, outgoing, arguments.storing(written, output_list))


def all_to_all_single(
    who: Member, output: Any, tensor: Any, output_sizes: Sequence[int] | None, input_sizes: Sequence[int] | None
) -> Plan:
    """Exchange parts of one tensor, cut along the first dimension."""
    target = Target(output)
    incoming = arguments.split_by(target.memory, output, output_sizes, who.size, "output")
    outgoing = arguments.split_by(to_read(tensor), tensor, input_sizes, who.size, "input")
    return all_to_all(who, incoming, outgoing, arguments.storing([target], output))


def all_to_all(who: Member, incoming: Sequence[Memory], outgoing: Sequence[Memory], finish: Callable[[], Any]) -> Plan:
    """Send block ``i`` of ``outgoing`` to rank ``i``, and receive its block for us into ``incoming[i]``."""
    own_in, own_out = incoming[who.rank], outgoing[who.rank]
    if own_in.count != own_out.count or own_in.dtype is not own_out.dtype:
        raise UsageError(
            f"this rank sends itself {own_out.count} x {own_out.dtype}, but has room for {own_in.count} x {own_in.dtype}"
        )
    own_in.tensor.copy_(own_out.tensor)
    fingerprint = _fingerprint(Collective.all_to_all, own_out.dtype, 0, None, None)
    parts = [
        pairwise.all_to_all(who.rank, who.size, sent, received)
        for sent, received in zip(_split_each(who, outgoing), _split_each(who, incoming), strict=True)
    ]
    nbytes = sum(block.nbytes for block in outgoing)
    return Plan(parts, fingerprint, None, finish, window=max(1, len(parts)), nbytes=nbytes)


def _split_each(who: Member, blocks: Sequence[Memory]) -> list[list[Memory]]:
    """Cut blocks of any sizes into one part a lane; sizes differ between ranks, so the cut must not depend on them."""
    lanes = max(1, who.config.lanes)
    cut = [Blocks.split(block, lanes) for block in blocks]
    return [[block[lane] for block in cut] for lane in range(lanes)]


def barrier(who: Member) -> Plan:
    """Return when every rank has come."""
    part = doubling.barrier(who.rank, who.size, NOTHING, NOTHING)
    return Plan((part,), _fingerprint(Collective.barrier, None, 0, None, None))


def monitored_barrier(who: Member) -> Plan:
    """Have rank 0 hear from everybody before it lets anybody go, so that it can name who did not come."""

    def part() -> Schedule:
        others = [rank for rank in range(who.size) if rank != 0]
        if who.rank != 0:
            yield (Send(0, NOTHING),)
            yield (Recv(0, NOTHING),)
        elif others:
            yield tuple(Recv(rank, NOTHING) for rank in others)
            yield tuple(Send(rank, NOTHING) for rank in others)

    return Plan((part(),), _fingerprint(Collective.monitored_barrier, None, 0, None, None))
