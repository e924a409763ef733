"""Where threads ask and wait for a blocking store's answers: what TCPStore, HashStore and FileStore have in common.

A thread draws a `Ticket`, and waits until it is ready. How it waits is each desk's own: one reads a socket for all, one
sleeps until another thread has served it, one looks into a file from time to time.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from asyncdist.deadline import Deadline, Timeout, seconds
from asyncdist.errors import StoreTimeoutError
from asyncdist.store import operations
from asyncdist.store.faces import Subscription, Watch
from asyncdist.store.operations import Command, Op

_NOTHING = operations.wait([])


class Ticket:
    """What one thread waits for. Changed under its desk's lock only."""

    __slots__ = ("command", "error", "event", "ready", "value")

    def __init__(self) -> None:
        self.command = _NOTHING
        self.ready = False
        self.value: Any = None
        self.error: Exception | None = None
        self.event: threading.Event | None = None

    def resolve(self, value: Any) -> None:
        self.value = value
        self._wake()

    def reject(self, error: Exception) -> None:
        self.error = error
        self._wake()

    def publish(self, message: bytes) -> None:
        """Only subscriptions get messages."""

    def _wake(self) -> None:
        self.ready = True
        if self.event is not None:
            self.event.set()

    def sleep(self, timeout: float | None) -> None:
        """Wait until woken, for whatever reason, or until the time is over."""
        assert self.event is not None
        self.event.wait(timeout)


class Messages(Ticket):
    """The ticket of a subscription: ready when it has begun, later when a message is there or it has ended."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        super().__init__()
        self.waiting: deque[bytes] = deque()

    def publish(self, message: bytes) -> None:
        self.waiting.append(message)
        self._wake()

    def take(self) -> bytes | None:
        """Return a message if there is one, and be ready again only for the next. Raises what ended it."""
        message = self.waiting.popleft() if self.waiting else None
        if message is None and self.error is not None:
            raise self.error
        self.ready = bool(self.waiting) or self.error is not None
        if self.event is not None and not self.ready:
            self.event.clear()
        return message


class Desk(ABC):
    """One client of a store, used by any number of threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @abstractmethod
    def begin(self, command: Command, ticket: Ticket, deadline: Deadline) -> int:
        """Ask for ``command`` and return the request's number. Raises TimeoutError."""

    @abstractmethod
    def wait_for(self, ticket: Ticket, deadline: Deadline) -> None:
        """Return when ``ticket`` is ready. Raises TimeoutError."""

    @abstractmethod
    def give_up(self, number: int) -> None:
        """Withdraw a request, answered or not."""

    @abstractmethod
    def confirm(self, number: int) -> None:
        """Say that a popped item has arrived."""

    @abstractmethod
    def close(self) -> None:
        """End everything that is open here. May be called again."""

    def perform(self, command: Command, limit: float) -> Any:
        """Carry out a command within ``limit`` seconds and return its result."""
        ticket = Ticket()
        self._settle(command, ticket, limit)
        if ticket.error is not None:
            raise ticket.error
        return ticket.value

    def _settle(self, command: Command, ticket: Ticket, limit: float) -> int:
        deadline = Deadline.after(limit)
        number = 0
        try:
            number = self.begin(command, ticket, deadline)
            if not ticket.ready:
                self.wait_for(ticket, deadline)
            if command.op is Op.QUEUE_POP:
                self.confirm(number)
        except TimeoutError:
            self.give_up(number)
            raise command.overdue(limit) from None
        except BaseException:
            self.give_up(number)
            raise
        return number


class Changes(Messages):
    """The ticket of a watch: of the values not taken yet only the newest is kept."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        super().__init__()
        self._last: list[bytes | None] = []

    def resolve(self, value: Any) -> None:
        self._note(value)
        super().resolve(value)

    def publish(self, message: bytes) -> None:
        self._note(operations.watched(message))
        self._wake()

    def _note(self, value: bytes | None) -> None:
        if self._last != [value]:  # it may be told again over another connection
            self._last = [value]
            self.waiting.clear()
            self.waiting.append(b"")


class _Stream:
    """A stream at a desk; with ``owned``, at one of its own that it closes in the end. Keeps ``store`` alive."""

    def __init__(
        self, desk: Desk, command: Command, ticket: Messages, limit: float, *, store: object, owned: bool
    ) -> None:
        self._store = store
        self._desk = desk
        self._command = command
        self._owned = owned
        self._messages = ticket
        self._closed = False
        self._number = desk._settle(command, ticket, limit)
        with desk.lock:
            if ticket.error is not None:
                raise ticket.error
            ticket.ready = bool(ticket.waiting)

    def _next(self, timeout: Timeout) -> Any:
        deadline = Deadline.after(timeout)
        while True:
            with self._desk.lock:
                message = self._messages.take()
                if message is not None:
                    return self._read(message)
            try:
                self._desk.wait_for(self._messages, deadline)
            except TimeoutError:
                raise StoreTimeoutError(self._command.name, self._command.keys, seconds(timeout)) from None

    def _read(self, message: bytes) -> bytes | None:
        return message

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._owned:
            self._desk.close()
        else:
            self._desk.give_up(self._number)


class DeskSubscription(_Stream, Subscription):
    """The messages of a channel."""

    def __init__(self, desk: Desk, channel: str, limit: float, *, store: object, owned: bool = False) -> None:
        super().__init__(desk, operations.subscribe(channel), Messages(), limit, store=store, owned=owned)

    def get(self, timeout: Timeout = None) -> bytes:
        return self._next(timeout)  # type: ignore[no-any-return]


class DeskWatch(_Stream, Watch):
    """What a key holds."""

    def __init__(self, desk: Desk, key: str, limit: float, *, store: object, owned: bool = False) -> None:
        self._changes = Changes()
        super().__init__(desk, operations.watch(key), self._changes, limit, store=store, owned=owned)

    def _read(self, message: bytes) -> bytes | None:
        return self._changes._last[0]

    def get(self, timeout: Timeout = None) -> bytes | None:
        return self._next(timeout)  # type: ignore[no-any-return]
