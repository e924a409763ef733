"""Every collective of larger tensors, of any sizes: who stages what in which round, and who takes it from where.

A collective is a `CollectiveState` in a window: it stages blocks, takes blocks, and leaves. `Pieces` says where a block's pieces lie
while they are staged. Reductions differ from moves in what taking is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from asyncdist.algorithms.schedule import Schedule
from asyncdist.errors import MismatchError
from asyncdist.memory.buffers import Memory, TensorBlocks
from asyncdist.memory.reduce_kernels import Arithmetic
from asyncdist.transport.native import MemoryBlocks
from asyncdist_transports.shm.collectives import zero_copy
from asyncdist_transports.shm.collectives.piece_layout import Pieces, head_nbytes
from asyncdist_transports.shm.collectives.slot_table import DONE, SlotMember, SlotTable
from asyncdist_transports.shm.collectives.small import exchanges
from asyncdist_transports.shm.collectives.staging import CollectiveState, Piece
from asyncdist_transports.shm.collectives.streaming import StagedStream

Taker = Callable[[Pieces, int, int], None]
"""``take(pieces, k, turn)`` takes the k-th piece of everything, in the areas of that round."""


class Large:
    """Collectives in rounds; what they are called with is what `Native` says."""

    def __init__(self, window: SlotTable, views: zero_copy.Views, stream: StagedStream) -> None:
        self._window, self._views, self._stream = window, views, stream
        self._rank, self._size = window.rank, window.size
        self._others = window.others

    # -- reducing ------------------------------------------------------------------------------

    def all_staged(self, turn: CollectiveState, memories: Sequence[Memory], how: Arithmetic) -> Schedule:
        """Reduce several memories by way of the areas, in a slot that we have entered, and leave it."""
        area = self._window.area_nbytes
        most = max(memory.nbytes if exchanges(self._size, memory.nbytes) else area for memory in memories)
        for half in (0, 1):  # before the first is reduced
            self._window.reserve(turn.number, half, min(most, area))
        for memory in memories:
            yield from self.staged(turn, memory, how)
        self._window.publish(turn.number, DONE)

    def staged(self, turn: CollectiveState, memory: Memory, how: Arithmetic) -> Schedule:
        """Reduce a memory by way of the areas, in a slot that we have entered, and do not leave it.

        Costs one meeting for what fits into one piece; each member then adds everybody's contribution itself. Of larger
        ones each member reduces its own block, two meetings a piece; between two members there is nothing to be gained
        by that.
        """
        if exchanges(self._size, memory.nbytes):
            yield from self._exchange(turn, memory, how)
        else:
            yield from self._scatter_and_gather(turn, memory, how)

    def _exchange(self, turn: CollectiveState, memory: Memory, how: Arithmetic) -> Schedule:
        """Everybody's pieces to everybody, each adds them all, in the order of the ranks."""
        pieces = Pieces(turn, 1, memory.dtype)
        in_place = self._size == 2  # then ours need not be read from the area, and may be overwritten at once

        def take(k: int, at: int) -> None:
            own = pieces.of(memory, k)
            inputs = [pieces.staged(rank, 0, own.numel(), at) for rank in range(self._size)]
            if in_place:
                inputs[self._rank] = own
            how.reduce(inputs, own)

        def stage(k: int, at: int) -> None:
            pieces.stage(0, memory, k, at)

        yield from self._trade(turn, "all_reduce", pieces, memory.count, stage, take, reads_open=False)

    def _trade(
        self,
        turn: CollectiveState,
        name: str,
        pieces: Pieces,
        most: int,
        stage: Piece,
        take: Piece,
        *,
        reads_open: bool = True,
    ) -> Schedule:
        """Have everybody stage and take, in as many rounds as ``most`` elements need."""
        kind, count, others = (name, pieces.dtype), pieces.rounds(most), self._others
        return self._stream.rounds(turn, kind, count, pieces.nbytes, stage, take, others, others, reads_open=reads_open)

    def _scatter_and_gather(self, turn: CollectiveState, memory: Memory, how: Arithmetic) -> Schedule:
        """Each member reduces the pieces of its own block, and hands them out: rounds of the one and of the other."""
        pieces = Pieces(turn, self._size, memory.dtype)
        parts = TensorBlocks.split(memory, self._size)
        blocks = [parts[rank] for rank in range(self._size)]
        own = blocks[self._rank]

        def stage(k: int, at: int) -> None:
            if k % 2:
                pieces.stage(self._rank, own, k // 2, at)
                return
            for member in self._others:
                pieces.stage(member.rank, blocks[member.rank], k // 2, at)

        def take(k: int, at: int) -> None:
            if not k % 2:
                self._reduce_block(pieces, own, pieces.of(own, k // 2), at, how)
                return
            for member in self._others:
                piece = pieces.of(blocks[member.rank], k // 2)
                piece.copy_(pieces.staged(member.rank, member.rank, piece.numel(), at))

        most = max(block.count for block in blocks)
        pieces.reserve(self._size, most)  # also for our own block, which is staged when others' have been added to it
        yield from turn.rounds(2 * pieces.rounds(most), stage, take, self._others, self._others, reads_open=False)

    def _reduce_block(self, pieces: Pieces, own: Memory, piece: torch.Tensor, at: int, how: Arithmetic) -> None:
        others = [pieces.staged(member.rank, self._rank, piece.numel(), at) for member in self._others]
        how.reduce([piece, *others], piece)

    def reduce(self, number: int, fingerprint: int, memory: Memory, root: int, how: Arithmetic) -> Schedule:
        def take(pieces: Pieces, k: int, at: int) -> None:
            own = pieces.of(memory, k)
            places = pieces.turn.places
            others = [self._seen(pieces, each, places[each.rank], 0, k, own.numel(), at) for each in self._others]
            how.reduce([own, *others], own)

        return self._one_way("reduce", number, fingerprint, memory, root, take, outward=False)

    def _one_way(
        self, name: str, number: int, fingerprint: int, memory: Memory, root: int, take: Taker, *, outward: bool
    ) -> Schedule:
        """Move data between the root and all others: who sends hands out a memory, all of which each taker takes."""
        peers = self._others if self._rank == root else [self._window.by_rank[root]]
        sends = outward == (self._rank == root)
        turn = CollectiveState(
            self._window, number, fingerprint, zero_copy.place_of(self._window, memory.tensor) if sends else 0
        )
        pieces = Pieces(turn, 1, memory.dtype)
        count = 1 if turn.place else pieces.rounds(memory.count)
        yield from self._window.enter(number)
        if sends:
            stage = functools.partial(pieces.stage, 0, memory)
            yield from self._stream.rounds(turn, (name, memory.dtype), count, pieces.nbytes, stage, None, (), peers)
        else:
            yield from turn.rounds(count, None, functools.partial(take, pieces), peers, ())
        yield from turn.end(peers)

    def _seen(
        self, pieces: Pieces, member: SlotMember, place: int, block: int, k: int, count: int, at: int
    ) -> torch.Tensor:
        """Return the k-th piece of a member's block: open from its place on, or staged if that is 0."""
        if not place:
            return pieces.staged(member.rank, block, count, at)
        offset = place - 1 + k * pieces.step * pieces.dtype.itemsize
        return self._views(member.rank, offset, count, pieces.dtype)

    def _shown(self, turn: CollectiveState, member: SlotMember, which: int) -> int:
        """Return the place that stands in a member's table, 0 if it stages."""
        return turn.places[member.rank] and self._window.table(turn.number, member.rank)[which]

    def reduce_scatter(
        self, number: int, fingerprint: int, inputs: MemoryBlocks, own: Memory, how: Arithmetic
    ) -> Schedule:
        """One meeting a piece: each member adds what everybody has for it."""
        blocks = [inputs[rank] for rank in range(self._size)]
        turn = yield from self._showing(number, fingerprint, blocks)
        pieces = Pieces(turn, max(1, self._size - 1), own.dtype)

        def stage(k: int, at: int) -> None:
            for member in self._others:
                pieces.stage(_place_of(member.rank, self._rank), blocks[member.rank], k, at)

        def take(k: int, at: int) -> None:
            piece = pieces.of(own, k)
            others = [self._ours(pieces, member, k, piece.numel(), at) for member in self._others]
            how.reduce([pieces.of(blocks[self._rank], k), *others], piece)

        most = max(block.count for block in blocks)
        yield from self._trade(turn, "reduce_scatter", pieces, most, stage, take)
        yield from turn.end(self._others)

    def _showing(self, number: int, fingerprint: int, blocks: Sequence[Memory], behind: int = 0) -> Schedule:
        """Enter the slot, and show where blocks lie; they are staged unless all lie open: see `direct.show`."""
        yield from self._window.enter(number)
        place = zero_copy.show(self._window, number, [block.tensor for block in blocks], behind)
        return CollectiveState(self._window, number, fingerprint, place)

    def _ours(self, pieces: Pieces, member: SlotMember, k: int, count: int, at: int, behind: int = 0) -> torch.Tensor:
        """Return the k-th piece of the block that a member has for us."""
        place = self._shown(pieces.turn, member, behind + self._rank)
        return self._seen(pieces, member, place, _place_of(self._rank, member.rank), k, count, at)

    # -- moving --------------------------------------------------------------------------------

    def broadcast(self, number: int, fingerprint: int, memory: Memory, root: int) -> Schedule:
        def take(pieces: Pieces, k: int, at: int) -> None:
            piece = pieces.of(memory, k)
            source, place = self._window.by_rank[root], pieces.turn.places[root]
            piece.copy_(self._seen(pieces, source, place, 0, k, piece.numel(), at))

        return self._one_way("broadcast", number, fingerprint, memory, root, take, outward=True)

    def all_gather(self, number: int, fingerprint: int, rows: Sequence[tuple[MemoryBlocks, Memory]]) -> Schedule:
        turn = yield from self._showing(number, fingerprint, [own for _, own in rows])
        for row, (blocks, own) in enumerate(rows):
            yield from self._gather_row(turn, row, [blocks[rank] for rank in range(self._size)], own)
        yield from turn.end(self._others)

    def _gather_row(self, turn: CollectiveState, row: int, blocks: Sequence[Memory], own: Memory) -> Schedule:
        pieces = Pieces(turn, 1, own.dtype)
        room = blocks[self._rank]
        in_place = own is room or own.tensor.data_ptr() == room.tensor.data_ptr()

        def take(k: int, at: int) -> None:
            if not in_place:  # what we have staged just now is still in the nearest cache
                pieces.of(room, k).copy_(pieces.of(own, k))
            for member in self._others:
                piece = pieces.of(blocks[member.rank], k)
                if piece.numel():
                    piece.copy_(self._seen(pieces, member, self._shown(turn, member, row), 0, k, piece.numel(), at))

        def stage(k: int, at: int) -> None:
            pieces.stage(0, own, k, at)

        yield from self._trade(turn, "all_gather", pieces, max(block.count for block in blocks), stage, take)

    def gather(self, number: int, fingerprint: int, own: Memory, blocks: MemoryBlocks, root: int) -> Schedule:
        def take(pieces: Pieces, k: int, at: int) -> None:
            for member in self._others:
                piece = pieces.of(blocks[member.rank], k)
                piece.copy_(self._seen(pieces, member, pieces.turn.places[member.rank], 0, k, piece.numel(), at))

        return self._one_way("gather", number, fingerprint, own, root, take, outward=False)

    def scatter(self, number: int, fingerprint: int, own: Memory, blocks: MemoryBlocks, root: int) -> Schedule:
        given = [blocks[rank] for rank in range(self._size)] if self._rank == root else []
        turn = yield from self._showing(number, fingerprint, given)
        pieces = Pieces(turn, max(1, self._size - 1), own.dtype)
        count = 1 if turn.place else pieces.rounds(own.count)
        if self._rank == root:

            def stage(k: int, at: int) -> None:
                for member in self._others:
                    pieces.stage(_place_of(member.rank, root), blocks[member.rank], k, at)

            kind = "scatter", own.dtype
            yield from self._stream.rounds(turn, kind, count, pieces.nbytes, stage, None, (), self._others)
            yield from turn.end(self._others)
            return
        source = self._window.by_rank[root]

        def take(k: int, at: int) -> None:
            piece = pieces.of(own, k)
            piece.copy_(self._ours(pieces, source, k, piece.numel(), at))

        yield from turn.rounds(count, None, take, [source], ())
        yield from turn.end(())

    def all_to_all(
        self, number: int, fingerprint: int, incoming: Sequence[Memory], outgoing: Sequence[Memory]
    ) -> Schedule:
        """Sizes differ by pair, so members may need unequally many rounds; who has left has taken everything.

        How much each sends to whom stands in its table, before where that lies.
        """
        turn = yield from self._showing(number, fingerprint, outgoing, self._size)
        self._window.reserve(number, 0, head_nbytes(self._size))
        table = self._window.table(number, self._rank)
        for rank, block in enumerate(outgoing):
            table[rank] = block.count
        yield from self._cross(turn, incoming, outgoing)

    def cross_staged(
        self, number: int, fingerprint: int, incoming: Sequence[Memory], outgoing: Sequence[Memory]
    ) -> Schedule:
        """Go on with an all-to-all after all of it was staged behind the table, which says that it lies there."""
        place = self._window.place_of(number, self._rank, head_nbytes(self._size))
        turn = CollectiveState(self._window, number, fingerprint, place, posted=True)
        yield from turn.meet(self._others)
        yield from self._cross(turn, incoming, outgoing)

    def _cross(self, turn: CollectiveState, incoming: Sequence[Memory], outgoing: Sequence[Memory]) -> Schedule:
        pieces = Pieces(turn, max(1, self._size - 1), outgoing[0].dtype, head=head_nbytes(self._size))

        def stage(k: int, at: int) -> None:
            for member in self._others:
                pieces.stage(_place_of(member.rank, self._rank), outgoing[member.rank], k, at)

        def take(k: int, at: int) -> None:
            pieces.of(incoming[self._rank], k).copy_(pieces.of(outgoing[self._rank], k))
            for member in self._others:
                block = incoming[member.rank]
                if k == 0:
                    self._check_sent(turn.number, member, block)
                piece = pieces.of(block, k)
                if piece.numel():
                    piece.copy_(self._ours(pieces, member, k, piece.numel(), at, self._size))

        most = max(memory.count for memory in (*incoming, *outgoing))
        yield from self._trade(turn, "all_to_all", pieces, most, stage, take)
        yield from turn.end(self._others)

    def _check_sent(self, number: int, member: SlotMember, block: Memory) -> None:
        """Raise MismatchError if a member sends us something else than we expect."""
        count = self._window.table(number, member.rank)[self._rank]
        if count != block.count:
            peer, nbytes = self._window.world_ranks[member.rank], count * block.itemsize
            raise MismatchError(peer, f"rank {peer} sent {nbytes} bytes where {block.nbytes} were expected")


def _place_of(taker: int, owner: int) -> int:
    """Return which place in its owner's area holds the taker's block; there is none for the owner's own."""
    return taker - (taker > owner)
