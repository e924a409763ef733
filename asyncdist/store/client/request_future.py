"""The awaited client's requests: one future each, and one timer for the deadlines of all. Used by `aio`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, Protocol, TypeVar

from asyncdist.store.protocol.operations import Command

T = TypeVar("T")

_TICK = 0.001
"""Seconds between two looks at all requests, at least."""


class RequestChannel(Protocol):
    """The connection of a request."""

    def give_up(self, number: int) -> None:
        """Forget a request."""


class RequestFuture(asyncio.Future[T]):
    """A request that has been sent, to be awaited for its answer; who cancels it gives the request up.

    A future and no coroutine: it is under way, and a thousand of them cost no task each. ``deadline`` is in the loop's
    time, ``limit`` how long that was from the start; ``line`` is told when nobody wants the answer any more.
    """

    __slots__ = ("command", "deadline", "limit", "line", "number")

    def __init__(
        self, command: Command[T], limit: float, line: RequestChannel, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(loop=loop)
        self.command = command
        self.limit = limit
        self.deadline = loop.time() + limit
        self.line = line
        self.number = 0

    # -- what the conversation calls ----------------------------------------------------------------

    def resolve(self, value: T) -> None:
        if not self.done():
            self.set_result(value)

    def reject(self, error: Exception) -> None:
        if not self.done():
            self.set_exception(error)

    def publish(self, message: bytes) -> None:
        """Only subscriptions get messages."""

    # -- ends ---------------------------------------------------------------------------------------

    def expire(self) -> None:
        """It has not been answered in time."""
        self.reject(self.command.overdue(self.limit))
        self.line.give_up(self.number)

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self.line.give_up(self.number)
        return cancelled

    def __repr__(self) -> str:
        """Say what to do with it: asyncio shows this to who makes a task of it."""
        state = "cancelled" if self.cancelled() else "done" if self.done() else "under way"
        keys = self.command.keys
        about = "" if not keys else f" of {keys[0]!r}" if len(keys) == 1 else f" of {len(keys)} keys"
        return f"<a future, {self.command.name}{about}, that is {state}: await it as it is, it needs no task>"


class DeadlineTimer:
    """The time limits of all requests that are open, which ``open_requests`` returns, among others that have none.

    There is one timer, set for the earliest. It is not touched when requests come and go, which most do long before their
    limits: when it goes off, it looks which of those still open are over, and which is next.
    """

    def __init__(self, open_requests: Callable[[], Iterable[object]]) -> None:
        self._open_requests = open_requests
        self._loop = asyncio.get_running_loop()
        self._next = inf
        self._timer: asyncio.TimerHandle | None = None

    def note(self, deadline: float) -> None:
        """A request is open until ``deadline``."""
        if deadline < self._next:
            self._set(deadline)

    def cancel(self) -> None:
        """Nothing is open any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._next = None, inf

    def _set(self, when: float) -> None:
        self.cancel()
        self._next = when
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        self.cancel()
        now, earliest = self._loop.time(), inf
        for asked in list(self._open_requests()):
            if not isinstance(asked, RequestFuture):
                continue
            if asked.deadline <= now:
                asked.expire()
            else:
                earliest = min(earliest, asked.deadline)
        if earliest < inf:
            self.note(max(earliest, now + _TICK))
