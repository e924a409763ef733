"""Registered tensors: every member maps their memory, so members read and write them without staging.

In an all-reduce each member owns a slice. It reads the slice of every member's tensor, reduces, and writes the result into
every member's tensor, in pieces that are still in the cache for the second write. This costs two synchronisations: no
tensor is accessed before its owner has posted, and no member leaves before all slices are written.

A collective of several tensors or blocks posts the location of a table of their locations, at the start of the owner's
area. A member posts no location unless all its tensors are registered. `native` and `large` use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.memory.bounded_cache import BoundedCache
from asyncdist.kernel.memory.shared_arena import ALIGNMENT
from asyncdist.kernel.transport.native import CallSignature
from asyncdist_transports.shm.collectives.slot_table import (
    CALL,
    DONE,
    FINISHED,
    LINE,
    LOCATION,
    SHIFT,
    SLOTS,
    SlotTable,
)
from asyncdist_transports.shm.collectives.staging import POSTED, CollectiveState

MIN_NBYTES = 32 << 10
"""Smaller messages are staged: two copies within the cache cost less than a second synchronisation."""

_CACHED_TENSORS = 64


def shared_location(slots: SlotTable, tensor: torch.Tensor) -> int:
    """Return 1 + the arena offset of a flat registered tensor; 0 if it is not registered."""
    offset = slots.arena.offset_of(tensor.data_ptr(), tensor.nbytes)
    return 0 if offset is None or offset % tensor.itemsize else offset + 1


def post_locations(slots: SlotTable, number: int, tensors: Sequence[torch.Tensor], offset: int = 0) -> int:
    """Write the locations of flat tensors into this member's table, in a slot that it has entered.

    Returns:
        The location of the table; 0 if a tensor is not registered, or all are small enough to stage. The table leaves
        ``offset`` words free at its start.
    """
    locations = [shared_location(slots, tensor) if tensor.numel() else 1 for tensor in tensors]
    nbytes = 8 * (offset + len(locations))
    if 0 in locations or sum(tensor.nbytes for tensor in tensors) < MIN_NBYTES or nbytes > slots.area_nbytes:
        return 0
    slots.reserve(number, 0, nbytes)
    table = slots.table(number, slots.rank)
    for index, location in enumerate(locations, offset):
        table[index] = location
    return slots.location_of(number, slots.rank, 0)


def are_disjoint(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether no two of the flat tensors share memory."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.numel())
    return all(stop <= start for (_, stop), (start, _) in pairwise(spans))


class ZeroCopyAllReduce:
    """All-reduces of registered tensors with one signature; each call returns a schedule.

    It costs two synchronisations; a member reads 1/P of each of P tensors and writes as much. ``staged(state, tensor)``
    continues where a member's tensor turns out not to be registered.
    """

    def __init__(
        self,
        slots: SlotTable,
        signature: CallSignature,
        piece_nbytes: int,
        staged: Callable[[CollectiveState, Any], Schedule],
        counts: Sequence[int] = (),
    ) -> None:
        self._slots = slots
        self._call, self._dtype = signature.fingerprint, signature.dtype
        self._counts = counts or (signature.count,)
        self._arithmetic = arithmetic = signature.arithmetic
        self._combine = arithmetic.of_two if slots.size == 2 else None
        self._piece_count = max(ALIGNMENT, piece_nbytes) // signature.dtype.itemsize
        self._staged = staged
        self._cached: BoundedCache[tuple[int, ...], list[list[torch.Tensor]]] = BoundedCache(_CACHED_TENSORS)

    def __call__(self, number: int, data: torch.Tensor | Sequence[torch.Tensor], location: int) -> Schedule:
        """Reduce the contiguous tensor at ``location`` in place, as the group's n-th collective."""
        slots, others, call = self._slots, self._slots.others, self._call
        yield from slots.enter(number)
        at, posted, finished = number % SLOTS * LINE, number << SHIFT | POSTED, number << SHIFT | FINISHED
        locations = [location]
        try:
            # From here on the other members may write to the tensor.
            slots.post(number, call, location, POSTED)
            for member in others:
                words = member.words
                while words[at] < posted:
                    yield member.wait
                # The member's step is loaded before its location and its data.
                slots.fence.light()
                if words[at + CALL] != call:
                    slots.check_calls(number, call, [member])
                locations.append(words[at + LOCATION])
            if 0 in locations:
                yield from self._staged(CollectiveState(slots, number, call, posted=True), data)
                return
            for pieces in self._pieces(number, tuple(locations)):
                self._reduce_and_write(pieces)
                yield ()
            yield from slots.hold_if_withdrawn(others)
            slots.publish(number, FINISHED)
            for member in others:
                words = member.words
                while words[at] < finished:
                    yield member.wait
            slots.publish(number, DONE)
        except BaseException:
            slots.kept_tensors.append(data)
            slots.withdraw()
            raise

    def _reduce_and_write(self, pieces: list[torch.Tensor]) -> None:
        own = pieces[0]
        if self._combine is not None:
            self._combine(own, pieces[1], out=own)
            pieces[1].copy_(own)
            return
        self._arithmetic.reduce(pieces, own)
        for other in pieces[1:]:
            other.copy_(own)

    def _pieces(self, number: int, locations: tuple[int, ...]) -> list[list[torch.Tensor]]:
        """Return this member's slice of every member's tensor, piece by piece, its own first."""
        cached = self._cached.get(locations)
        if cached is None:
            cached = self._cached.add(locations, self._cut_pieces([(location,) for location in locations]))
        return cached

    def _ranks(self) -> list[int]:
        return [self._slots.rank, *(member.rank for member in self._slots.others)]

    def _cut_pieces(self, locations: Sequence[Sequence[int]]) -> list[list[torch.Tensor]]:
        """Cut this member's slice of the members' concatenated tensors; ``locations`` are by member, its own first."""
        slots, itemsize = self._slots, self._dtype.itemsize
        start, stop = _slice(sum(self._counts), slots.rank, slots.size, max(1, ALIGNMENT // itemsize))
        ranks, step = self._ranks(), self._piece_count
        pieces: list[list[torch.Tensor]] = []
        for index, count in enumerate(self._counts):
            end = min(stop, count)
            pieces.extend(
                [
                    slots.view(rank, of_member[index] - 1 + at * itemsize, min(step, end - at), self._dtype)
                    for rank, of_member in zip(ranks, locations, strict=True)
                ]
                for at in range(max(0, start), end, step)
            )
            # Relative to the next tensor.
            start, stop = start - count, stop - count
        return pieces


class CoalescedZeroCopyAllReduce(ZeroCopyAllReduce):
    """One all-reduce of several disjoint registered tensors of ``counts`` elements; ``location`` is their table's."""

    def _pieces(self, number: int, locations: tuple[int, ...]) -> list[list[torch.Tensor]]:
        count = len(self._counts)
        return self._cut_pieces([self._slots.table(number, rank)[:count].tolist() for rank in self._ranks()])


def _slice(count: int, rank: int, size: int, aligned: int) -> tuple[int, int]:
    """Return the slice of a rank, aligned to cache lines so that no two ranks write to the same line."""
    lines = -(-count // aligned)
    return min(count, lines * rank // size * aligned), min(count, lines * (rank + 1) // size * aligned)
