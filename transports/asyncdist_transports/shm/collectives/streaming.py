"""Large tensors that members show to others, piece by piece: near, or far apart and staged well ahead of being read.

What a rank has just written lies in the caches of its core, and so does what another has just read in those of that one.
Where cores share a cache, it is best read at once and written over at once: two places in turn, which stay in the cache.
Where they do not, another core gets it from there at a fraction of memory's speed, and writing over what another core
still has takes longer still; some MiB later, when both have moved on, it is several times as fast. A virtual machine cannot
know, and is moved from the one to the other, sometimes many times a second: so we try both now and then, and do what was
faster. Measured with two ranks, broadcast of 4 MiB in milliseconds: on cores that share a cache 0.2 near and 0.55 far; on
others 1.8 near and 0.6 far.

A member's pieces lie in its stream one behind the other, also those of calls after each other: a call that has fewer than
there are places would write over its own of the call before. How far it stages is its own affair. It uses 2 + 2 * ahead
places in turn, and says so.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from time import perf_counter

from asyncdist.algorithms.schedule import Schedule
from asyncdist.errors import SharedMemoryError
from asyncdist_transports.shm.collectives.slot_table import STREAM_PIECES, SlotMember
from asyncdist_transports.shm.collectives.staging import CollectiveState, PieceAction

AHEAD = STREAM_PIECES // 2 - 1
_TRY_EVERY = 32


class _AheadTuner:
    """How long we took to stage a piece of one kind of call, by how far ahead."""

    def __init__(self) -> None:
        self._calls = 0
        self._near, self._far = (deque((0.0, 0.0), 2) for _ in range(2))  # of the last two calls

    def choose(self) -> int:
        """Return how far ahead to stage: as was faster, or the other way to see whether it still is."""
        call, self._calls = self._calls, self._calls + 1
        if call < 4:  # the first time, each also makes its memory
            return AHEAD * (call % 2)
        faster, slower = (AHEAD, 0) if min(self._far) < min(self._near) else (0, AHEAD)
        return faster if call % _TRY_EVERY else slower

    def record(self, ahead: int, seconds: list[float]) -> None:
        """Learn from the middle one of some pieces, which no other process has held up."""
        (self._far if ahead else self._near).append(sorted(seconds)[len(seconds) // 2])


class StagedStream:
    """The rounds of a group's collectives that take more than one round, of members who stage."""

    def __init__(self) -> None:
        self._tuners: dict[Hashable, _AheadTuner] = defaultdict(_AheadTuner)

    def run_rounds(
        self,
        state: CollectiveState,
        kind: Hashable,
        count: int,
        nbytes: int,
        stage: PieceAction,
        read: PieceAction | None,
        sources: Sequence[SlotMember],
        readers: Sequence[SlotMember],
        *,
        reads_open: bool = True,
    ) -> Schedule:
        """Run rounds as `CollectiveState.run_rounds` does, as far ahead as was faster for calls of this ``kind``.

        A member uses up to ``nbytes`` of an area in each round. Who only sends gains as well.
        """
        if count < 2 or (reads_open and state.location):
            return state.run_rounds(count, stage, read, sources, readers, reads_open=reads_open)
        return self._ahead(state, kind, count, nbytes, stage, read, sources, readers, reads_open)

    def _ahead(
        self,
        state: CollectiveState,
        kind: Hashable,
        count: int,
        nbytes: int,
        stage: PieceAction,
        read: PieceAction | None,
        sources: Sequence[SlotMember],
        readers: Sequence[SlotMember],
        reads_open: bool,
    ) -> Schedule:
        tuner = self._tuners[kind, count.bit_length()]  # a small tensor may itself lie in the cache
        ahead = tuner.choose()
        for ahead_now in dict.fromkeys((ahead, 0)):
            try:
                yield from state.open_stream(2 + 2 * ahead_now, nbytes)
                break
            except SharedMemoryError:
                if not (ahead_now or state.next_round):  # later the areas are left in which the rounds before went
                    raise
        ahead = min(ahead, state.areas // 2 - 1)
        seconds = [0.0] * count

        def timed(k: int, number: int) -> None:
            began = perf_counter()
            stage(k, number)
            seconds[k] = perf_counter() - began

        yield from state.run_rounds(count, timed, read, sources, readers, reads_open=reads_open, ahead=ahead)
        tuner.record(ahead, seconds)
