"""Every collective of larger tensors: which member stages which block in which round, and which member reads it.

A collective is a `CollectiveState` in a slot table: members stage blocks, read blocks, and leave. `Pieces` says where a
block's pieces are staged. Reductions differ from copies only in the reading of a piece. `native` calls this module.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncdist.base.ops import Collective
from asyncdist.errors import MismatchError
from asyncdist.kernel.algorithms.schedule import Schedule, ScheduleOf
from asyncdist.kernel.memory.buffers import Memory, TensorBlocks, block_memories, copy_overlapping_inputs, flat_memory
from asyncdist.kernel.memory.reduce_kernels import Arithmetic
from asyncdist.kernel.transport.native import CallSignature, PreparedCall, all_gather_rows
from asyncdist_transports.shm.collectives import zero_copy
from asyncdist_transports.shm.collectives.slot_table import DONE, SlotMember, SlotTable
from asyncdist_transports.shm.collectives.small import Blocks, every_member_reduces
from asyncdist_transports.shm.collectives.staging import CollectiveState, PieceAction, Pieces, head_nbytes
from asyncdist_transports.shm.collectives.streaming import AheadTuner, Tuners, run_staged_rounds


class BlockPieces(Pieces):
    """Pieces of one block for all members, or of one for each other member; registered blocks are read in place.

    Args:
        by_reader: Whether a member has a block for each other member.
        table: The index in a member's table of locations of its block, of its first one if ``by_reader``; -1 if the
            location that it posts is that of its block.
    """

    __slots__ = ("_by_reader", "_table")

    def __init__(
        self, state: CollectiveState, dtype: torch.dtype, *, by_reader: bool = False, table: int = -1, head: int = 0
    ) -> None:
        super().__init__(state, max(1, state.slots.size - 1) if by_reader else 1, dtype, head=head)
        self._by_reader, self._table = by_reader, table

    def stage_for_all(self, blocks: Sequence[Memory], k: int, round_index: int) -> None:
        """Stage the k-th pieces of this member's blocks for the other members."""
        for member in self.slots.others:
            self.stage(_block_index(member.rank, self.slots.rank), blocks[member.rank], k, round_index)

    def of_member(self, member: SlotMember, k: int, count: int, round_index: int) -> torch.Tensor:
        """Return the k-th piece of the block that a member has for this one: where it lies, or staged."""
        slots, rank = self.slots, self.slots.rank
        location = self.state.locations[member.rank]
        if location and self._table >= 0:
            location = slots.table(self.number, member.rank)[self._table + (rank if self._by_reader else 0)]
        if location:
            return slots.view(member.rank, location - 1 + k * self.step * self.dtype.itemsize, count, self.dtype)
        block = _block_index(rank, member.rank) if self._by_reader else 0
        return self.staged(member.rank, block, count, round_index)

    def receive(self, member: SlotMember, room: Memory, k: int, round_index: int) -> None:
        """Copy the k-th piece of the block that a member has for this one."""
        piece = self.of(room, k)
        if piece.numel():
            piece.copy_(self.of_member(member, k, piece.numel(), round_index))

    def reduce(self, own: Memory, out: Memory, arithmetic: Arithmetic, k: int, round_index: int) -> None:
        """Reduce the k-th pieces of this member's block and of those that the others have for it."""
        piece = self.of(out, k)
        others = [self.of_member(member, k, piece.numel(), round_index) for member in self.slots.others]
        arithmetic.reduce([self.of(own, k), *others], piece)


class Large:
    """Collectives in rounds."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self.tuners: Tuners = defaultdict(AheadTuner)
        self._rank, self._size = slots.rank, slots.size
        self._others = slots.others

    def prepare(self, signature: CallSignature) -> PreparedCall:
        """Return the call in rounds for a signature; its inputs may overlap its outputs."""
        return functools.partial(_CALLS[signature.collective], self, signature)

    def _blocks(self, blocks: Blocks | None) -> list[Memory]:
        return block_memories(blocks, self._size)

    # -- reducing ------------------------------------------------------------------------------

    def _all_reduce(self, signature: CallSignature, number: int, tensor: torch.Tensor) -> Schedule:
        yield from self._slots.enter(number)
        state = CollectiveState(self._slots, number, signature.fingerprint)
        yield from self.all_reduce_staged(state, flat_memory(tensor), signature.arithmetic)
        self._slots.publish(number, DONE)

    def all_reduce_coalesced_staged(
        self, state: CollectiveState, memories: Sequence[Memory], arithmetic: Arithmetic
    ) -> Schedule:
        """Reduce several memories by staging, in a slot that this member has entered, and leave the slot."""
        area = self._slots.area_nbytes
        most = max(memory.nbytes if every_member_reduces(self._size, memory.nbytes) else area for memory in memories)
        # Reserved before the first memory is reduced.
        for half in (0, 1):
            self._slots.reserve(state.number, half, min(most, area))
        for memory in memories:
            yield from self.all_reduce_staged(state, memory, arithmetic)
        self._slots.publish(state.number, DONE)

    def all_reduce_staged(self, state: CollectiveState, memory: Memory, arithmetic: Arithmetic) -> Schedule:
        """Reduce a memory by staging, in a slot that this member has entered, and stay in the slot.

        A memory that fits into one piece costs one synchronisation, and every member reduces all contributions. For a
        larger one each member reduces its own block, with two synchronisations a piece.
        """
        if every_member_reduces(self._size, memory.nbytes):
            yield from self._reduce_on_every_member(state, memory, arithmetic)
        else:
            yield from self._reduce_scatter_all_gather(state, memory, arithmetic)

    def _reduce_on_every_member(self, state: CollectiveState, memory: Memory, arithmetic: Arithmetic) -> Schedule:
        """Every member stages its piece, and reduces all pieces in rank order."""
        pieces = Pieces(state, 1, memory.dtype)
        # With two members a member's own piece is read from its tensor, which may be overwritten at once.
        in_place = self._size == 2

        def read(k: int, round_index: int) -> None:
            own = pieces.of(memory, k)
            inputs = [pieces.staged(rank, 0, own.numel(), round_index) for rank in range(self._size)]
            if in_place:
                inputs[self._rank] = own
            arithmetic.reduce(inputs, own)

        stage = functools.partial(pieces.stage, 0, memory)
        yield from self._stage_and_read("all_reduce", pieces, memory.count, stage, read, reads_open=False)

    def _stage_and_read(
        self, name: str, pieces: Pieces, most: int, stage: PieceAction, read: PieceAction, *, reads_open: bool = True
    ) -> Schedule:
        """Let every member stage and read, in as many rounds as ``most`` elements need."""
        count, others = pieces.round_count(most), self._others
        return run_staged_rounds(self.tuners, name, pieces, count, stage, read, others, others, reads_open=reads_open)

    def _reduce_scatter_all_gather(self, state: CollectiveState, memory: Memory, arithmetic: Arithmetic) -> Schedule:
        """Reduce-scatter and all-gather: rounds alternate between reducing this member's block and sharing it."""
        pieces = Pieces(state, self._size, memory.dtype)
        blocks = TensorBlocks.split(memory, self._size)
        own = blocks[self._rank]

        def stage(k: int, round_index: int) -> None:
            if k % 2:
                pieces.stage(self._rank, own, k // 2, round_index)
                return
            for member in self._others:
                pieces.stage(member.rank, blocks[member.rank], k // 2, round_index)

        def read(k: int, round_index: int) -> None:
            if not k % 2:
                piece = pieces.of(own, k // 2)
                others = [pieces.staged(member.rank, self._rank, piece.numel(), round_index) for member in self._others]
                arithmetic.reduce([piece, *others], piece)
                return
            for member in self._others:
                piece = pieces.of(blocks[member.rank], k // 2)
                piece.copy_(pieces.staged(member.rank, member.rank, piece.numel(), round_index))

        most = max(blocks[rank].count for rank in range(self._size))
        # Also for this member's own block, which is staged after its reduction.
        pieces.reserve(self._size, most)
        yield from state.run_rounds(
            2 * pieces.round_count(most), stage, read, self._others, self._others, reads_open=False
        )

    def _reduce(self, signature: CallSignature, number: int, tensor: torch.Tensor) -> Schedule:
        memory = flat_memory(tensor)

        def read(pieces: BlockPieces, k: int, round_index: int) -> None:
            pieces.reduce(memory, memory, signature.arithmetic, k, round_index)

        return self._rooted(signature, number, memory, read, outward=False)

    def _rooted(
        self,
        signature: CallSignature,
        number: int,
        memory: Memory,
        read: Callable[[BlockPieces, int, int], None],
        *,
        outward: bool,
    ) -> Schedule:
        """Move data between the root and all other members: each reader reads all of a sender's memory."""
        yield from self._slots.enter(number)
        in_place = outward == (self._rank == signature.root) and memory.nbytes >= zero_copy.MIN_NBYTES
        location = zero_copy.shared_location(self._slots, memory.tensor) if in_place else 0
        pieces = BlockPieces(CollectiveState(self._slots, number, signature.fingerprint, location), memory.dtype)
        stage = functools.partial(pieces.stage, 0, memory)
        read_pieces = functools.partial(read, pieces)
        yield from self._to_or_from_root(signature, pieces, memory.count, stage, read_pieces, outward=outward)

    def _to_or_from_root(
        self,
        signature: CallSignature,
        pieces: Pieces,
        most: int,
        stage: PieceAction,
        read: PieceAction,
        *,
        outward: bool,
    ) -> Schedule:
        """Let the senders stage ``most`` elements, and the readers read them: from the root if ``outward``, else to it."""
        state, at_root = pieces.state, self._rank == signature.root
        peers = self._others if at_root else [self._slots.members_by_rank[signature.root]]
        count = 1 if state.location else pieces.round_count(most)
        if outward == at_root:
            name = signature.collective.name
            yield from run_staged_rounds(self.tuners, name, pieces, count, stage, None, (), peers)
        else:
            yield from state.run_rounds(count, None, read, peers, ())
        yield from state.finish(peers)

    def _reduce_scatter(self, signature: CallSignature, number: int, output: torch.Tensor, inputs: Blocks) -> Schedule:
        """Each member reduces the blocks that all members have for it, with one synchronisation a piece."""
        own = flat_memory(output)
        blocks = copy_overlapping_inputs(self._blocks(inputs), [own], {self._rank: 0})
        state = yield from self._begin_with_table(number, signature.fingerprint, blocks)
        pieces = BlockPieces(state, own.dtype, by_reader=True, table=0)
        stage = functools.partial(pieces.stage_for_all, blocks)
        read = functools.partial(pieces.reduce, blocks[self._rank], own, signature.arithmetic)
        most = max(block.count for block in blocks)
        yield from self._stage_and_read("reduce_scatter", pieces, most, stage, read)
        yield from state.finish(self._others)

    def _begin_with_table(self, number: int, fingerprint: int, blocks: Sequence[Memory], offset: int = 0) -> Schedule:
        """Enter the slot and publish the blocks' locations; the blocks are staged unless all are registered."""
        yield from self._slots.enter(number)
        location = zero_copy.post_locations(self._slots, number, [block.tensor for block in blocks], offset)
        return CollectiveState(self._slots, number, fingerprint, location)

    # -- moving --------------------------------------------------------------------------------

    def _broadcast(self, signature: CallSignature, number: int, tensor: torch.Tensor) -> Schedule:
        memory, root = flat_memory(tensor), signature.root

        def read(pieces: BlockPieces, k: int, round_index: int) -> None:
            pieces.receive(self._slots.members_by_rank[root], memory, k, round_index)

        return self._rooted(signature, number, memory, read, outward=True)

    def _all_gather(self, signature: CallSignature, number: int, blocks: Any, tensors: Any) -> Schedule:
        rows = all_gather_rows(signature, blocks, tensors, self._size, self._rank)
        state = yield from self._begin_with_table(number, signature.fingerprint, [own for _, own in rows])
        for row, (outputs, own) in enumerate(rows):
            yield from self._gather_row(state, row, outputs, own)
        yield from state.finish(self._others)

    def _gather_row(self, state: CollectiveState, row: int, blocks: Sequence[Memory], own: Memory) -> Schedule:
        pieces = BlockPieces(state, own.dtype, table=row)
        own_room = blocks[self._rank]
        in_place = own is own_room or own.tensor.data_ptr() == own_room.tensor.data_ptr()

        def read(k: int, round_index: int) -> None:
            # The piece that was just staged is still in the cache.
            if not in_place:
                pieces.of(own_room, k).copy_(pieces.of(own, k))
            for member in self._others:
                pieces.receive(member, blocks[member.rank], k, round_index)

        stage = functools.partial(pieces.stage, 0, own)
        yield from self._stage_and_read("all_gather", pieces, max(block.count for block in blocks), stage, read)

    def _gather(self, signature: CallSignature, number: int, gathered: Blocks | None, tensor: torch.Tensor) -> Schedule:
        own, blocks = flat_memory(tensor), self._blocks(gathered)
        if blocks:
            (own,) = copy_overlapping_inputs([own], blocks, {0: self._rank})
            blocks[self._rank].tensor.copy_(own.tensor)

        def read(pieces: BlockPieces, k: int, round_index: int) -> None:
            for member in self._others:
                pieces.receive(member, blocks[member.rank], k, round_index)

        return self._rooted(signature, number, own, read, outward=False)

    def _scatter(
        self, signature: CallSignature, number: int, tensor: torch.Tensor, scattered: Blocks | None
    ) -> Schedule:
        own, root = flat_memory(tensor), signature.root
        blocks = copy_overlapping_inputs(self._blocks(scattered), [own], {self._rank: 0})
        if blocks:
            own.tensor.copy_(blocks[self._rank].tensor)
        state = yield from self._begin_with_table(number, signature.fingerprint, blocks)
        pieces = BlockPieces(state, own.dtype, by_reader=True, table=0)
        stage = functools.partial(pieces.stage_for_all, blocks)

        def read(k: int, round_index: int) -> None:
            pieces.receive(self._slots.members_by_rank[root], own, k, round_index)

        yield from self._to_or_from_root(signature, pieces, own.count, stage, read, outward=True)

    def _all_to_all(self, signature: CallSignature, number: int, output: Blocks, inputs: Blocks) -> Schedule:
        """Exchange blocks whose sizes differ by pair, so that members may need different numbers of rounds.

        A member's table holds how much it sends to each member, followed by the locations of the blocks.
        """
        incoming, outgoing = self._all_to_all_blocks(output, inputs)
        state = yield from self._begin_with_table(number, signature.fingerprint, outgoing, self._size)
        self._slots.reserve(number, 0, head_nbytes(self._size))
        table = self._slots.table(number, self._rank)
        for rank, block in enumerate(outgoing):
            table[rank] = block.count
        yield from self._exchange_blocks(state, incoming, outgoing)

    def _all_to_all_blocks(self, output: Blocks, inputs: Blocks) -> tuple[list[Memory], list[Memory]]:
        incoming = self._blocks(output)
        return incoming, copy_overlapping_inputs(self._blocks(inputs), incoming, {self._rank: self._rank})

    def continue_all_to_all(self, signature: CallSignature, number: int, output: Blocks, inputs: Blocks) -> Schedule:
        """Continue an all-to-all whose data has all been staged after the table, which holds the locations."""
        location = self._slots.location_of(number, self._rank, head_nbytes(self._size))
        state = CollectiveState(self._slots, number, signature.fingerprint, location, posted=True)
        yield from state.wait_posted(self._others)
        yield from self._exchange_blocks(state, *self._all_to_all_blocks(output, inputs))

    def _exchange_blocks(
        self, state: CollectiveState, incoming: Sequence[Memory], outgoing: Sequence[Memory]
    ) -> Schedule:
        dtype, head = outgoing[0].dtype, head_nbytes(self._size)
        pieces = BlockPieces(state, dtype, by_reader=True, table=self._size, head=head)

        def read(k: int, round_index: int) -> None:
            pieces.of(incoming[self._rank], k).copy_(pieces.of(outgoing[self._rank], k))
            for member in self._others:
                if k == 0:
                    self._check_size(state.number, member, incoming[member.rank])
                pieces.receive(member, incoming[member.rank], k, round_index)

        stage = functools.partial(pieces.stage_for_all, outgoing)
        most = max(memory.count for memory in (*incoming, *outgoing))
        yield from self._stage_and_read("all_to_all", pieces, most, stage, read)
        yield from state.finish(self._others)

    def _check_size(self, number: int, member: SlotMember, block: Memory) -> None:
        """Raise MismatchError if a member sends another number of elements than this member expects."""
        count = self._slots.table(number, member.rank)[self._rank]
        if count != block.count:
            peer, nbytes = self._slots.world_ranks[member.rank], count * block.itemsize
            raise MismatchError(peer, f"rank {peer} sent {nbytes} bytes where {block.nbytes} were expected")


def _block_index(reader: int, owner: int) -> int:
    """Return the index of the reader's block in its owner's area, which holds no block for the owner itself."""
    return reader - (reader > owner)


_CALLS: dict[Collective, ScheduleOf] = {
    Collective.all_reduce: Large._all_reduce,
    Collective.reduce: Large._reduce,
    Collective.reduce_scatter: Large._reduce_scatter,
    Collective.broadcast: Large._broadcast,
    Collective.all_gather: Large._all_gather,
    Collective.all_gather_coalesced: Large._all_gather,
    Collective.gather: Large._gather,
    Collective.scatter: Large._scatter,
    Collective.all_to_all: Large._all_to_all,
}
