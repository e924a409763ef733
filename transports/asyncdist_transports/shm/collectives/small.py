"""Every collective of small tensors as a `SmallExchange`: what a member stages, and what it takes.

A member stages all that it has to give, one block after the other, whatever anybody takes of it: one copy is had for less
than what it takes to leave a block out. Blocks are taken by their addresses. Making a view of one takes longer than
copying it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from asyncdist.base.ops import Collective
from asyncdist.transport.native import CallSignature, PreparedCall
from asyncdist_transports.shm.collectives.piece_layout import head_nbytes
from asyncdist_transports.shm.collectives.slot_table import DONE, LINE, PLACE, RESULT, SLOTS, SlotTable
from asyncdist_transports.shm.collectives.small_exchange import Moves, SmallExchange, UnlikeBlocks
from asyncdist_transports.shm.collectives.staging import POSTED, STAGED

MOST_NBYTES = 256 << 10
"""What a member stages at most, but in an all-reduce; more goes in rounds, or is taken from where it lies open.

Up to here staging costs less than a second meeting, also where data lies open. An all-gather of 64 KiB between two ranks
takes 15 µs, and took 35 in place; of 256 KiB 29 µs, and 48.
"""

_LINE_NBYTES = 8 * LINE
_ADDED_NBYTES = 256 << 10  # what one member may have to add up alone before the work is divided

# Half of what `copy_` takes for less than a page. The interpreter is kept: to hand it over takes longer than the copy.
_move = ctypes.PyDLL(None).memmove
_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move.restype = None

Blocks = torch.Tensor | Sequence[torch.Tensor]
"""A block for each member: one after the other in one tensor, or each a tensor."""


def exchanges(size: int, nbytes: int) -> bool:
    """Return whether in an all-reduce everybody adds everything, at most an area at a time.

    Between two members there is nothing to be gained by dividing the work.
    """
    return size == 2 or nbytes * (size - 1) <= _ADDED_NBYTES


def swap_of(window: SlotTable, kind: CallSignature, otherwise: PreparedCall) -> SmallExchange | None:
    """Return what does all calls of a kind, None if they are none of ours: on all members alike, but in an all-to-all.

    There a member may be the only one whose blocks are all of one size; ``otherwise`` goes on where that is found out.
    """
    small = _Small(window, kind, otherwise)
    if kind.collective is Collective.all_reduce:
        fits = kind.nbytes <= window.area_nbytes and exchanges(window.size, kind.nbytes)
    else:
        fits = kind.nbytes * small.blocks <= min(MOST_NBYTES, window.area_nbytes - small.head)
    return _KINDS[kind.collective](small) if fits else None


class _Small:
    """Calls of one kind, whose members show areas of so many ``blocks``, behind a ``head`` of so many bytes."""

    def __init__(self, window: SlotTable, kind: CallSignature, otherwise: PreparedCall) -> None:
        self.window, self.kind, self.otherwise = window, kind, otherwise
        self.blocks = window.size if kind.collective in _OF_BLOCKS else 1
        self.head = head_nbytes(window.size) if kind.collective is Collective.all_to_all else 0
        self.rank, self.size, self.root = window.rank, window.size, kind.root
        self.nbytes = kind.nbytes
        self.others = window.others

    @property
    def behind(self) -> int:
        """Where in an area, behind what is staged, a result is shown."""
        return -(-self.nbytes // _LINE_NBYTES) * _LINE_NBYTES

    @property
    def shows_results(self) -> bool:
        return self.size > 2 and self.window.crowded and self.behind + self.nbytes <= self.window.area_nbytes

    # -- areas ---------------------------------------------------------------------------------

    def shown(self, number: int, rank: int, block: int = 0) -> torch.Tensor:
        """Return a block of a member's area as a tensor like the result."""
        kind, count = self.kind, self.kind.count
        self.window.reserve(number, 0, self.head + self.blocks * self.nbytes)
        area = self.window.only(number, rank, self.head, self.blocks * count, kind.dtype)
        return area[block * count : (block + 1) * count].view(kind.shape)

    def address(self, number: int, rank: int, block: int = 0) -> int:
        """Return where a block of a member's area is."""
        return self.shown(number, rank, block).data_ptr()

    def addresses(self, blocks: Blocks) -> Sequence[int]:
        """Return where everybody's blocks are in a tensor, or in several."""
        if isinstance(blocks, torch.Tensor):
            start, nbytes = blocks.data_ptr(), self.nbytes
            return [start + rank * nbytes for rank in range(self.size)]
        return [block.data_ptr() for block in blocks]

    def stage_blocks(self, number: int) -> Callable[[Blocks], None]:
        """Return what copies one block for each member into our area."""
        to, nbytes, whole = self.address(number, self.rank), self.nbytes, self.size * self.nbytes

        def stage(blocks: Blocks) -> None:
            if isinstance(blocks, torch.Tensor):
                _move(to, blocks.data_ptr(), whole)
            else:
                for place, block in enumerate(blocks):
                    _move(to + place * nbytes, block.data_ptr(), nbytes)

        return stage

    # -- who meets whom ------------------------------------------------------------------------

    def among_all(
        self, moves: Callable[[int], Moves], goal: int = STAGED, otherwise: PreparedCall | None = None
    ) -> SmallExchange:
        call = self.kind.fingerprint
        return SmallExchange(self.window, call, moves, self.others, first=goal, goal=goal, otherwise=otherwise)

    def from_root(self, give: Callable[[int], Moves], take: Callable[[int], Moves]) -> SmallExchange:
        window, call = self.window, self.kind.fingerprint
        if self.rank == self.root:  # with the first word it has said all
            return SmallExchange(window, call, give, (), first=DONE, goal=STAGED)
        return SmallExchange(window, call, take, (window.by_rank[self.root],), first=POSTED, goal=STAGED)

    def to_root(self, give: Callable[[int], Moves], take: Callable[[int], Moves]) -> SmallExchange:
        window, call = self.window, self.kind.fingerprint
        if self.rank == self.root:
            return SmallExchange(window, call, take, self.others, first=POSTED, goal=STAGED)
        return SmallExchange(window, call, give, (), first=DONE, goal=STAGED)


# -- reducing -----------------------------------------------------------------------------------------


def _all_reduce(small: _Small) -> SmallExchange:
    """Everybody adds everything, in the order of the ranks; where they share cores, who finds the sum copies it."""
    how, rank, nbytes = small.kind.arithmetic, small.rank, small.nbytes
    combine = how.of_two if small.size == 2 else None

    def moves(number: int) -> Moves:
        to = small.address(number, rank)
        areas = [small.shown(number, each) for each in range(small.size)]

        def stage(tensor: torch.Tensor) -> None:
            _move(to, tensor.data_ptr(), nbytes)

        if small.shows_results:
            return Moves(stage, _found_or_reduced(small, number, areas))
        if combine is None:
            return Moves(stage, lambda tensor: how.reduce(areas, tensor))
        lower, higher = areas  # our own is still in the nearest cache, and need not be read from the area
        if rank == 0:
            return Moves(stage, lambda tensor: combine(tensor, higher, out=tensor))
        return Moves(stage, lambda tensor: combine(lower, tensor, out=tensor))

    return small.among_all(moves)


def _found_or_reduced(small: _Small, number: int, areas: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """Return what copies the sum of everybody's areas from a member who shows it, or else adds, and shows it.

    Four ranks on two cores take 35 µs for 4 bytes, and 41 if all add; 43 for 16 KiB, and 77. Whoever adds, the order is
    that of the ranks.
    """
    window, how, nbytes = small.window, small.kind.arithmetic, small.nbytes
    behind, count, dtype = small.behind, small.kind.count, small.kind.dtype
    window.reserve(number, 0, behind + nbytes)
    shown = [window.only(number, each, behind, count, dtype).view(small.kind.shape) for each in range(small.size)]
    ours, found = shown[small.rank], [(member, shown[member.rank].data_ptr()) for member in small.others]
    words, light, slot = window.words, window.fence.light, number % SLOTS
    at, our_address = slot * LINE + RESULT, ours.data_ptr()

    def take(tensor: torch.Tensor) -> None:
        now = window.last[slot]
        for member, address in found:
            if member.words[at] == now:
                light()  # the word before what it tells of
                _move(tensor.data_ptr(), address, nbytes)
                return
        how.reduce(areas, ours)
        light()  # the sum before the word that tells of it
        words[at] = now
        _move(tensor.data_ptr(), our_address, nbytes)

    return take


def _reduce(small: _Small) -> SmallExchange:
    how, nbytes = small.kind.arithmetic, small.nbytes

    def give(number: int) -> Moves:
        to = small.address(number, small.rank)
        return Moves(lambda tensor: _move(to, tensor.data_ptr(), nbytes), None)

    def take(number: int) -> Moves:
        areas = [small.shown(number, member.rank) for member in small.others]
        return Moves(None, lambda tensor: how.reduce([tensor, *areas], tensor))

    return small.to_root(give, take)


def _reduce_scatter(small: _Small) -> SmallExchange:
    how = small.kind.arithmetic

    def moves(number: int) -> Moves:
        stage_blocks = small.stage_blocks(number)
        areas = [small.shown(number, rank, small.rank) for rank in range(small.size)]
        return Moves(lambda output, blocks: stage_blocks(blocks), lambda output, blocks: how.reduce(areas, output))

    return small.among_all(moves)


# -- moving -------------------------------------------------------------------------------------------


def _broadcast(small: _Small) -> SmallExchange:
    nbytes = small.nbytes

    def give(number: int) -> Moves:
        to = small.address(number, small.rank)
        return Moves(lambda tensor: _move(to, tensor.data_ptr(), nbytes), None)

    def take(number: int) -> Moves:
        source = small.address(number, small.root)
        return Moves(None, lambda tensor: _move(tensor.data_ptr(), source, nbytes))

    return small.from_root(give, take)


def _all_gather(small: _Small) -> SmallExchange:
    nbytes = small.nbytes

    def moves(number: int) -> Moves:
        own = small.address(number, small.rank)
        areas = [small.address(number, rank) for rank in range(small.size)]

        def stage(blocks: Blocks, tensor: torch.Tensor) -> None:
            _move(own, tensor.data_ptr(), nbytes)

        def take(blocks: Blocks, tensor: torch.Tensor) -> None:
            for to, area in zip(small.addresses(blocks), areas, strict=True):
                _move(to, area, nbytes)

        return Moves(stage, take)

    return small.among_all(moves)


def _gather(small: _Small) -> SmallExchange:
    rank, nbytes = small.rank, small.nbytes

    def give(number: int) -> Moves:
        to = small.address(number, rank)
        return Moves(lambda blocks, tensor: _move(to, tensor.data_ptr(), nbytes), None)

    def take(number: int) -> Moves:
        areas = [(member.rank, small.address(number, member.rank)) for member in small.others]

        def collect(blocks: Blocks, tensor: torch.Tensor) -> None:
            places = small.addresses(blocks)
            _move(places[rank], tensor.data_ptr(), nbytes)  # first: it may lie where another's goes
            for each, area in areas:
                _move(places[each], area, nbytes)

        return Moves(None, collect)

    return small.to_root(give, take)


def _scatter(small: _Small) -> SmallExchange:
    rank, nbytes = small.rank, small.nbytes

    def give(number: int) -> Moves:
        stage_blocks = small.stage_blocks(number)

        def hand_out(tensor: torch.Tensor, blocks: Blocks) -> None:
            stage_blocks(blocks)
            _move(tensor.data_ptr(), small.addresses(blocks)[rank], nbytes)

        return Moves(hand_out, None)

    def take(number: int) -> Moves:
        source = small.address(number, small.root, rank)
        return Moves(None, lambda tensor, blocks: _move(tensor.data_ptr(), source, nbytes))

    return small.from_root(give, take)


def _all_to_all(small: _Small) -> SmallExchange:
    """What each sends to whom stands in a table, and where it lies, for those who go in rounds."""
    window, size, rank, nbytes = small.window, small.size, small.rank, small.nbytes

    def moves(number: int) -> Moves:
        stage_blocks = small.stage_blocks(number)
        places = [window.place_of(number, rank, small.head + each * nbytes) for each in range(size)]
        says = torch.tensor([small.kind.count] * size + places, dtype=torch.int64, device="cpu")
        table = window.only(number, rank, 0, 2 * size, torch.int64).data_ptr()
        areas = [small.address(number, each, rank) for each in range(size)]
        at = number % SLOTS * LINE + PLACE
        met = [
            (member.words, window.place_of(number, member.rank, small.head), window.table(number, member.rank))
            for member in small.others
        ]

        def stage(blocks: Blocks, outgoing: Blocks) -> None:
            _move(table, says.data_ptr(), says.nbytes)
            stage_blocks(outgoing)

        def take(blocks: Blocks, outgoing: Blocks) -> None:
            for words, place, sent in met:
                if words[at] != place or sent[rank] != small.kind.count:
                    raise UnlikeBlocks
            for to, area in zip(small.addresses(blocks), areas, strict=True):
                _move(to, area, nbytes)

        return Moves(stage, take, window.place_of(number, rank, small.head))

    return small.among_all(moves, otherwise=small.otherwise)


def _barrier(small: _Small) -> SmallExchange:
    return small.among_all(lambda number: Moves(None, lambda: None), POSTED)


_OF_BLOCKS = {Collective.reduce_scatter, Collective.scatter, Collective.all_to_all}
_KINDS: dict[Collective, Callable[[_Small], SmallExchange]] = {
    Collective.all_reduce: _all_reduce,
    Collective.reduce: _reduce,
    Collective.reduce_scatter: _reduce_scatter,
    Collective.broadcast: _broadcast,
    Collective.all_gather: _all_gather,
    Collective.gather: _gather,
    Collective.scatter: _scatter,
    Collective.all_to_all: _all_to_all,
    Collective.barrier: _barrier,
}
