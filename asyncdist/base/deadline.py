"""Time limits: a `Deadline` is a point on the monotonic clock, or never. Every folder that waits uses it.

Users pass timeouts, in seconds or as `datetime.timedelta`. Internal code passes deadlines, so that one limit holds over
many steps and a step of the wall clock changes nothing.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from asyncdist.errors import UsageError

Timeout = float | int | timedelta | None

_LONGEST_TIMEOUT = 1e9
"""Seconds, about thirty years. Locks and events raise OverflowError for longer timeouts."""
LONGEST_SLEEP = 1.0
"""Seconds that a thread of the program sleeps at a time.

Python only notes a signal, and the main thread runs its handler between two instructions. One that arrives right before
the thread sleeps does not wake it: without this limit Ctrl-C would have no effect until a peer does something.
"""
LONGEST_POLL = int(LONGEST_SLEEP * 1e3)
"""The same in milliseconds."""


def seconds(timeout: Timeout, default: float = math.inf) -> float:
    """Return a user's timeout in seconds; ``default`` for None. Raises UsageError if it is negative or not a number."""
    if timeout is None:
        return default
    try:
        value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError):
        value = math.nan
    if math.isnan(value) or value < 0:
        raise UsageError(f"a timeout is a number of seconds from 0 up, or a timedelta, not {timeout!r}")
    return value


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock; ``Deadline.never()`` is infinitely far away."""

    at: float = math.inf

    @classmethod
    def after(cls, timeout: Timeout) -> Deadline:
        """Return the deadline ``timeout`` from now; ``never()`` for None and for timeouts of decades."""
        left = timeout if type(timeout) is float and timeout >= 0 else seconds(timeout)
        return cls(time.monotonic() + left) if left < _LONGEST_TIMEOUT else cls.never()

    @classmethod
    def never(cls) -> Deadline:
        return cls(math.inf)

    def remaining(self) -> float:
        """Return the seconds left, at least 0; infinity without a limit."""
        return max(0.0, self.at - time.monotonic())

    def remaining_or_none(self) -> float | None:
        """Return the seconds left in the form that asyncio, sockets and locks accept: None without a limit."""
        return None if self.at == math.inf else max(0.0, self.at - time.monotonic())

    def expired(self) -> bool:
        return time.monotonic() >= self.at


def poll_timeout(left: float) -> int:
    """Return how long a poll sleeps that may last ``left`` seconds, in milliseconds rounded up: at most `LONGEST_POLL`.

    The caller polls again if time is left afterwards.
    """
    return LONGEST_POLL if left >= LONGEST_SLEEP else max(0, math.ceil(left * 1e3))


def wait_until_set(event: threading.Event, left: float) -> bool:
    """Wait until an event is set or ``left`` seconds have passed, and return whether it is set; see `LONGEST_SLEEP`."""
    until = time.monotonic() + left
    while not event.wait(max(0.0, min(until - time.monotonic(), LONGEST_SLEEP))):
        if time.monotonic() >= until:
            return False
    return True
