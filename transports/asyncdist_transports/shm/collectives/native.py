"""The collectives of a group whose members share memory: selects the protocol of each call.

Small tensors use a `SmallExchange`, with one synchronisation. An all-reduce of registered tensors is a
`ZeroCopyAllReduce`. All other calls are staged in rounds (see `large`). Members select alike, by what their calls have
in common: sizes, and whether the data is registered, which the members tell each other. `ShmTransport.native` makes
one `ShmNative` per group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from asyncdist.algorithms.schedule import Schedule
from asyncdist.base.ops import Collective
from asyncdist.memory.buffers import Memory, copy_overlapping_inputs
from asyncdist.memory.reduce_kernels import Arithmetic
from asyncdist.transport.native import CallSignature, MemoryBlocks, Native, PreparedCall
from asyncdist_transports.shm.collectives import zero_copy
from asyncdist_transports.shm.collectives.large import Large
from asyncdist_transports.shm.collectives.slot_table import DONE, SlotTable
from asyncdist_transports.shm.collectives.small import Blocks, small_exchange_for
from asyncdist_transports.shm.collectives.staging import CollectiveState
from asyncdist_transports.shm.collectives.streaming import StagedStream

_KEPT_KINDS = 512


def _flat(tensor: torch.Tensor) -> Memory:
    return Memory(tensor.view(-1))


def _each(blocks: Blocks, size: int) -> list[Memory]:
    if isinstance(blocks, torch.Tensor):
        return [Memory(block) for block in blocks.view(size, blocks.numel() // size).unbind()]
    return [Memory(block.view(-1)) for block in blocks]


class ShmNative(Native):
    """The collectives of one group in shared memory."""

    def __init__(self, slots: SlotTable, piece_nbytes: int, show: Callable[[], None], hide: Callable[[], None]) -> None:
        self._slots = slots
        self._piece_nbytes = piece_nbytes
        self._publish, self._withdraw_slots = show, hide
        self._ranks = range(slots.size)
        self._views, self._stream = zero_copy.PeerViews(slots), StagedStream()
        self._large = Large(slots, self._views, self._stream)
        self._kept: dict[Hashable, PreparedCall | None] = {}

    def open(self) -> None:
        self._publish()

    def close(self) -> None:
        self._withdraw_slots()

    # -- what calls of one kind have in common -------------------------------------------------

    def quick(self, kind: CallSignature) -> PreparedCall | None:
        key = kind.collective, kind.fingerprint, kind.dtype, kind.shape, kind.root
        try:
            return self._kept[key]
        except KeyError:
            if len(self._kept) >= _KEPT_KINDS:
                self._kept.clear()
        swap = small_exchange_for(self._slots, kind, self._crossing(self._large.all_to_all_staged, kind))
        start = self._in_rounds(kind) if swap is None else swap.schedule
        if kind.collective is Collective.all_reduce:
            start = self._all_reduce_of(kind, start)
        self._kept[key] = start
        return start

    def _all_reduce_of(self, kind: CallSignature, swap: PreparedCall | None) -> PreparedCall:
        slots, how = self._slots, kind.arithmetic

        def finish_staged(state: CollectiveState, tensor: torch.Tensor) -> Schedule:
            yield from self._large.all_reduce_staged(state, Memory(tensor.view(-1)), how)
            slots.publish(state.number, DONE)

        def stage(number: int, tensor: torch.Tensor) -> Schedule:
            yield from slots.enter(number)
            yield from finish_staged(CollectiveState(slots, number, kind.fingerprint), tensor)

        start = swap or stage
        if kind.nbytes < zero_copy.MIN_NBYTES:
            return start
        push = zero_copy.ZeroCopyAllReduce(slots, self._views, kind, self._piece_nbytes, finish_staged)

        def open_or_staged(number: int, tensor: torch.Tensor) -> Schedule:
            location = zero_copy.shared_location(slots, tensor)
            return push(number, tensor, location) if location else start(number, tensor)

        return open_or_staged

    def _in_rounds(self, kind: CallSignature) -> PreparedCall | None:
        """Return what does calls with large tensors of one kind; None where nothing is known but by a plan."""
        large, size, call, root = self._large, self._slots.size, kind.fingerprint, kind.root
        rank = self._slots.rank

        def reduce_scatter(number: int, output: torch.Tensor, blocks: Blocks) -> Schedule:
            own = _flat(output)
            inputs = copy_overlapping_inputs(_each(blocks, size), [own], {rank: 0})
            return large.reduce_scatter(number, call, inputs, own, kind.arithmetic)

        def all_gather(number: int, blocks: Blocks, tensor: torch.Tensor) -> Schedule:
            outputs = _each(blocks, size)
            (own,) = copy_overlapping_inputs([_flat(tensor)], outputs, {0: rank})
            return large.all_gather(number, call, [(outputs, own)])

        match kind.collective:
            case Collective.reduce:
                return lambda number, tensor: large.reduce(number, call, _flat(tensor), root, kind.arithmetic)
            case Collective.reduce_scatter:
                return reduce_scatter
            case Collective.broadcast:
                return lambda number, tensor: large.broadcast(number, call, _flat(tensor), root)
            case Collective.all_gather:
                return all_gather
            case Collective.all_to_all:
                return self._crossing(large.all_to_all, kind)
        return None

    def _crossing(self, cross: Callable[..., Schedule], kind: CallSignature) -> PreparedCall:
        """Return what does an all-to-all with tensors of one kind as ``cross`` does it with memory."""
        size, call, own = self._slots.size, kind.fingerprint, {self._slots.rank: self._slots.rank}

        def start(number: int, incoming: Blocks, outgoing: Blocks) -> Schedule:
            written = _each(incoming, size)
            return cross(number, call, written, copy_overlapping_inputs(_each(outgoing, size), written, own))

        return start

    def _quick(
        self, collective: Collective, call: int, blocks: Sequence[Memory], how: Arithmetic | None = None, root: int = -1
    ) -> PreparedCall | None:
        """Return what does calls with such memory, or with such a block for each member if all are alike."""
        count, dtype = blocks[0].count, blocks[0].dtype
        for block in blocks:
            if block.count != count:
                return None
        return self.quick(CallSignature(collective, call, dtype, (count,), how, root))

    # -- meeting -------------------------------------------------------------------------------

    def announce(self, number: int, fingerprint: int) -> Schedule:
        yield from self._slots.enter(number)
        self._slots.post(number, fingerprint, 0, DONE)

    def barrier(self, number: int, fingerprint: int) -> Schedule:
        quick = self.quick(CallSignature(Collective.barrier, fingerprint, torch.uint8, (0,)))
        assert quick is not None
        return quick(number)

    # -- reducing ------------------------------------------------------------------------------

    def all_reduce(self, number: int, fingerprint: int, memories: Sequence[Memory], how: Arithmetic) -> Schedule:
        if len(memories) == 1:
            quick = self._quick(Collective.all_reduce, fingerprint, memories, how)
            assert quick is not None
            return quick(number, memories[0].tensor)
        return self._all_reduce_of_several(number, fingerprint, memories, how)

    def _all_reduce_of_several(self, number: int, call: int, memories: Sequence[Memory], how: Arithmetic) -> Schedule:
        slots, large, tensors = self._slots, self._large, [memory.tensor for memory in memories]
        yield from slots.enter(number)
        location = zero_copy.post_locations(slots, number, tensors) if zero_copy.are_disjoint(tensors) else 0
        if not location:
            yield from large.all_reduce_coalesced_staged(CollectiveState(slots, number, call), memories, how)
            return
        counts = [memory.count for memory in memories]
        kind = CallSignature(Collective.all_reduce_coalesced, call, memories[0].dtype, (sum(counts),), how)
        push = zero_copy.CoalescedZeroCopyAllReduce(
            slots,
            self._views,
            kind,
            self._piece_nbytes,
            lambda state, _: large.all_reduce_coalesced_staged(state, memories, how),
            counts,
        )
        yield from push(number, tensors, location)

    def reduce(self, number: int, fingerprint: int, memory: Memory, root: int, how: Arithmetic) -> Schedule:
        quick = self._quick(Collective.reduce, fingerprint, (memory,), how, root)
        return quick(number, memory.tensor) if quick else self._large.reduce(number, fingerprint, memory, root, how)

    def reduce_scatter(
        self, number: int, fingerprint: int, inputs: MemoryBlocks, own: Memory, how: Arithmetic
    ) -> Schedule:
        blocks = [inputs[rank] for rank in self._ranks]
        quick = self._quick(Collective.reduce_scatter, fingerprint, blocks, how)
        if quick:
            return quick(number, own.tensor, [block.tensor for block in blocks])
        return self._large.reduce_scatter(number, fingerprint, blocks, own, how)

    # -- moving --------------------------------------------------------------------------------

    def broadcast(self, number: int, fingerprint: int, memory: Memory, root: int) -> Schedule:
        quick = self._quick(Collective.broadcast, fingerprint, (memory,), root=root)
        return quick(number, memory.tensor) if quick else self._large.broadcast(number, fingerprint, memory, root)

    def all_gather(self, number: int, fingerprint: int, rows: Sequence[tuple[MemoryBlocks, Memory]]) -> Schedule:
        lists = [([blocks[rank] for rank in self._ranks], own) for blocks, own in rows]
        blocks, own = lists[0]
        quick = self._quick(Collective.all_gather, fingerprint, blocks) if len(lists) == 1 else None
        if quick:
            return quick(number, [block.tensor for block in blocks], own.tensor)
        return self._large.all_gather(number, fingerprint, lists)

    def gather(self, number: int, fingerprint: int, own: Memory, blocks: MemoryBlocks, root: int) -> Schedule:
        quick = self._quick(Collective.gather, fingerprint, (own,), root=root)
        if quick:
            return quick(number, self._at_root(blocks, root), own.tensor)
        return self._large.gather(number, fingerprint, own, blocks, root)

    def scatter(self, number: int, fingerprint: int, own: Memory, blocks: MemoryBlocks, root: int) -> Schedule:
        quick = self._quick(Collective.scatter, fingerprint, (own,), root=root)
        if quick:
            return quick(number, own.tensor, self._at_root(blocks, root))
        return self._large.scatter(number, fingerprint, own, blocks, root)

    def _at_root(self, blocks: MemoryBlocks, root: int) -> list[torch.Tensor] | None:
        return [blocks[rank].tensor for rank in self._ranks] if self._slots.rank == root else None

    def all_to_all(
        self, number: int, fingerprint: int, incoming: Sequence[Memory], outgoing: Sequence[Memory]
    ) -> Schedule:
        quick = self._quick(Collective.all_to_all, fingerprint, [*incoming, *outgoing])
        if quick:
            return quick(number, [block.tensor for block in incoming], [block.tensor for block in outgoing])
        return self._large.all_to_all(number, fingerprint, incoming, outgoing)
