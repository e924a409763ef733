"""Spreads ranks evenly over the cores while they wait for each other, where ranks outnumber cores.

The scheduler of the system balances runnable threads within some hundred milliseconds. Ranks that wait for each other are
all runnable all the time, and small collectives run at the pace of the most loaded core until then: four ranks on two cores
take 47 µs for 4 bytes with two ranks on each core, and 95 µs with three on one.

A waiting rank therefore publishes its core in its control block. Of the ranks on the most loaded core, the one with the
highest rank moves to the least loaded core: it sets its affinity to that core, and then back to the previous mask. A mask
set by a launcher is kept, and the scheduler remains free to move the thread again. `transport` calls this while it waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterable
from time import monotonic

from asyncdist_transports.shm.control_block import ControlBlock

# Seconds between moves. A move takes some 50 µs, and the scheduler may have reasons to undo it.
_PAUSE = 0.02


def _core_finder() -> Callable[[], int] | None:
    """Return a function that returns the calling thread's core; None if the system has none."""
    try:
        finder = ctypes.PyDLL(None).sched_getcpu
    except (AttributeError, OSError, TypeError):
        return None
    found: Callable[[], int] = finder
    return found


class CorePlacement:
    """Moves a waiting thread of this rank to another core where too many peers share its core."""

    def __init__(self, rank: int, own: ControlBlock) -> None:
        self._rank, self._own = rank, own
        self.find_core = _core_finder()
        self._paused_until = 0.0

    def __call__(self, peers: Iterable[tuple[int, ControlBlock]]) -> None:
        """Publish the calling thread's core, and move the thread if it is this rank's turn.

        Args:
            peers: Rank and control block of the peers that share the cores.
        """
        if self.find_core is None:
            return
        core = self._own.core = self.find_core()
        now = monotonic()
        if now < self._paused_until:
            return
        awake = [(rank, control.core) for rank, control in peers if not control.asleep[0]]
        if any(rank > self._rank for rank, peer_core in awake if peer_core == core):
            # The higher rank moves.
            return
        ranks_on_core = Counter(peer_core for _, peer_core in awake)
        allowed = os.sched_getaffinity(0)
        emptiest = min(allowed, key=lambda one: (ranks_on_core[one], one))
        # The count excludes this rank.
        if ranks_on_core[core] > ranks_on_core[emptiest]:
            self._paused_until = now + _PAUSE
            self._move(emptiest, allowed)
            self._own.core = emptiest

    def _move(self, core: int, allowed: set[int]) -> None:
        """Move this thread to a core, and restore its affinity mask."""
        # The core may have been removed from the mask since.
        with contextlib.suppress(OSError):
            try:
                os.sched_setaffinity(0, {core})
            finally:
                os.sched_setaffinity(0, allowed)
