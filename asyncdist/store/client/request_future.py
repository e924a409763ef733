"""The requests of the awaited client: one future each, and one timer for all deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, TypeVar

from asyncdist.store.protocol.operations import Command

T = TypeVar("T")

_TICK = 0.001
"""The least number of seconds between two checks of all deadlines."""


class RequestFuture(asyncio.Future[T]):
    """A request that has been sent: a future and not a coroutine, because a thousand requests then need no tasks.

    Args:
        command: The command.
        limit: Seconds from now to its ``deadline``, which is in the loop's time.
        give_up: Called with the request's number when it is cancelled or expires.
        loop: The store's loop.
    """

    __slots__ = ("_give_up", "_limit", "command", "deadline", "number")

    def __init__(
        self, command: Command[T], limit: float, give_up: Callable[[int], object], loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(loop=loop)
        self.command = command
        self.deadline = loop.time() + limit
        self.number = 0
        self._limit = limit
        self._give_up = give_up

    def resolve(self, value: T) -> None:
        if not self.done():
            self.set_result(value)

    def reject(self, error: Exception) -> None:
        if not self.done():
            self.set_exception(error)

    def publish(self, message: bytes) -> None:
        """Ignore a published message: only a stream receives any."""

    def expire(self) -> None:
        """End the request, because its deadline has passed."""
        self.reject(self.command.overdue(self._limit))
        self._give_up(self.number)

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self._give_up(self.number)
        return cancelled

    def __repr__(self) -> str:
        """Return an advice, which asyncio shows in its error if a program makes a task of this future."""
        state = "cancelled" if self.cancelled() else "done" if self.done() else "pending"
        keys = self.command.keys
        about = "" if not keys else f" of {keys[0]!r}" if len(keys) == 1 else f" of {len(keys)} keys"
        return f"<a future, {self.command.name}{about}, that is {state}: await it as it is, it needs no task>"


class DeadlineTimer:
    """One timer for the deadlines of all open requests, set for the earliest.

    The timer stays as it is when requests come and go, because most end long before their deadlines. When it fires, it
    ends the requests whose deadline has passed, and is set for the next one.

    Args:
        open_requests: Returns the open requests; those without a deadline are ignored.
    """

    def __init__(self, open_requests: Callable[[], Iterable[object]]) -> None:
        self._open_requests = open_requests
        self._loop = asyncio.get_running_loop()
        self._next = inf
        self._timer: asyncio.TimerHandle | None = None

    @property
    def active(self) -> bool:
        """Whether the timer is set."""
        return self._timer is not None

    def note(self, deadline: float) -> None:
        """Note that a request with this deadline has been opened."""
        if deadline < self._next:
            self._set(deadline)

    def cancel(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._next = None, inf

    def _set(self, when: float) -> None:
        self.cancel()
        self._next = when
        self._timer = self._loop.call_at(when, self._expire_overdue)

    def _expire_overdue(self) -> None:
        self.cancel()
        now, earliest = self._loop.time(), inf
        for request in list(self._open_requests()):
            if not isinstance(request, RequestFuture):
                continue
            if request.deadline <= now:
                request.expire()
            else:
                earliest = min(earliest, request.deadline)
        if earliest < inf:
            self.note(max(earliest, now + _TICK))
