"""How the drivers of one rank wait for its peers: for how long they poll, and when they yield their core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from threading import get_ident
from time import monotonic

from asyncdist.base.callables import Callback
from asyncdist.base.cores import run_delay
from asyncdist.base.waker import Waker
from asyncdist.kernel.engine.drivers.core_placement import CorePlacement
from asyncdist.kernel.engine.drivers.wait_policy import WaitMode, WaitPolicy
from asyncdist.kernel.transport.base import Wait

_yield_core: Callback = getattr(os, "sched_yield", lambda: None)
MOST_POLLS = 512
"""Polls of a schedule after which a waiting thread that has a core of its own looks at the clock."""
LOOK_EVERY = 1e-3
"""Seconds between two looks at what the scheduler does to the waiting threads, and where it has put the ranks."""
_LOOK_ASLEEP_EVERY = 5e-3
"""The same while the rank sleeps at once. It then polls again after 10 ms at the earliest, and a look takes 0.1 ms."""
_MOST_THREADS = 64
"""The number of threads whose last statistics are kept."""


def mode_here(seconds: float) -> tuple[WaitMode, float] | None:
    """Find out how a rank would wait that started on this machine now, by polling for a while.

    Args:
        seconds: For how long the calling thread polls.

    Returns:
        The mode, and the share of the time for which the thread had no core; None if the system does not say.
    """
    first, start = run_delay(), monotonic()
    if first is None:
        return None
    policy, (delay, slices), now = WaitPolicy(WaitMode.SPIN), first, start
    while now < start + seconds and policy.mode is WaitMode.SPIN:
        before = now
        while now < before + LOOK_EVERY:
            now = monotonic()
        later, earlier = run_delay() or (delay, slices), (delay, slices)
        delay, slices = later
        policy.observe(now, now - before, delay - earlier[0], slices - earlier[1])
    return policy.mode, (delay - first[0]) / (now - start)


class Waiting:
    """The present way of waiting. Called under the lock of the `Progress` that it belongs to.

    Attributes:
        spin: Seconds for which an inline driver polls before it sleeps in ``poll``.
        await_spin: Seconds for which the home loop, or a trio task that awaits, polls before it lets others run.
        polls: Polls of a schedule before a blocked thread yields its core, or sleeps.
        attempts: Polls of a schedule before a call that does not wait becomes an operation.
        look_at: The time of the next `look`.
    """

    def __init__(self) -> None:
        self.look_at = 0.0
        self._readings: dict[int, tuple[float, float, int]] = {}
        self._spread_at = 0.0
        self.configure(0.0, 0.0)

    def configure(
        self, spin: float, await_spin: float, placement: CorePlacement | None = None, *, crowded: bool = False
    ) -> None:
        """Set how long drivers poll before they sleep, while no other process competes for the cores.

        Args:
            spin: Seconds for which an inline driver polls; 0 if it always sleeps at once.
            await_spin: The same for the home loop, and for a trio task.
            placement: Moves the ranks of this host to different cores; None if this rank is alone on its host.
            crowded: Whether ranks outnumber the cores. A polling thread then yields its core after each poll.
        """
        self._spin, self._await_spin, self._placement = spin, await_spin, placement
        polling = WaitMode.YIELD if crowded else WaitMode.SPIN
        self._policy = WaitPolicy(polling if spin else WaitMode.SLEEP)
        self._apply()

    @property
    def mode(self) -> WaitMode:
        """The mode in which this rank waits. Any thread may ask."""
        return self._policy.mode

    def _apply(self) -> None:
        mode = self._policy.mode
        sleeps = mode is WaitMode.SLEEP
        self.spin, self.await_spin = (0.0, 0.0) if sleeps else (self._spin, self._await_spin)
        if mode is WaitMode.SPIN:
            self.polls, self.attempts = MOST_POLLS, 32
        else:
            # A few polls take no longer than to sleep and to be woken. Where ranks share cores they delay the peers.
            self.polls, self.attempts = (64 if self._policy.polling is WaitMode.SPIN else 1 if sleeps else 2), 1
        if self._placement is not None and not sleeps:
            self._placement.home = None

    def look(self, now: float) -> None:
        """Take account of what the scheduler has done to the calling thread since its last call."""
        self.look_at = now + (_LOOK_ASLEEP_EVERY if self.mode is WaitMode.SLEEP else LOOK_EVERY)
        if self._placement is not None and self.mode is WaitMode.SLEEP:
            self._placement.settle()
        reading = run_delay()
        if reading is None:
            return
        delay, slices = reading
        thread = get_ident()
        before = self._readings.get(thread)
        if len(self._readings) >= _MOST_THREADS:
            self._readings.clear()
        self._readings[thread] = now, delay, slices
        # Another thread may have had this identifier.
        if before is not None and before[2] <= slices:
            mode = self._policy.mode
            if self._policy.observe(now, now - before[0], delay - before[1], slices - before[2]) is not mode:
                self._apply()

    def offer_core(self, now: float) -> None:
        """Yield the core of a polling thread: a peer may need it."""
        _yield_core()
        if self.mode is WaitMode.YIELD and self._placement is not None and now >= self._spread_at:
            self._spread_at = now + LOOK_EVERY
            self._placement.spread()

    def sleep(self, waker: Waker, waits: Sequence[Wait], seconds: float) -> list[int] | None:
        """Sleep as `Waker.sleep` does, on the home core if this rank has one. Called without the lock."""
        placement = self._placement
        if placement is None or placement.home is None:
            return waker.sleep(waits, seconds)
        return placement.sleep(waker, waits, seconds)
