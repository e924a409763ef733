"""Small collectives of a group on several hosts: the first member of each node exchanges for all of its members.

A message between hosts takes longer than a small collective within a node, and the ranks of a host share its link. So the
members give their data to the first one, and get the result from it. `hierarchical` describes the other collectives,
and proves that each wait ends. The steps of a call are prepared once for all calls that look like it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import torch

from asyncdist.base.ops import Collective, ReduceOp
from asyncdist.kernel.algorithms import pairwise, recursive_doubling, ring, tree
from asyncdist.kernel.algorithms.hierarchy import NodeLayout, among, travels_whole
from asyncdist.kernel.algorithms.schedule import Schedule, ScheduleOf
from asyncdist.kernel.algorithms.selection import Model, choose
from asyncdist.kernel.collectives.node import NodeCollectives, plain, store_result, widened
from asyncdist.kernel.collectives.recorded import RecordedCall
from asyncdist.kernel.memory.bounded_cache import BoundedCache
from asyncdist.kernel.memory.buffers import NOTHING, Memory, Scratch, TensorBlocks
from asyncdist.kernel.memory.reduce_kernels import Arithmetic, arithmetic
from asyncdist.kernel.transport.native import PreparedCall

_CACHED_CALLS = 512
_MOST_NBYTES = 1 << 20
"""Bytes of the largest collective that one rail carries alone."""
_BARRIER_KERNELS = arithmetic(ReduceOp.MAX, torch.uint8)

GATHERS: dict[str, ScheduleOf] = {
    "direct": pairwise.all_gather,
    "ring": ring.all_gather,
    "doubling": recursive_doubling.all_gather,
}
"""The schedules of an all-gather, by name."""


class SmallAllReduce(NamedTuple):
    """The prepared steps of a small all-reduce, or of a barrier.

    Attributes:
        reduce: Reduces to the first member of the node; None if this rank is alone on its node.
        exchange: The exchange of the first members, given the data and scratch; for a barrier given nothing.
        broadcast: Copies the result from the first member to the node.
    """

    reduce: PreparedCall | None
    exchange: ScheduleOf
    broadcast: PreparedCall | None


class SmallAllGather(NamedTuple):
    """The prepared steps of a small all-gather, in which all blocks lie in one memory, node after node.

    Attributes:
        gather: Gathers the blocks of the node at its first member; None if this rank is alone on its node.
        own: The range of the node's blocks in the memory of all.
        exchange: The exchange of the first members.
        broadcast: Copies all blocks from the first member to the node.
    """

    gather: PreparedCall | None
    own: slice
    exchange: Callable[[torch.Tensor], Schedule]
    broadcast: PreparedCall | None


def _nothing(*memories: Memory) -> Schedule:
    yield from ()


def reduce_by(algorithm: str, rank: int, size: int, data: Memory, scratch: Memory) -> Schedule:
    """All-reduce ``data`` in place; recursive doubling overwrites ``scratch``."""
    if algorithm == "doubling":
        return recursive_doubling.all_reduce(rank, size, data, scratch)
    if algorithm == "tree":
        return tree.all_reduce(rank, size, data)
    if algorithm == "halving":
        blocks = TensorBlocks.split(data, recursive_doubling.floor_power_of_two(size))
        return recursive_doubling.halving_all_reduce(rank, size, blocks)
    return ring.all_reduce(rank, size, TensorBlocks.split(data, size))


class FirstRailCollectives:
    """The small collectives of one group over its nodes. Each has two native collectives, `NUMBERS`.

    Args:
        layout: The nodes of the group, as seen by this rank.
        node: The collectives inside the node of this rank.
        model: Cost model that selects the schedules along the rail.
        scratch: Pool of temporary memory.
    """

    NUMBERS = 2

    def __init__(self, layout: NodeLayout, node: NodeCollectives, model: Model, scratch: Scratch) -> None:
        self._layout, self._node, self._scratch = layout, node, scratch
        self._size = sum(len(members) for members in layout.nodes)
        self._hosts = hosts = len(layout.nodes)
        self._order = [rank for members in layout.nodes for rank in members]
        # The model takes longer than a small call over shared memory.
        self._reductions: BoundedCache[tuple[int, int], SmallAllReduce] = BoundedCache(_CACHED_CALLS)
        self._barriers: BoundedCache[int, SmallAllReduce] = BoundedCache(_CACHED_CALLS)
        self._byte = Memory(torch.zeros(1, dtype=torch.uint8, device="cpu"))
        """What a node reduces and copies in a barrier."""
        self._gathers: BoundedCache[tuple[int, int], SmallAllGather | None] = BoundedCache(_CACHED_CALLS)
        self.choose: Callable[[str, int], str] = lru_cache(_CACHED_CALLS)(partial(choose, size=hosts, model=model))
        """``choose(collective, nbytes)``: the schedule among the hosts."""
        self.takes: Callable[[str, int], bool] = lru_cache(_CACHED_CALLS)(
            lambda collective, nbytes: nbytes <= _MOST_NBYTES and travels_whole(collective, nbytes, layout, model)
        )
        """``takes(collective, nbytes)``: whether a collective of this size is faster here than over all rails."""

    # -- all_reduce ------------------------------------------------------------------------------

    def all_reduce(self, call: int, memory: Memory, kernels: Arithmetic, number: int) -> Schedule:
        """Reduce the memory over all ranks in place."""
        own = widened(memory, kernels)
        steps = self._reductions.get((call, own.count)) or self._prepare_all_reduce(call, own, memory, kernels)
        if steps.reduce is not None:
            yield from steps.reduce(number, own.tensor) or ()
        if self._layout.place == 0:
            yield from steps.exchange(own.tensor)
            store_result(own, memory, kernels, self._size)
        if steps.broadcast is not None:
            yield from steps.broadcast(number + 1, memory.tensor) or ()

    def _prepare_all_reduce(self, call: int, own: Memory, memory: Memory, kernels: Arithmetic) -> SmallAllReduce:
        layout, algorithm = self._layout, self.choose("all_reduce", own.nbytes)

        def exchange(data: Memory, scratch: Memory = NOTHING) -> Schedule:
            return among(layout.rail(0), reduce_by(algorithm, layout.node, self._hosts, data, scratch))

        exchanges = [exchange if layout.place == 0 else _nothing]
        scratch = [(own.count, own.dtype)] if algorithm == "doubling" else []
        recorded = RecordedCall(exchanges, [own.tensor], kernels, scratch, self._scratch)
        return self._reductions.add((call, own.count), self._around(recorded, call, own, memory, kernels))

    def _around(
        self, exchange: RecordedCall, call: int, own: Memory, memory: Memory, kernels: Arithmetic
    ) -> SmallAllReduce:
        """Return an exchange of the first members with what the nodes do before and after it."""
        if self._node.is_alone:
            return SmallAllReduce(None, exchange.schedule, None)
        reduce = self._node.prepared(Collective.reduce, call, own, plain(kernels), root=0)
        return SmallAllReduce(
            reduce, exchange.schedule, self._node.prepared(Collective.broadcast, call, memory, root=0)
        )

    # -- barrier ---------------------------------------------------------------------------------

    def barrier(self, call: int, number: int) -> Schedule:
        """Complete when every rank has called the barrier."""
        steps = self._barriers.get(call) or self._prepare_barrier(call)
        if steps.reduce is not None:
            yield from steps.reduce(number, self._byte.tensor) or ()
        if self._layout.place == 0:
            yield from steps.exchange()
        if steps.broadcast is not None:
            yield from steps.broadcast(number + 1, self._byte.tensor) or ()

    def _prepare_barrier(self, call: int) -> SmallAllReduce:
        layout, hosts = self._layout, self._hosts

        def dissemination() -> Schedule:
            return among(layout.rail(0), recursive_doubling.barrier(layout.node, hosts, NOTHING, NOTHING))

        recorded = RecordedCall([dissemination if layout.place == 0 else _nothing], [])
        return self._barriers.add(call, self._around(recorded, call, self._byte, self._byte, _BARRIER_KERNELS))

    # -- all_gather ------------------------------------------------------------------------------

    def gather_steps(self, row: Sequence[Memory], call: int) -> SmallAllGather | None:
        """Return the prepared steps of an all-gather of blocks of equal size; None unless these are small."""
        key = call, row[self._layout.rank].count
        try:
            return self._gathers[key]
        except KeyError:
            return self._gathers.add(key, self._prepare_all_gather(row, call))

    def _prepare_all_gather(self, row: Sequence[Memory], call: int) -> SmallAllGather | None:
        layout, hosts, own = self._layout, self._hosts, row[self._layout.rank]
        count, nbytes = own.count, self._size * own.nbytes
        if not (count and self.takes("all_gather", nbytes)):
            return None
        bounds = [0, *(count * total for total in accumulate(map(len, layout.nodes)))]
        run = GATHERS[self.choose("all_gather", nbytes)]

        def exchange(whole: Memory) -> Schedule:
            return among(layout.rail(0), run(layout.node, hosts, TensorBlocks(whole, bounds)))

        whole = torch.empty(bounds[-1], dtype=own.dtype, device="cpu")
        gather = broadcast = None
        if not self._node.is_alone:
            gather = self._node.prepared(Collective.gather, call, own, root=0)
            broadcast = self._node.prepared(Collective.broadcast, call, Memory(whole), root=0)
        recorded = RecordedCall([exchange if layout.place == 0 else _nothing], [whole])
        within = slice(bounds[layout.node], bounds[layout.node + 1])
        return SmallAllGather(gather, within, recorded.schedule, broadcast)

    def all_gather(self, steps: SmallAllGather, row: Sequence[Memory], number: int) -> Schedule:
        """Copy each rank's ``row[rank]`` to all ranks."""
        own, is_first = row[self._layout.rank], self._layout.place == 0
        whole = self._scratch.take(self._size * own.count, own.dtype)
        blocks = whole.tensor
        if steps.gather is None:
            blocks[steps.own].copy_(own.tensor)
        else:
            of_node = blocks[steps.own] if is_first else None
            yield from steps.gather(number, of_node, own.tensor) or ()
        if is_first:
            yield from steps.exchange(blocks)
        if steps.broadcast is not None:
            yield from steps.broadcast(number + 1, blocks) or ()
        for rank, block in zip(self._order, blocks.split(own.count), strict=True):
            row[rank].tensor.copy_(block)
        self._scratch.give(whole)
