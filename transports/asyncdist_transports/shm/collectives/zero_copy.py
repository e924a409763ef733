"""Registered tensors: their memory is mapped by every member, so nothing is copied that is not the result.

An all-reduce gives each member a slice. It reads the slice of everybody's tensor, adds, and writes the sum into everybody's
tensor, in pieces that are still in the cache when they are written to the second place. Two meetings: nobody's tensor is
touched before its owner has come, and nobody leaves before all slices are written.

Where a collective is of several tensors, or blocks, their places stand in a table at the head of the owner's area, and the
place that it posts is the table's. It posts none unless all of them lie open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from asyncdist.algorithms.schedule import Schedule
from asyncdist.memory.shared_arena import ArenaMapping
from asyncdist.transport.native import CallSignature
from asyncdist_transports.shm.collectives.slot_table import CALL, DONE, FINISHED, LINE, PLACE, SHIFT, SLOTS, SlotTable
from asyncdist_transports.shm.collectives.staging import POSTED, CollectiveState

MIN_NBYTES = 32 << 10
"""Smaller messages are staged: two copies that stay in the cache cost less than a second meeting."""

_ALIGNED = 64
_KEPT_VIEWS = 4096
_KEPT_TENSORS = 64


class Views:
    """Parts of members' open memory as tensors; training asks for the same ones step after step."""

    def __init__(self, window: SlotTable) -> None:
        self._mappings: dict[int, ArenaMapping] = {member.rank: member.mapping for member in window.others}
        self._mappings[window.rank] = window.arena.mapping
        self._kept: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    def __call__(self, rank: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``count`` elements of a member's arena from an offset on."""
        key = (rank, offset, count, dtype)
        tensor = self._kept.get(key)
        if tensor is None:
            if len(self._kept) >= _KEPT_VIEWS:
                self._kept.clear()
            tensor = self._kept[key] = self._mappings[rank].tensor(offset, count, dtype)
        return tensor


def place_of(window: SlotTable, tensor: torch.Tensor) -> int:
    """Return 1 + the offset of a flat tensor that lies open for all members; 0 if it does not, or is better staged."""
    return _open(window, tensor) if tensor.nbytes >= MIN_NBYTES else 0


def _open(window: SlotTable, tensor: torch.Tensor) -> int:
    offset = window.arena.offset_of(tensor.data_ptr(), tensor.nbytes)
    return 0 if offset is None or offset % tensor.itemsize else offset + 1


def show(window: SlotTable, number: int, tensors: Sequence[torch.Tensor], behind: int = 0) -> int:
    """Write the places of flat tensors into our table, which slot is ours already, and return that of the table.

    0 if one of them does not lie open, or all are better staged. They stand ``behind`` so many words that are another's.
    """
    places = [_open(window, tensor) if tensor.numel() else 1 for tensor in tensors]
    nbytes = 8 * (behind + len(places))
    if 0 in places or sum(tensor.nbytes for tensor in tensors) < MIN_NBYTES or nbytes > window.area_nbytes:
        return 0
    window.reserve(number, 0, nbytes)
    table = window.table(number, window.rank)
    for which, place in enumerate(places, behind):
        table[which] = place
    return window.place_of(number, window.rank, 0)


def lie_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether no two of some flat tensors share memory."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.numel())
    return all(stop <= start for (_, stop), (start, _) in pairwise(spans))


class ZeroCopyAllReduce:
    """All-reduces of open tensors of one kind; each is a schedule.

    Costs two meetings; a member reads 1/P of each of P tensors and writes as much. ``staged(turn, tensor)`` goes on where
    a member's tensor turns out not to lie open.
    """

    def __init__(
        self,
        window: SlotTable,
        views: Views,
        kind: CallSignature,
        piece_nbytes: int,
        staged: Callable[[CollectiveState, Any], Schedule],
        counts: Sequence[int] = (),
    ) -> None:
        self._window, self._views = window, views
        self._call, self._dtype = kind.fingerprint, kind.dtype
        self._counts = counts or (kind.count,)
        self._how = how = kind.arithmetic
        self._combine = how.of_two if window.size == 2 else None
        self._piece_count = max(_ALIGNED, piece_nbytes) // kind.dtype.itemsize
        self._staged = staged
        self._kept: dict[tuple[int, ...], list[list[torch.Tensor]]] = {}

    def __call__(self, number: int, data: torch.Tensor | Sequence[torch.Tensor], place: int) -> Schedule:
        """Reduce what lies at ``place``, a contiguous tensor, in place, as the group's n-th collective."""
        window, others, call = self._window, self._window.others, self._call
        yield from window.enter(number)
        at, posted, finished = number % SLOTS * LINE, number << SHIFT | POSTED, number << SHIFT | FINISHED
        places = [place]
        try:
            window.post(number, call, place, POSTED)  # from here on they may write to it
            for member in others:
                words = member.words
                while words[at] < posted:
                    yield member.rank
                window.fence.light()  # their step before what they have posted with it, and their data
                if words[at + CALL] != call:
                    window.check(number, call, [member])
                places.append(words[at + PLACE])
            if 0 in places:
                yield from self._staged(CollectiveState(window, number, call, posted=True), data)
                return
            for pieces in self._pieces(number, tuple(places)):
                self._push(pieces)
                yield ()
            yield from window.still_open(others)
            window.publish(number, FINISHED)
            for member in others:
                words = member.words
                while words[at] < finished:
                    yield member.rank
            window.publish(number, DONE)
        except BaseException:
            window.abandoned.append(data)
            window.withdraw()
            raise

    def _push(self, pieces: list[torch.Tensor]) -> None:
        own = pieces[0]
        if self._combine is not None:
            self._combine(own, pieces[1], out=own)
            pieces[1].copy_(own)
            return
        self._how.reduce(pieces, own)
        for other in pieces[1:]:
            other.copy_(own)

    def _pieces(self, number: int, places: tuple[int, ...]) -> list[list[torch.Tensor]]:
        """Return our slice, piece by piece, of every member's tensor, ours first."""
        kept = self._kept.get(places)
        if kept is None:
            if len(self._kept) >= _KEPT_TENSORS:
                self._kept.clear()
            kept = self._kept[places] = self._cut([(place,) for place in places])
        return kept

    def _ranks(self) -> list[int]:
        return [self._window.rank, *(member.rank for member in self._window.others)]

    def _cut(self, places: Sequence[Sequence[int]]) -> list[list[torch.Tensor]]:
        """Cut our slice of everybody's tensors, taken as one, whose places are given by member, ours first."""
        window, itemsize = self._window, self._dtype.itemsize
        start, stop = _slice(sum(self._counts), window.rank, window.size, max(1, _ALIGNED // itemsize))
        ranks, step = self._ranks(), self._piece_count
        pieces: list[list[torch.Tensor]] = []
        for which, count in enumerate(self._counts):
            end = min(stop, count)
            pieces.extend(
                [
                    self._views(rank, lie[which] - 1 + at * itemsize, min(step, end - at), self._dtype)
                    for rank, lie in zip(ranks, places, strict=True)
                ]
                for at in range(max(0, start), end, step)
            )
            start, stop = start - count, stop - count  # as the next tensor counts
        return pieces


class CoalescedZeroCopyAllReduce(ZeroCopyAllReduce):
    """One all-reduce of several open tensors that lie apart, of ``counts`` elements; ``place`` is that of their table."""

    def _pieces(self, number: int, places: tuple[int, ...]) -> list[list[torch.Tensor]]:
        count = len(self._counts)
        return self._cut([self._window.table(number, rank)[:count].tolist() for rank in self._ranks()])


def _slice(count: int, rank: int, size: int, aligned: int) -> tuple[int, int]:
    """Return the slice of a rank, whose bounds are whole cache lines: two ranks never write to the same one."""
    lines = -(-count // aligned)
    return min(count, lines * rank // size * aligned), min(count, lines * (rank + 1) // size * aligned)
