"""Large tensors that members show to others, piece by piece: at once, or staged well ahead of being read.

What a rank has just written lies in the caches of its core. Where cores share a cache, it is best read at once. Where
they do not, another core gets it from there at a fraction of memory's speed, and some MiB later, when it has moved on,
several times as fast. A virtual machine cannot know, and may be moved from the one to the other: so we try both now and
then, and do what was faster. Measured with two ranks, all-reduce of 25 MiB: on cores that share a cache 3.4 ms at once
and 5.0 ms ahead; on others 11.5 ms at once and 5.1 ms ahead.

How far ahead a member stages is its own affair. It uses 2 + 2 * ahead places of its stream in turn, and says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter

from asyncdist.collectives.schedule import Schedule
from asyncdist.errors import SharedMemoryError
from asyncdist_transports.shm.rounds import Piece, Turn
from asyncdist_transports.shm.window import STREAM_PIECES, Member

AHEAD = STREAM_PIECES // 2 - 1
_TRY_EVERY = 64


@dataclass(slots=True)
class _Tried:
    """How long a piece of one kind of call took, by how far ahead it was staged."""

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
    """The rounds of a group's collectives that take more than one round, of members who stage."""

    def __init__(self) -> None:
        self._tried: dict[Hashable, _Tried] = defaultdict(_Tried)

    def rounds(
        self,
        turn: Turn,
        kind: Hashable,
        count: int,
        nbytes: int,
        stage: Piece,
        take: Piece | None,
        sources: Sequence[Member],
        takers: Sequence[Member],
        *,
        reads_open: bool = True,
    ) -> Schedule:
        """Run rounds as `Turn.rounds` does, as far ahead as was faster for calls of this ``kind``.

        A member uses up to ``nbytes`` of an area in each round. Who only sends gains as well: its pieces lie where those
        of the call before were, and not in every slot's halves in turn.
        """
        if count < 2 or (reads_open and turn.place):
            return turn.rounds(count, stage, take, sources, takers, reads_open=reads_open)
        return self._ahead(turn, kind, count, nbytes, stage, take, sources, takers, reads_open)

    def _ahead(
        self,
        turn: Turn,
        kind: Hashable,
        count: int,
        nbytes: int,
        stage: Piece,
        take: Piece | None,
        sources: Sequence[Member],
        takers: Sequence[Member],
        reads_open: bool,
    ) -> Schedule:
        tried = self._tried[kind]
        ahead = tried.choose()
        for far in dict.fromkeys((ahead, 0)):
            try:
                yield from turn.open_stream(2 + 2 * far, nbytes)
                break
            except SharedMemoryError:
                if not (far or turn.round):  # later the areas are left in which the rounds before went
                    raise
        ahead = min(ahead, turn.room // 2 - 1)
        seconds = [0.0] * count

        def timed(piece: Piece) -> Piece:
            def work(k: int, number: int) -> None:
                began = perf_counter()
                piece(k, number)
                seconds[k] += perf_counter() - began

            return work

        staged, taken = timed(stage), take and timed(take)
        yield from turn.rounds(count, staged, taken, sources, takers, reads_open=reads_open, ahead=ahead)
        tried.note(ahead, seconds)
