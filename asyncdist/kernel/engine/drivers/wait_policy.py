"""Decides whether a waiting rank polls its peers or sleeps at once, from how long its thread waits for a core.

A rank that polls while another process wants its core uses up its share of the core. It is then preempted for several
milliseconds, most often just when data comes. A rank that sleeps keeps its share, and the scheduler wakes it at once: a
sleeper preempts a process that computes. Where cores are free, sleeping only adds the time of a wake-up.

The policy therefore sleeps as soon as the thread has lost its core for long, and polls again after a pause, to find out
whether cores are free. A trial that fails doubles the pause, so trials cost little while another process computes.
"""

from __future__ import annotations

import enum

LONG_DELAY = 1e-3
"""Seconds on the run queue after which a thread competes with a process that computes: a fraction of a time slice."""
_LONG_MEAN = 0.4e-3
"""Mean seconds on the run queue for each time slice. Ranks that yield to each other wait for less."""
_LEAST_SHARE = 0.05
"""Least share of the time that the delays take up."""
_LARGE_SHARE, _LARGE_SHARE_TIME = 0.2, 20e-3
"""A share of the time that also tells competition, even in short delays, and the seconds over which it counts."""
FIRST_PAUSE, LONGEST_PAUSE = 10e-3, 1.0
"""Seconds for which a rank sleeps before it polls again: at first, and at most."""


class WaitMode(enum.Enum):
    """How a rank waits for its peers."""

    SPIN = "spin"
    """It polls, and sleeps only after a while: it has a core of its own."""
    YIELD = "yield"
    """It polls and yields its core after each poll: ranks outnumber the cores."""
    SLEEP = "sleep"
    """It sleeps at once: other threads compete for its core, or the settings say so."""


class WaitPolicy:
    """The mode in which one rank waits.

    Args:
        polling: The mode while nothing else competes for the cores: SPIN or YIELD; SLEEP for always.

    Attributes:
        mode: The present mode.
        polling: As passed.
    """

    def __init__(self, polling: WaitMode) -> None:
        self.polling = self.mode = polling
        self._pause = 0.0
        self._since = -LONGEST_PAUSE
        self._share_time = self._share_delay = 0.0

    def observe(self, now: float, elapsed: float, delay: float, slices: int) -> WaitMode:
        """Take account of what the scheduler did to one thread, and return the mode.

        Args:
            now: The time, in seconds on a monotonic clock.
            elapsed: The seconds since the previous observation of this thread.
            delay: The seconds of these for which the thread was ready to run and had no core.
            slices: How often it has got a core in that time.
        """
        if self.polling is WaitMode.SLEEP:
            return self.mode
        competes = delay >= max(LONG_DELAY, _LEAST_SHARE * elapsed, _LONG_MEAN * slices)
        if self.mode is WaitMode.SLEEP:
            if competes:
                self._since = now
            elif now >= self._since + self._pause:
                self._change(self.polling, now)
        elif competes or self._loses_share(elapsed, delay):
            # A trial that has lasted for longer than the pause before it has succeeded.
            failed = now < self._since + max(self._pause, FIRST_PAUSE)
            self._pause = min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE) if failed else FIRST_PAUSE
            self._change(WaitMode.SLEEP, now)
        return self.mode

    def _loses_share(self, elapsed: float, delay: float) -> bool:
        """Return whether short delays add up to a large share of the time. Ranks that outnumber the cores share them."""
        if self.polling is WaitMode.YIELD:
            return False
        self._share_time += elapsed
        self._share_delay += delay
        if self._share_time < _LARGE_SHARE_TIME:
            return False
        loses = self._share_delay >= _LARGE_SHARE * self._share_time
        self._share_time = self._share_delay = 0.0
        return loses

    def _change(self, mode: WaitMode, now: float) -> None:
        self.mode, self._since = mode, now
        self._share_time = self._share_delay = 0.0
