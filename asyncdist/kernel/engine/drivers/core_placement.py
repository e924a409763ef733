"""Spreads the ranks of one host over its cores, where the scheduler of the system puts several on one.

The scheduler balances threads that are always runnable within some hundred milliseconds only. Ranks that outnumber the
cores, and yield to each other, are such threads, and small collectives run at the pace of the most loaded core until then:
four ranks on two cores take 47 µs for 4 bytes with two ranks on each core, and 95 µs with three on one.

Where other processes keep all cores busy, ranks sleep at once. The scheduler then wakes a rank on the core of the peer that
woke it, even if another core has fewer ranks: two ranks on one core take 200 µs for 4 bytes over tcp, on two cores 45 µs.

A waiting rank therefore publishes its core. Of the ranks on a core with too many, the one with the highest rank moves to
the least loaded core. A rank that yields sets its affinity to that core and then back to the previous mask. A rank that
sleeps sets it for as long as it sleeps, so that it wakes up where it was; the others on that core then do the same. Where
several threads share each core, as those of many ranks, this gains nothing and costs 15 % of a small collective. No rank
stays pinned: a mask set by a launcher is kept, and threads and processes that the program starts have it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from asyncdist.base.cores import threads_per_core
from asyncdist.base.waker import Waker
from asyncdist.kernel.transport.base import Wait

_LOAD_EVERY = 0.05
"""Seconds between two looks at the load of the machine."""
_MOST_THREADS_PER_CORE = 2.5
"""The load up to which a rank gains by sleeping on a core of its own: on each core a rank and another program."""
_PAUSE = 0.02
"""Seconds between moves. A move takes some 50 µs, and the scheduler may have reasons to undo it."""

PeerCores = Callable[[int], Iterable[tuple[int, int, bool]]]
"""Publishes this rank's core; returns for each peer on this host its rank, its core (-1 if unknown) and if it sleeps."""


def _core_finder() -> Callable[[], int] | None:
    """Return a function that returns the calling thread's core; None if the system has none."""
    try:
        finder = ctypes.PyDLL(None).sched_getcpu
    except (AttributeError, OSError, TypeError):
        return None
    found: Callable[[], int] = finder
    return found


class CorePlacement:
    """Moves a waiting thread of this rank to another core where too many peers share its core.

    Args:
        peer_cores: Publishes this rank's core, and returns those of its peers.

    Attributes:
        home: The core on which this rank stays while it sleeps; None for any.
    """

    def __init__(self, rank: int, peer_cores: PeerCores) -> None:
        self._rank, self._peer_cores = rank, peer_cores
        self.find_core = _core_finder()
        self.home: int | None = None
        self._paused_until = self._look_at = 0.0
        self._is_crowded = False

    def spread(self) -> None:
        """Move the calling thread, which polls, if it is this rank's turn. Peers that sleep need no core."""
        if self.find_core is None:
            return
        core = self.find_core()
        awake = {rank: peer_core for rank, peer_core, asleep in self._peer_cores(core) if not asleep}
        target = self._target(core, awake)
        if target is not None:
            allowed = os.sched_getaffinity(0)
            # The core may have been removed from the mask since.
            with contextlib.suppress(OSError):
                try:
                    os.sched_setaffinity(0, {target})
                finally:
                    os.sched_setaffinity(0, allowed)
                self._peer_cores(target)

    def settle(self) -> None:
        """Let this rank, which sleeps at once, stay on one core from now on if it shares its core with a peer.

        Where several threads share each core it stays on none.
        """
        if self.find_core is None:
            return
        now = monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOAD_EVERY
            self._is_crowded = (threads_per_core() or 0.0) > _MOST_THREADS_PER_CORE
        if self._is_crowded:
            self.home = None
            return
        core = self.find_core()
        cores = {rank: peer_core for rank, peer_core, _ in self._peer_cores(core)}
        if core in cores.values():
            target = self._target(core, cores)
            self.home = core if target is None else target

    def sleep(self, waker: Waker, waits: Sequence[Wait], seconds: float) -> list[int] | None:
        """Sleep as `Waker.sleep` does, and keep the calling thread on `home` during that time."""
        allowed = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, {self.home or 0})
        # The core has been removed from the mask.
        except OSError:
            self.home = None
            return waker.sleep(waits, seconds)
        try:
            return waker.sleep(waits, seconds)
        finally:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, allowed)

    def _target(self, core: int, peer_cores: dict[int, int]) -> int | None:
        """Return the core to which this rank should move from ``core``; None if it should not."""
        now = monotonic()
        # The higher rank moves.
        if now < self._paused_until or any(
            rank > self._rank for rank, peer_core in peer_cores.items() if peer_core == core
        ):
            return None
        # The count excludes this rank.
        ranks_on_core = Counter(peer_cores.values())
        emptiest = min(os.sched_getaffinity(0), key=lambda one: (ranks_on_core[one], abs(one - core)))
        if ranks_on_core[core] <= ranks_on_core[emptiest]:
            return None
        self._paused_until = now + _PAUSE
        return emptiest
