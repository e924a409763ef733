"""From a call with tensors to a plan: which schedule, over which memory, with what arithmetic around it.

Each function takes the caller (`GroupContext`) and the call's arguments (peers as ranks in the group), checks them, and
returns a `Plan`. Large tensors are cut into parts: one a lane where there are several, and segments where a part needs
memory of its own, of which a window of two is open at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from asyncdist.algorithms import pairwise, recursive_doubling, ring, tree
from asyncdist.algorithms.schedule import Recv, Schedule, Send
from asyncdist.algorithms.selection import Model, choose
from asyncdist.base.ops import Collective, ReduceOp, Reduction
from asyncdist.collectives import validation
from asyncdist.collectives.hierarchical import HierarchicalCollectives
from asyncdist.config import Config
from asyncdist.engine.operation import Plan
from asyncdist.errors import UsageError
from asyncdist.memory.buffers import (
    DTYPE_NUMBERS,
    NOTHING,
    Memory,
    OutputTensor,
    Scratch,
    TensorBlocks,
    copy_overlapping_inputs,
    input_memory,
)
from asyncdist.transport.native import CallSignature, Native
from asyncdist.transport.wire_format import Fingerprint, shape_checksum

_KEPT_CHOICES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class GroupContext:
    """The calling rank: its rank and size in the group, and the settings of the world."""

    rank: int
    size: int
    config: Config
    model: Model
    forced: dict[str, str]
    scratch: Scratch
    # Number of parts that run at once.
    window: int = 2
    choices: dict[tuple[str, int, bool], str] = field(default_factory=dict)
    # Runs whole collectives without links.
    native: Native | None = None
    # Combines native collectives and links if the group spans several hosts.
    islands: HierarchicalCollectives | None = None

    def peer(self, rank: int, what: str) -> int:
        """Return ``rank``; raise UsageError if the group has no such rank."""
        if not 0 <= rank < self.size:
            raise UsageError(f"{what}={rank} is not a rank of the group, which has {self.size}")
        return rank

    def other(self, rank: int, what: str) -> int:
        """Return ``rank``; raise UsageError unless it is another rank of the group."""
        if self.peer(rank, what) == self.rank:
            raise UsageError(f"{what}={rank} is this rank itself: a message to oneself is a copy")
        return rank

    def native_for(self, collective: str) -> Native | None:
        """Return the native collectives; None if the collective uses links, as one with a forced algorithm does."""
        return None if collective in self.forced else self.native

    def islands_for(self, collective: str) -> HierarchicalCollectives | None:
        """Return the hierarchical collectives; None if the collective uses links alone."""
        return None if collective in self.forced else self.islands

    def choose(self, collective: str, nbytes: int, *, contiguous: bool = True) -> str:
        """Return the schedule for a size."""
        key = (collective, nbytes, contiguous)
        name = self.choices.get(key)
        if name is None:
            if len(self.choices) >= _KEPT_CHOICES:
                self.choices.clear()
            name = self.choices[key] = choose(
                collective, nbytes, self.size, model=self.model, forced=self.forced, contiguous=contiguous
            )
        return name


@lru_cache(maxsize=4096)
def fingerprint(
    collective: Collective,
    dtype: torch.dtype | None,
    shape: tuple[int, ...] | int,
    op: Reduction | None,
    root: int | None,
    layout: tuple[int, ...] = (),
) -> int:
    """Return the fingerprint of this rank's call; ``layout`` is how the elements are cut, where the shape does not say."""
    count = shape if isinstance(shape, int) else torch.Size(shape).numel()
    form = layout or (None if isinstance(shape, int) else shape)
    return Fingerprint(
        collective=collective,
        dtype=0 if dtype is None else DTYPE_NUMBERS[dtype],
        reduction=0 if op is None else ReduceOp[op.name].value,
        root=0 if root is None else root + 1,
        count=count & 0xFFFFFF,
        shape=0 if form is None else shape_checksum(form),
    ).pack()


def stripes(who: GroupContext, memory: Memory) -> Iterable[Memory]:
    """Cut memory into one part per lane if it is large enough."""
    lanes = who.config.lanes
    if lanes <= 1 or memory.nbytes < who.config.stripe_nbytes:
        return (memory,)
    parts = TensorBlocks.split(memory, lanes)
    return [parts[lane] for lane in range(lanes)]


def segments(memory: Memory, count: int) -> Iterator[Memory]:
    for start in range(0, max(1, memory.count), count):
        yield memory.slice(start, min(memory.count, start + count))


def striped_blocks(who: GroupContext, blocks: Sequence[Memory] | TensorBlocks) -> Iterable[list[Memory] | TensorBlocks]:
    """Cut every block into one part per lane; block ``i`` of each part still belongs to rank ``i``."""
    lanes = who.config.lanes
    if lanes <= 1 or sum(blocks[rank].nbytes for rank in range(who.size)) < who.config.stripe_nbytes:
        return (blocks,) if isinstance(blocks, TensorBlocks) else (list(blocks),)
    cut = [TensorBlocks.split(blocks[rank], lanes) for rank in range(who.size)]
    return [[block[lane] for block in cut] for lane in range(lanes)]


# -- movement -------------------------------------------------------------------------------------


def broadcast(who: GroupContext, tensor: Any, root: int) -> Plan:
    """Copy the root's tensor to every rank."""
    who.peer(root, "src")
    target = OutputTensor(tensor)
    memory = target.memory

    def finish() -> Any:
        if who.rank != root:
            target.store()
        return tensor

    call = fingerprint(Collective.broadcast, memory.dtype, tuple(target.tensor.shape), None, root)
    native = who.native_for("broadcast")
    if native is not None:
        start = functools.partial(native.broadcast, memory=memory, root=root)
        kind = CallSignature(Collective.broadcast, call, memory.dtype, (memory.count,), root=root)
        return Plan(native=start, fingerprint=call, finish=finish, nbytes=memory.nbytes, kind=kind)
    islands = who.islands_for("broadcast")
    if islands is not None:
        return Plan(islands.broadcast(memory, root, call), call, None, finish, islands.window, memory.nbytes)
    if who.choose("broadcast", memory.nbytes) == "tree":
        parts: Iterable[Schedule] = (
            tree.broadcast(who.rank, who.size, root, stripe) for stripe in stripes(who, memory)
        )
    else:
        count = max(1, who.config.segment_nbytes // memory.itemsize)
        parts = (tree.chain_broadcast(who.rank, who.size, root, segment) for segment in segments(memory, count))
    return Plan(iter(parts), call, None, finish, window=max(4, who.config.lanes), nbytes=memory.nbytes)


def all_gather_lists(
    who: GroupContext, pairs: Sequence[tuple[Sequence[Any], Any]], value: Any, what: str = "tensor_list"
) -> Plan:
    """Gather each pair's tensor into its list, one entry per rank; several pairs are coalesced."""
    rows = [(validation.targets(outputs, who.size, what), input_memory(tensor)) for outputs, tensor in pairs]
    finish = validation.storing([target for row, _ in rows for target in row], value)
    return all_gather(who, [([target.memory for target in row], own) for row, own in rows], finish)


def all_gather_list(who: GroupContext, outputs: Sequence[Any], tensor: Any) -> Plan:
    """Gather every rank's tensor into a list."""
    return all_gather_lists(who, [(outputs, tensor)], outputs)


def all_gather_coalesced(who: GroupContext, tensor_lists: Sequence[Sequence[Any]], tensors: Sequence[Any]) -> Plan:
    """Gather several tensors as one operation: rank ``r``'s ``tensors[i]`` into ``tensor_lists[r][i]``."""
    validation.check_length(tensor_lists, who.size, "output_tensor_lists")
    if not tensors or any(len(row) != len(tensors) for row in tensor_lists):
        raise UsageError(f"each of output_tensor_lists needs {len(tensors)} tensors, and one at least, as the input")
    pairs = [([row[place] for row in tensor_lists], tensor) for place, tensor in enumerate(tensors)]
    return all_gather_lists(who, pairs, tensor_lists, "output_tensor_lists")


def all_gather_single(who: GroupContext, output: Any, tensor: Any) -> Plan:
    """Gather every rank's tensor into one tensor, concatenated in group order."""
    target = OutputTensor(output)
    blocks = validation.even(target.memory, who.size, "output")
    return all_gather(who, [(blocks, input_memory(tensor))], validation.storing([target], output))


def all_gather(
    who: GroupContext, pairs: Sequence[tuple[Sequence[Memory] | TensorBlocks, Memory]], finish: Callable[[], Any]
) -> Plan:
    """Gather every rank's input into the blocks of every rank; pairs of (blocks, own input), several when coalesced."""
    total = 0
    layout: list[int] = []
    for blocks, own in pairs:
        if blocks[who.rank].count != own.count or blocks[who.rank].dtype is not own.dtype:
            raise UsageError(
                f"this rank gives {own.count} x {own.dtype}, but its place in the output has "
                f"{blocks[who.rank].count} x {blocks[who.rank].dtype}"
            )
        counts = [blocks[rank].count for rank in range(who.size)]
        total += sum(counts)
        layout += [DTYPE_NUMBERS[own.dtype], *counts]
    places = [blocks[rank] for blocks, _ in pairs for rank in range(who.size)]
    owns = copy_overlapping_inputs(
        [own for _, own in pairs], places, {row: row * who.size + who.rank for row in range(len(pairs))}
    )
    pairs = [(blocks, owns[row]) for row, (blocks, _) in enumerate(pairs)]
    dtype = pairs[0][1].dtype

    def part(blocks: list[Memory] | TensorBlocks, algorithm: str) -> Schedule:
        run = {"ring": ring.all_gather, "doubling": recursive_doubling.all_gather, "direct": pairwise.all_gather}[
            algorithm
        ]
        yield from run(who.rank, who.size, blocks)

    def parts() -> Iterator[Schedule]:
        for blocks, _ in pairs:
            nbytes = sum(blocks[rank].nbytes for rank in range(who.size))
            for stripe in striped_blocks(who, blocks):
                yield part(stripe, who.choose("all_gather", nbytes, contiguous=isinstance(stripe, TensorBlocks)))

    collective = Collective.all_gather if len(pairs) == 1 else Collective.all_gather_coalesced
    call = fingerprint(collective, dtype, total, None, None, tuple(layout))
    native = who.native_for("all_gather")
    if native is not None:
        start = functools.partial(native.all_gather, rows=pairs)
        alike = len(pairs) == 1 and len(set(layout[1:])) == 1
        kind = CallSignature(collective, call, dtype, (layout[1],)) if alike else None
        return Plan(native=start, fingerprint=call, finish=finish, nbytes=total * dtype.itemsize, kind=kind)
    for blocks, own in pairs:
        blocks[who.rank].tensor.copy_(own.tensor)
    islands = who.islands_for("all_gather")
    if islands is not None:
        rows = islands.all_gather([blocks for blocks, _ in pairs], call)
        return Plan(rows, call, None, finish, islands.window, total * dtype.itemsize)
    return Plan(parts(), call, None, finish, window=max(2, who.config.lanes), nbytes=total * dtype.itemsize)


def gather(who: GroupContext, gather_list: Sequence[Any] | None, tensor: Any, root: int) -> Plan:
    """Gather every rank's tensor in the root's list."""
    who.peer(root, "dst")
    own = input_memory(tensor)
    written: list[OutputTensor] = []
    if who.rank == root:
        written = validation.targets(gather_list, who.size, "gather_list on the destination rank")
        validation.same_sizes([target.memory for target in written], own, "gather_list")
    elif gather_list:
        raise UsageError(f"gather_list belongs to the destination, rank {root} of the group: pass None elsewhere")
    plan = _gather(who, own, [target.memory for target in written], root, validation.storing(written, gather_list))
    plan.kind = CallSignature(Collective.gather, plan.fingerprint, own.dtype, (own.count,), root=root)
    return plan


def gather_single(who: GroupContext, output: Any, tensor: Any, root: int) -> Plan:
    """Gather every rank's tensor in the root's output, concatenated in group order."""
    who.peer(root, "dst")
    own = input_memory(tensor)
    if who.rank != root:
        return _gather(who, own, [], root, validation.storing([], None))
    if output is None:
        raise UsageError("gather_tensor on the destination rank is missing")
    target = OutputTensor(output)
    parts = validation.even(target.memory, who.size, "gather_tensor")
    blocks = [parts[rank] for rank in range(who.size)]
    validation.same_sizes(blocks, own, "gather_tensor")
    return _gather(who, own, blocks, root, validation.storing([target], output))


def _gather(who: GroupContext, own: Memory, blocks: list[Memory], root: int, finish: Callable[[], Any]) -> Plan:
    if who.rank == root:
        (own,) = copy_overlapping_inputs([own], blocks, {0: root})
        blocks[root].tensor.copy_(own.tensor)
    call = fingerprint(Collective.gather, own.dtype, (own.count,), None, root)
    nbytes = own.nbytes * who.size
    native = who.native_for("gather")
    if native is not None:
        start = functools.partial(native.gather, own=own, blocks=blocks, root=root)
        return Plan(native=start, fingerprint=call, finish=finish, nbytes=nbytes)
    return Plan((pairwise.gather(who.rank, who.size, root, own, blocks),), call, None, finish, nbytes=nbytes)


def scatter(who: GroupContext, tensor: Any, scatter_list: Sequence[Any] | None, root: int) -> Plan:
    """Give each rank its tensor of the root's list."""
    who.peer(root, "src")
    target = OutputTensor(tensor)
    memory, blocks = target.memory, []
    if who.rank == root:
        blocks = validation.listed(scatter_list, who.size, "scatter_list on the source rank")
        validation.same_sizes(blocks, memory, "scatter_list")
        blocks = copy_overlapping_inputs(blocks, [memory], {root: 0})
        memory.tensor.copy_(blocks[who.rank].tensor)
    elif scatter_list:
        raise UsageError(f"scatter_list belongs to the source, rank {root} of the group: pass None elsewhere")
    call = fingerprint(Collective.scatter, memory.dtype, (memory.count,), None, root)
    finish, nbytes = validation.storing([target], tensor), memory.nbytes * who.size
    native = who.native_for("scatter")
    if native is not None:
        start = functools.partial(native.scatter, own=memory, blocks=blocks, root=root)
        kind = CallSignature(Collective.scatter, call, memory.dtype, (memory.count,), root=root)
        return Plan(native=start, fingerprint=call, finish=finish, nbytes=nbytes, kind=kind)
    return Plan((pairwise.scatter(who.rank, who.size, root, memory, blocks),), call, None, finish, nbytes=nbytes)


def all_to_all_lists(who: GroupContext, output_list: Sequence[Any], input_list: Sequence[Any]) -> Plan:
    """Send ``input_list[i]`` to rank ``i``, and receive from it into ``output_list[i]``."""
    written = validation.targets(output_list, who.size, "output_tensor_list")
    outgoing = validation.listed(input_list, who.size, "input_tensor_list")
    incoming = [target.memory for target in written]
    return all_to_all(who, incoming, outgoing, validation.storing(written, output_list))


def all_to_all_single(
    who: GroupContext, output: Any, tensor: Any, output_sizes: Sequence[int] | None, input_sizes: Sequence[int] | None
) -> Plan:
    """Exchange parts of one tensor, cut along the first dimension."""
    target = OutputTensor(output)
    incoming = validation.split_by(target.memory, output, output_sizes, who.size, "output")
    outgoing = validation.split_by(input_memory(tensor), tensor, input_sizes, who.size, "input")
    return all_to_all(who, incoming, outgoing, validation.storing([target], output))


def all_to_all(
    who: GroupContext, incoming: Sequence[Memory], outgoing: Sequence[Memory], finish: Callable[[], Any]
) -> Plan:
    """Send block ``i`` of ``outgoing`` to rank ``i``, and receive its block for this rank into ``incoming[i]``."""
    own_in, own_out = incoming[who.rank], outgoing[who.rank]
    if own_in.count != own_out.count or own_in.dtype is not own_out.dtype:
        raise UsageError(
            f"this rank sends itself {own_out.count} x {own_out.dtype}, but has room for {own_in.count} x {own_in.dtype}"
        )
    call = fingerprint(Collective.all_to_all, own_out.dtype, 0, None, None)
    nbytes = sum(block.nbytes for block in outgoing)
    outgoing = copy_overlapping_inputs(outgoing, incoming, {who.rank: who.rank})
    native = who.native_for("all_to_all")
    if native is not None:
        start = functools.partial(native.all_to_all, incoming=incoming, outgoing=outgoing)
        alike = all(block.count == own_out.count for block in (*incoming, *outgoing))
        kind = CallSignature(Collective.all_to_all, call, own_out.dtype, (own_out.count,)) if alike else None
        return Plan(native=start, fingerprint=call, finish=finish, nbytes=nbytes, kind=kind)
    own_in.tensor.copy_(outgoing[who.rank].tensor)
    parts = [
        pairwise.all_to_all(who.rank, who.size, sent, received)
        for sent, received in zip(_split_each(who, outgoing), _split_each(who, incoming), strict=True)
    ]
    return Plan(parts, call, None, finish, window=max(1, len(parts)), nbytes=nbytes)


def _split_each(who: GroupContext, blocks: Sequence[Memory]) -> list[list[Memory]]:
    """Cut blocks of any sizes into one part a lane; sizes differ between ranks, so the cut must not depend on them."""
    lanes = max(1, who.config.lanes)
    cut = [TensorBlocks.split(block, lanes) for block in blocks]
    return [[block[lane] for block in cut] for lane in range(lanes)]


def barrier(who: GroupContext) -> Plan:
    """Complete when every rank has called the barrier."""
    call = fingerprint(Collective.barrier, None, 0, None, None)
    native = who.native_for("barrier")
    if native is not None:
        return Plan(
            native=native.barrier, fingerprint=call, kind=CallSignature(Collective.barrier, call, torch.uint8, (0,))
        )
    islands = who.islands_for("barrier")
    if islands is not None:
        return Plan(islands.barrier(call), call)
    return Plan((recursive_doubling.barrier(who.rank, who.size, NOTHING, NOTHING),), call)


def monitored_barrier(who: GroupContext) -> Plan:
    """Rank 0 receives from every rank before it releases any rank, so that it can name the missing ranks."""

    def part() -> Schedule:
        others = [rank for rank in range(who.size) if rank != 0]
        if who.rank != 0:
            yield (Send(0, NOTHING),)
            yield (Recv(0, NOTHING),)
        elif others:
            yield tuple(Recv(rank, NOTHING) for rank in others)
            yield tuple(Send(rank, NOTHING) for rank in others)

    return Plan((part(),), fingerprint(Collective.monitored_barrier, None, 0, None, None))
