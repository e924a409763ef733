"""Timers by key, which their owner polls and runs. They use no lock.

The engine's endpoint owns one table. Its transports schedule reconnects and time limits in it, under the endpoint's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class TimerTable(dict[object, tuple[float, Callable[[], None]]]):
    """The scheduled timers: by key, the time on the monotonic clock and the callback."""

    def schedule(self, key: object, at: float, callback: Callable[[], None]) -> None:
        """Schedule ``callback`` for the time ``at``, unless the key already has a timer."""
        self.setdefault(key, (at, callback))

    def cancel(self, key: object) -> None:
        """Remove the timer of ``key``, if there is one."""
        self.pop(key, None)

    def next_due(self) -> float:
        """Return the time of the first timer; infinity without one."""
        return min((at for at, _ in self.values()), default=math.inf)

    def run_due(self, now: float) -> None:
        """Remove and call the timers whose time is at most ``now``."""
        for key, (at, callback) in list(self.items()):
            if at <= now and key in self:
                del self[key]
                callback()
