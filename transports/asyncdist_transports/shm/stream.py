"""Large tensors that everybody shows to everybody, piece by piece: at once, or staged well ahead of being read.

What a rank has just written lies in the caches of its core. Where cores share a cache, it is best read at once. Where
they do not, another core gets it from there at a fraction of memory's speed, and some MiB later, when it has moved on,
several times as fast. A virtual machine cannot know, and may be moved from the one to the other: so we try both now and
then, and do what was faster. Measured with two ranks, all-reduce of 25 MiB: on cores that share a cache 3.4 ms at once
and 5.0 ms ahead; on others 11.5 ms at once and 5.1 ms ahead.

How far ahead a member stages is its own affair. It uses 2 + 2 * ahead places of its stream in turn, says so, and says
before each piece, and after the last, at which one it is: who is at piece n has taken piece n - 1 - ahead.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from time import perf_counter

import torch

from asyncdist.buffers import Memory
from asyncdist.collectives.schedule import Schedule
from asyncdist.errors import SharedMemoryError
from asyncdist.reduce import Arithmetic
from asyncdist_transports.shm.rounds import Turn
from asyncdist_transports.shm.window import LINE, ROOM, SLOTS, STREAM_PIECES, Window

AHEAD = STREAM_PIECES // 2 - 1
_TRY_EVERY = 64


@dataclass(slots=True)
class _Tried:
    """How long a piece of one dtype took, by how far ahead it was staged."""

    turns: int = 0
    at_once: float = 0.0
    ahead: float = 0.0

    def choose(self) -> int:
        """Return how far ahead to stage; all members try the same at the same time."""
        turn, self.turns = self.turns, self.turns + 1
        if turn < 4 or turn % _TRY_EVERY < 2:  # the first time, each also makes its memory
            return AHEAD * (turn % 2)
        return AHEAD if self.ahead < self.at_once else 0

    def note(self, ahead: int, seconds: list[float]) -> None:
        """Learn from the middle one of some pieces, which no other process has held up."""
        middle = sorted(seconds)[len(seconds) // 2]
        if ahead:
            self.ahead = middle
        else:
            self.at_once = middle


class Stream:
    """A group's all-reduces of tensors that do not fit into an area."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._tried: dict[torch.dtype, _Tried] = defaultdict(_Tried)

    def all_reduce(self, turn: Turn, memory: Memory, how: Arithmetic) -> Schedule:
        """Reduce memory over the members, in place: everybody adds everybody's pieces, in the order of the ranks."""
        window, number, dtype = self._window, turn.number, memory.dtype
        others, pieces = window.others, memory.tensor.split(window.area_nbytes // dtype.itemsize)
        tried = self._tried[dtype]
        ahead = tried.choose()
        first = turn.begin(len(pieces) + AHEAD)
        if first:  # a part of this collective that came before may still be read
            yield from turn.taken(first - 1, others)
        try:
            yield from window.open_stream(number, 2 + 2 * ahead, pieces[0].nbytes)
        except SharedMemoryError:
            if not ahead:
                raise
            ahead = 0
            yield from window.open_stream(number, 2, pieces[0].nbytes)
        room = 2 + 2 * ahead
        seconds = [0.0] * len(pieces)
        for k in range(len(pieces) + ahead):
            if room <= k < len(pieces):
                yield from self._emptied(turn, first + k - room)
            if k < len(pieces):
                began = perf_counter()
                window.streamed(k % room, window.rank, pieces[k].numel(), dtype).copy_(pieces[k])
                seconds[k] += perf_counter() - began
            turn.say_staged(first + k)
            if k >= ahead:
                yield from turn.staged(first + k - ahead, others)
                began = perf_counter()
                self._take(number, k - ahead, pieces[k - ahead], how)
                seconds[k - ahead] += perf_counter() - began
            yield ()
        turn.say_taken(first + len(pieces) + AHEAD - 1)
        tried.note(ahead, seconds)

    def _emptied(self, turn: Turn, piece: int) -> Schedule:
        """Wait until nobody reads a piece of ours any more."""
        for member in self._window.others:
            ahead = self._window.room(turn.number, member) // 2 - 1
            yield from turn.staged(piece + ahead + 1, [member])

    def _take(self, number: int, k: int, piece: torch.Tensor, how: Arithmetic) -> None:
        window = self._window
        inputs = [piece] * window.size
        for member in window.others:
            place = k % window.room(number, member)
            inputs[member.rank] = window.streamed(place, member.rank, piece.numel(), piece.dtype)
        if window.size > 2:  # else ours is in the nearest cache, and may be overwritten at once
            place = k % window.words[number % SLOTS * LINE + ROOM]
            inputs[window.rank] = window.streamed(place, window.rank, piece.numel(), piece.dtype)
        how.reduce(inputs, piece)
