"""Exponential backoff with jitter: the pauses between attempts, until a deadline.

All code of the package that retries or polls uses it. See M. Brooker, "Exponential Backoff And Jitter", AWS Architecture
Blog, 2015 ("equal jitter").
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from asyncdist.base.deadline import Deadline

Sleep = Callable[[float], object]
"""Pauses the calling thread for some seconds."""


class Backoff:
    """Attempts until a deadline, with pauses that double from ``first`` to ``longest`` seconds.

    Iterating yields the number of each attempt: 0 at once, and each further one after a pause. The iteration ends after an
    attempt that ended after the deadline, so there is always one attempt at or after the deadline. Each pause is shortened
    by a random part of up to one half, so that ranks that fail together retry at different times. A second loop over the
    same object continues where the first one stopped.

    Without a deadline the attempts have no end. ``sleep`` pauses the calling thread in a ``for`` loop, by default
    `time.sleep`; with an event's ``wait``, a pause ends when the event is set.

    Example:
        >>> for attempt in Backoff(0.01, 1.0, Deadline.after(30)):
        ...     with contextlib.suppress(OSError):
        ...         return connect()
        ... raise TimeoutError

        In a coroutine, ``async for attempt in Backoff(...)`` pauses with `asyncio.sleep`.
    """

    __slots__ = ("_attempt", "_first", "_longest", "_pause", "_sleep", "deadline")

    def __init__(
        self, first: float, longest: float, deadline: Deadline | None = None, *, sleep: Sleep | None = None
    ) -> None:
        self._first = self._pause = first
        self._longest = longest
        self._attempt = -1
        self._sleep = sleep
        self.deadline = deadline or Deadline.never()

    def next_pause(self) -> float:
        """Return the seconds to pause before the next attempt, at most the time left until the deadline."""
        pause = self._pause * random.uniform(0.5, 1.0)
        self._pause = min(2 * self._pause, self._longest)
        return min(pause, self.deadline.remaining())

    def reset(self) -> None:
        """Start again with the first pause, because an attempt has made progress."""
        self._pause = self._first

    def __iter__(self) -> Backoff:
        return self

    def __next__(self) -> int:
        if self._attempt >= 0:
            if self.deadline.expired():
                raise StopIteration
            (self._sleep or time.sleep)(self.next_pause())
        self._attempt += 1
        return self._attempt

    def __aiter__(self) -> Backoff:
        return self

    async def __anext__(self) -> int:
        if self._attempt >= 0:
            if self.deadline.expired():
                raise StopAsyncIteration
            await asyncio.sleep(self.next_pause())
        self._attempt += 1
        return self._attempt
