"""One way to speak of time limits: a `Deadline` is a point on the monotonic clock, or never.

Timeouts (seconds, or `datetime.timedelta`) come in from users; inside, only deadlines are passed on, so that a
limit holds over many steps and a jump of the wall clock changes nothing.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import timedelta

from asyncdist.errors import UsageError

Timeout = float | int | timedelta | None

_AGES = 1e9
"""Seconds that nobody will wait, thirty years: with more, locks and events raise OverflowError."""


def seconds(timeout: Timeout, default: float = math.inf) -> float:
    """Return a user's timeout in seconds; ``None`` means ``default``, a negative one is refused."""
    if timeout is None:
        return default
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if math.isnan(value) or value < 0:
        raise UsageError(f"a timeout is a number of seconds from 0 up, not {timeout!r}")
    return value


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock; ``Deadline.never()`` is infinitely far."""

    at: float = math.inf

    @classmethod
    def after(cls, timeout: Timeout) -> Deadline:
        """Return the deadline ``timeout`` from now; ``None`` means never, and so do decades."""
        left = seconds(timeout)
        return cls(time.monotonic() + left) if left < _AGES else cls.never()

    @classmethod
    def never(cls) -> Deadline:
        return cls(math.inf)

    def remaining(self, *, now: float | None = None) -> float:
        """Seconds left, never below 0; infinite if there is no limit."""
        return max(0.0, self.at - (time.monotonic() if now is None else now))

    def remaining_or_none(self) -> float | None:
        """Seconds left in the form that asyncio, sockets and locks take: ``None`` for no limit."""
        return None if self.at == math.inf else self.remaining()

    def expired(self, *, now: float | None = None) -> bool:
        return (time.monotonic() if now is None else now) >= self.at
