"""Timers by key, which their owner polls and runs. They use no lock.

The engine's endpoint owns one table. Its transports schedule reconnects and time limits in it, under the endpoint's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class TimerTable:
    """Callbacks by key, each with its time on the monotonic clock."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: dict[object, tuple[float, Callable[[], None]]] = {}

    @property
    def pending(self) -> bool:
        """Whether a timer is scheduled."""
        return bool(self._due)

    def schedule(self, key: object, at: float, callback: Callable[[], None]) -> None:
        """Schedule ``callback`` for the time ``at``, unless the key already has a timer."""
        self._due.setdefault(key, (at, callback))

    def cancel(self, key: object) -> None:
        """Remove the timer of ``key``, if there is one."""
        self._due.pop(key, None)

    def next_due(self) -> float:
        """Return the time of the first timer; infinity without one."""
        return min((at for at, _ in self._due.values()), default=math.inf)

    def run_due(self, now: float) -> None:
        """Remove and call the timers whose time is at most ``now``."""
        for key, (at, callback) in list(self._due.items()):
            if at <= now and key in self._due:
                del self._due[key]
                callback()
