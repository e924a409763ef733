"""Chooses how far ahead a member stages the pieces of a large tensor: measured, near or far.

What a core has just written or read lies in its caches. Where cores share a cache, a piece is best read at once and
overwritten at once: two areas in turn, which stay in the cache. Where they do not, a core reads another core's cached lines
at a fraction of memory's speed, and overwriting them takes longer still; some MiB later, when the lines have been evicted,
it is several times as fast. A virtual machine cannot know its topology and may be migrated many times a second. So each
member measures both now and then, and uses the faster one. With two ranks a broadcast of 4 MiB takes 0.2 ms near and
0.55 ms far on cores that share a cache, and 1.8 ms near and 0.6 ms far on others.

A member's pieces follow each other in its stream, also from call to call: a call with fewer pieces than areas would
otherwise overwrite pieces of the previous call that were just read. Each member publishes the 2 + 2 * ahead areas it uses.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from time import perf_counter

from asyncdist.errors import SharedMemoryError
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist_transports.shm.collectives.slot_table import STREAM_PIECES, SlotMember
from asyncdist_transports.shm.collectives.staging import PieceAction, Pieces

AHEAD = STREAM_PIECES // 2 - 1
_TRY_EVERY = 32


class AheadTuner:
    """Measured time to stage a piece for calls of one kind, by distance."""

    def __init__(self) -> None:
        self._calls = 0
        # Medians of the last two calls.
        self._near, self._far = (deque((0.0, 0.0), 2) for _ in range(2))

    def choose(self) -> int:
        """Return how far ahead to stage: the faster distance, or now and then the other one to measure it again."""
        call, self._calls = self._calls, self._calls + 1
        # The first call of each distance also allocates memory.
        if call < 4:
            return AHEAD * (call % 2)
        faster, slower = (AHEAD, 0) if min(self._far) < min(self._near) else (0, AHEAD)
        return faster if call % _TRY_EVERY else slower

    def record(self, ahead: int, seconds: list[float]) -> None:
        """Record the median, which preemption by another process does not change."""
        (self._far if ahead else self._near).append(sorted(seconds)[len(seconds) // 2])


Tuners = defaultdict[Hashable, AheadTuner]
"""The tuners of one group, by the kind of calls."""


def run_staged_rounds(
    tuners: Tuners,
    name: str,
    pieces: Pieces,
    count: int,
    stage: PieceAction,
    read: PieceAction | None,
    sources: Sequence[SlotMember],
    readers: Sequence[SlotMember],
    *,
    reads_open: bool = True,
) -> Schedule:
    """Run rounds like `CollectiveState.run_rounds`, at the distance that was faster for calls of this name and dtype."""
    state = pieces.state
    if count < 2 or (reads_open and state.location):
        yield from state.run_rounds(count, stage, read, sources, readers, reads_open=reads_open)
        return
    # A small tensor may itself stay in the cache.
    tuner = tuners[name, pieces.dtype, count.bit_length()]
    ahead = tuner.choose()
    for ahead_now in dict.fromkeys((ahead, 0)):
        try:
            yield from state.open_stream(2 + 2 * ahead_now, pieces.nbytes)
            break
        except SharedMemoryError:
            # Later rounds can fall back to the areas of the earlier ones.
            if not (ahead_now or state.next_round):
                raise
    ahead = min(ahead, state.areas // 2 - 1)
    seconds = [0.0] * count

    def timed(k: int, number: int) -> None:
        began = perf_counter()
        stage(k, number)
        seconds[k] = perf_counter() - began

    yield from state.run_rounds(count, timed, read, sources, readers, reads_open=reads_open, ahead=ahead)
    tuner.record(ahead, seconds)
