"""Registered tensors: their memory is mapped by every member, so nothing is copied that is not the result.

An all-reduce gives each member a slice. It reads the slice of everybody's tensor, adds, and writes the sum into everybody's
tensor, in pieces that are still in the cache when they are written to the second place. Two meetings: nobody's tensor is
touched before its owner has come, and nobody leaves before all slices are written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncdist.arena import Mapping
from asyncdist.buffers import Memory
from asyncdist.collectives.schedule import Schedule
from asyncdist.reduce import Arithmetic
from asyncdist_transports.shm.rounds import Turn
from asyncdist_transports.shm.window import DONE, Window

MIN_NBYTES = 32 << 10
"""Smaller messages are staged: two copies that stay in the cache cost less than a second meeting."""

_ALIGNED = 64
_KEPT_VIEWS = 4096


class Views:
    """Parts of members' open memory as tensors; training asks for the same ones step after step."""

    def __init__(self, window: Window) -> None:
        self._mappings: dict[int, Mapping] = {member.rank: member.mapping for member in window.others}
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


def place_of(window: Window, memory: Memory) -> int:
    """Return 1 + the offset of memory that lies open for all members; 0 if it does not, or is better staged."""
    nbytes = memory.nbytes
    if nbytes < MIN_NBYTES:
        return 0
    offset = window.arena.offset_of(memory.tensor.data_ptr(), nbytes)
    return 0 if offset is None or offset % memory.itemsize else offset + 1


def all_reduce(turn: Turn, views: Views, memory: Memory, how: Arithmetic, piece_nbytes: int) -> Schedule:
    """Reduce memory that lies open on every member; all have posted.

    Costs two meetings; a member reads 1/P of each of P tensors and writes as much. Source: the sketch above is the
    "direct" all-reduce of shared-memory MPI implementations, with the sum pushed instead of fetched.
    """
    window = turn.window
    try:
        for _ in _pushed(turn, views, memory, how, piece_nbytes):
            yield ()
        yield from turn.finish(window.others)
    except GeneratorExit:
        _abandoned.append(memory)
        raise
    window.publish(turn.number, DONE)


_abandoned: list[Memory] = []
"""Memory into which a peer may still write because its side of a failed all-reduce goes on: never to be used again."""


def _pushed(turn: Turn, views: Views, memory: Memory, how: Arithmetic, piece_nbytes: int) -> Iterator[None]:
    """Reduce our slice into everybody's memory, a piece each time."""
    window, dtype, itemsize = turn.window, memory.dtype, memory.itemsize
    order = [(window.rank, turn.place), *((member.rank, turn.places[member.rank]) for member in window.others)]
    start, stop = _slice(memory.count, window.rank, window.size, _ALIGNED // itemsize or 1)
    step = max(_ALIGNED, piece_nbytes) // itemsize
    while start < stop:
        count = min(step, stop - start)
        own, *others = [views(rank, place - 1 + start * itemsize, count, dtype) for rank, place in order]
        how.reduce([own, *others], own)
        for other in others:
            other.copy_(own)
        start += count
        yield


def _slice(count: int, rank: int, size: int, aligned: int) -> tuple[int, int]:
    """Return the slice of a rank, whose bounds are whole cache lines: two ranks never write to the same one."""
    lines = -(-count // aligned)
    return min(count, lines * rank // size * aligned), min(count, lines * (rank + 1) // size * aligned)
