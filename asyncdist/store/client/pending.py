"""Where threads ask and wait for a blocking store's answers: what TCPStore, HashStore and FileStore have in common.

A thread draws a `PendingRequest`, and waits until it is ready. How it waits is each desk's own: one reads a socket for all, one
sleeps until another thread has served it, one looks into a file from time to time.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Generic, TypeVar

from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.errors import StoreTimeoutError
from asyncdist.store.base import BlockingStream
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.operations import Command, Op

T = TypeVar("T")

_NOTHING = operations.wait([])


class PendingRequest(Generic[T]):
    """What one thread waits for. Changed under its desk's lock only."""

    __slots__ = ("command", "error", "event", "number", "ready", "value")
    value: T

    def __init__(self) -> None:
        self.command: Command[Any] = _NOTHING
        self.number = 0
        self.ready = False
        self.error: Exception | None = None
        self.event: threading.Event | None = None

    def resolve(self, value: T) -> None:
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


def acquire(lock: threading.RLock, deadline: Deadline) -> None:
    """Get a lock, and no Ctrl-C leaves it locked: that of a Lock could come when it was got and nobody knew it yet.

    Raises TimeoutError.
    """
    left = deadline.remaining_or_none()
    try:
        acquired = lock.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX))
    except BaseException:
        with contextlib.suppress(RuntimeError):  # it is not ours yet
            lock.release()
        raise
    if not acquired:
        raise TimeoutError


class BlockingClient(ABC):
    """One client of a store, used by any number of threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @abstractmethod
    def begin(self, command: Command[Any], pending: PendingRequest[Any], deadline: Deadline) -> None:
        """Send ``command``, and number ``pending``. Raises TimeoutError."""

    @abstractmethod
    def wait_for(self, pending: PendingRequest[Any], deadline: Deadline) -> None:
        """Return when ``pending`` is ready. Raises TimeoutError."""

    @abstractmethod
    def give_up(self, number: int) -> None:
        """Withdraw a request, answered or not."""

    @abstractmethod
    def confirm(self, number: int) -> None:
        """Say that a popped item has arrived."""

    @abstractmethod
    def close(self) -> None:
        """End everything that is open here. May be called again."""

    def perform(self, command: Command[T], limit: float) -> T:
        """Carry out a command within ``limit`` seconds and return its result."""
        pending: PendingRequest[T] = PendingRequest()
        self.settle(command, pending, limit)
        if pending.error is not None:
            raise pending.error
        return pending.value

    def settle(self, command: Command[Any], pending: PendingRequest[Any], limit: float) -> None:
        """Send a command, and return when ``pending`` holds the first answer. Raises StoreTimeoutError."""
        deadline = Deadline.after(limit)
        try:
            self.begin(command, pending, deadline)
            if not pending.ready:
                self.wait_for(pending, deadline)
            if command.op is Op.QUEUE_POP and pending.error is None:
                self.confirm(pending.number)
        except TimeoutError:
            self.give_up(pending.number)
            raise command.overdue(limit) from None
        except BaseException:
            self.give_up(pending.number)
            raise

    def take(self, buffer: StreamBuffer[T], deadline: Deadline) -> T:
        """Return the next item of a stream. Raises TimeoutError."""
        acquire(buffer.taking, deadline)
        try:
            while True:
                with self.lock:
                    if buffer.look():
                        return buffer.waiting.popleft()
                self.wait_for(buffer, deadline)
        finally:
            buffer.taking.release()


# -- what comes again and again ----------------------------------------------------------------------


class StreamBuffer(PendingRequest[Any], Generic[T]):
    """The ticket of a stream: ready when it has begun, later when something is there to be taken or it has ended."""

    __slots__ = ("taking", "waiting")

    def __init__(self) -> None:
        super().__init__()
        self.taking = threading.RLock()
        """Of several threads one at a time waits, or one's leaving would be taken for another's."""
        self.waiting: deque[T] = deque()

    def look(self) -> bool:
        """Say whether something is there to be taken, and be ready only then. Raises what has ended the stream."""
        if not self.waiting and self.error is not None:
            raise self.error
        self.ready = bool(self.waiting)
        if self.event is not None and not self.ready:
            self.event.clear()
        return self.ready


class SubscriptionBuffer(StreamBuffer[bytes]):
    """The ticket of a subscription."""

    __slots__ = ()

    def publish(self, message: bytes) -> None:
        self.waiting.append(message)
        self._wake()


class WatchBuffer(StreamBuffer[bytes | None]):
    """The ticket of a watch: of the values not taken yet only the newest is kept."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        super().__init__()
        self._last: Any = ()

    def resolve(self, value: Any) -> None:
        self._note(value)
        super().resolve(value)

    def publish(self, message: bytes) -> None:
        self._note(operations.watched(message))

    def _note(self, value: bytes | None) -> None:
        if value != self._last:  # it may be told again over another connection
            self._last = value
            self.waiting.clear()
            self.waiting.append(value)
            self._wake()


class ClientStream(BlockingStream[T]):
    """A stream at a desk; with ``owned``, at one of its own that it closes in the end. Keeps ``store`` alive."""

    def __init__(
        self,
        desk: BlockingClient,
        command: Command[Any],
        arrivals: StreamBuffer[T],
        limit: float,
        *,
        store: object,
        owned: bool = False,
    ) -> None:
        self._store = store
        self._desk = desk
        self._command = command
        self._owned = owned
        self._arrivals = arrivals
        self._closed = False
        desk.settle(command, arrivals, limit)
        if arrivals.error is not None and not arrivals.waiting:
            raise arrivals.error

    def get(self, timeout: Timeout = None) -> T:
        try:
            return self._desk.take(self._arrivals, Deadline.after(timeout))
        except TimeoutError:
            raise StoreTimeoutError(self._command.name, self._command.keys, seconds(timeout)) from None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._owned:
            self._desk.close()
        else:
            self._desk.give_up(self._arrivals.number)
