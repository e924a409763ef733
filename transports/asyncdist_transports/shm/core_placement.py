"""Ranks that outnumber the cores, kept evenly spread over them while they wait for each other.

The system's scheduler evens out how many want to run on each core, within some hundred milliseconds. Ranks that wait for
each other all want to, all the time, and small collectives go at the pace of the fullest core until then: four ranks on
two cores take 47 µs for 4 bytes when two are on each, and 95 when three are on one, which is where they stay if they
have slept in between.

So who waits says on which core it is, in a word that its peers read, and of those on the fullest core the last one moves
to the emptiest: it allows itself that core alone, and then what it was allowed before. So a mask that was set for it, by
a launcher say, is kept, and the scheduler remains free to move it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterable
from time import monotonic

from asyncdist_transports.shm.control_block import ControlBlock

_REST = 0.02  # seconds after a move, which takes some 50 µs and which the scheduler may have reasons to undo


def _core_finder() -> Callable[[], int] | None:
    """Return what says on which core it is called; None if this system does not."""
    try:
        finder = ctypes.PyDLL(None).sched_getcpu
    except (AttributeError, OSError, TypeError):
        return None
    found: Callable[[], int] = finder
    return found


class CorePlacement:
    """Moves a waiting thread of ours to another core where too many peers are on its own."""

    def __init__(self, rank: int, own: ControlBlock) -> None:
        self._rank, self._own = rank, own
        self._find_core = _core_finder()
        self._rest_until = 0.0

    def __call__(self, peers: Iterable[tuple[int, ControlBlock]]) -> None:
        """Say where this thread is, and move it if that is for us to do; ``peers`` are ranks that share the cores."""
        if self._find_core is None:
            return
        core = self._own.core = self._find_core()
        now = monotonic()
        if now < self._rest_until:
            return
        awake = [(rank, control.core) for rank, control in peers if not control.asleep[0]]
        if any(rank > self._rank for rank, their_core in awake if their_core == core):
            return  # it is for that one to move
        ranks_on_core = Counter(their_core for _, their_core in awake)
        allowed = os.sched_getaffinity(0)
        emptiest = min(allowed, key=lambda one: (ranks_on_core[one], one))
        if ranks_on_core[core] > ranks_on_core[emptiest]:  # so many are there without us
            self._rest_until = now + _REST
            self._move(emptiest, allowed)
            self._own.core = emptiest

    def _move(self, core: int, allowed: set[int]) -> None:
        """Move this thread to a core, and leave it as free as it was."""
        with contextlib.suppress(OSError):  # that core was taken from us meanwhile
            try:
                os.sched_setaffinity(0, {core})
            finally:
                os.sched_setaffinity(0, allowed)
