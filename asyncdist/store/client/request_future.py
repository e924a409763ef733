"""The requests of the awaited client: one future each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from asyncdist.store.protocol.operations import Command

T = TypeVar("T")


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
