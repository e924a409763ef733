"""Timers of many objects in one place. They use no lock.

A `TimerTable` has timers by key, which their owner polls and runs. The engine's endpoint owns one; its transports schedule
reconnects and time limits in it, under the endpoint's lock. A `DeadlineTimer` is one timer of an event loop for the
deadlines of many requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Protocol

from asyncdist.base.callables import Callback, Supplier

_TICK = 0.001
"""The least number of seconds between two checks of all deadlines."""


class TimerTable(dict[object, tuple[float, Callback]]):
    """The scheduled timers: by key, the time on the monotonic clock and the callback."""

    def schedule(self, key: object, at: float, callback: Callback) -> None:
        """Schedule ``callback`` for the time ``at``, unless the key already has a timer."""
        self.setdefault(key, (at, callback))

    def cancel(self, key: object) -> None:
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


class Expiring(Protocol):
    """A request with a deadline, in the time of its loop; infinity for none."""

    @property
    def deadline(self) -> float: ...

    def expire(self) -> None:
        """End the request, because its deadline has passed."""


class DeadlineTimer:
    """One timer for the deadlines of all open requests, set for the earliest.

    The timer stays as it is when requests come and go, because most end long before their deadlines. When it fires, it
    ends the requests whose deadline has passed, and is set for the next one.
    """

    def __init__(self, open_requests: Supplier[Iterable[Expiring]]) -> None:
        self._open_requests = open_requests
        self._loop = asyncio.get_running_loop()
        self._next = math.inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def active(self) -> bool:
        return self._timer is not None

    def note(self, deadline: float) -> None:
        if deadline < self._next:
            self._set(deadline)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._next = None, math.inf

    def _set(self, when: float) -> None:
        self.cancel()
        self._next = when
        self._timer = self._loop.call_at(when, self._expire_overdue)

    def _expire_overdue(self) -> None:
        self.cancel()
        now, earliest = self._loop.time(), math.inf
        for request in list(self._open_requests()):
            if request.deadline <= now:
                request.expire()
            else:
                earliest = min(earliest, request.deadline)
        if earliest < math.inf:
            self.note(max(earliest, now + _TICK))
