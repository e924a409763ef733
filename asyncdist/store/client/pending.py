"""The requests of a blocking store's threads, and the base of its clients: TCPStore and HashStore use it.

A thread makes a `PendingRequest` and waits until it is ready. Each `BlockingClient` has its own way to wait: the TCP client
reads a socket on behalf of all threads, and the in-memory client sleeps until another thread completes the request.
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
    """One thread's request and its answer. It is changed only while the client's lock is held."""

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
        """Ignore a published message: only a stream receives any."""

    def _wake(self) -> None:
        self.ready = True
        if self.event is not None:
            self.event.set()

    def sleep(self, timeout: float | None) -> None:
        """Wait until the event is set or the timeout has passed; the request may not be ready then."""
        assert self.event is not None
        self.event.wait(timeout)


def acquire(lock: threading.RLock, deadline: Deadline) -> None:
    """Acquire a lock, such that an interrupt never leaves it locked.

    It takes an RLock, because only the thread that owns an RLock can release it: a release in vain is an error, which is
    ignored. Raises TimeoutError.
    """
    left = deadline.remaining_or_none()
    try:
        acquired = lock.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX))
    except BaseException:
        with contextlib.suppress(RuntimeError):  # this thread does not own it yet
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
        """Cancel a request, whether it is answered or not."""

    @abstractmethod
    def confirm(self, number: int) -> None:
        """Acknowledge a popped item."""

    @abstractmethod
    def close(self) -> None:
        """Reject every open request. A second call does nothing."""

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
    """The request of a stream: ready when the stream has begun, later when an item is buffered or the stream has ended."""

    __slots__ = ("taking", "waiting")

    def __init__(self) -> None:
        super().__init__()
        self.taking = threading.RLock()
        """Held by the one thread that waits for the next item, since the request has a single event."""
        self.waiting: deque[T] = deque()

    def look(self) -> bool:
        """Return whether an item is buffered, and update ``ready``. Raises the error that has ended the stream."""
        if not self.waiting and self.error is not None:
            raise self.error
        self.ready = bool(self.waiting)
        if self.event is not None and not self.ready:
            self.event.clear()
        return self.ready


class SubscriptionBuffer(StreamBuffer[bytes]):
    """The request of a subscription."""

    __slots__ = ()

    def publish(self, message: bytes) -> None:
        self.waiting.append(message)
        self._wake()


class WatchBuffer(StreamBuffer[bytes | None]):
    """The request of a key watch. It buffers only the newest value."""

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
        if value != self._last:  # a server repeats the value after a reconnect
            self._last = value
            self.waiting.clear()
            self.waiting.append(value)
            self._wake()


class ClientStream(BlockingStream[T]):
    """A stream of a blocking client. It keeps ``store`` alive, and closes the client in the end if it is ``owned``."""

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
