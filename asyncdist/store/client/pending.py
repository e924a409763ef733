"""The requests of a blocking store's threads, and the base of its clients.

A thread makes a `PendingRequest` and waits until it is ready. Each `BlockingClient` has its own way to wait: the TCP client
reads a socket on behalf of all threads, and the in-memory client sleeps until another thread completes the request.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from asyncdist.base.deadline import LONGEST_SLEEP, Deadline, Timeout, seconds
from asyncdist.errors import StoreTimeoutError, UsageError
from asyncdist.store.base import BlockingStream
from asyncdist.store.protocol.operations import Command, Op
from asyncdist.store.protocol.streams import StreamBuffer

T = TypeVar("T")


class PendingRequest(Generic[T]):
    """One thread's request and its answer. It is changed only while the client's lock is held."""

    command: Command[Any]
    value: T
    number = 0
    ready = False
    error: Exception | None = None
    event: threading.Event | None = None

    def resolve(self, value: T) -> None:
        self.value = value
        self.ready = True
        if self.event is not None:
            self.event.set()

    def reject(self, error: Exception) -> None:
        self.error = error
        self.ready = True
        if self.event is not None:
            self.event.set()

    def publish(self, message: bytes) -> None:
        """Ignore a published message: only a stream receives any."""


def acquire(lock: threading.RLock, deadline: Deadline) -> None:
    """Acquire a lock; a signal handler that raises does not leave it locked. Raises TimeoutError.

    The lock is an RLock, because releasing one that this thread does not own is an error, which can be ignored.
    """
    try:
        while (
            not (acquired := lock.acquire(timeout=min(deadline.remaining(), LONGEST_SLEEP))) and not deadline.expired()
        ):
            continue
    except BaseException:
        with contextlib.suppress(RuntimeError):  # this thread does not own the lock yet
            lock.release()
        raise
    if not acquired:
        raise TimeoutError


class CallGuard:
    """Refuses the calls of a signal handler that interrupts a call: its thread may hold the locks that they need."""

    def __init__(self) -> None:
        self._calling_threads: set[int] = set()

    def guard(self, call: Callable[..., T], *args: Any) -> T:
        """Make a call. Raises UsageError in a signal handler that interrupts another call."""
        thread = threading.get_ident()
        if thread in self._calling_threads:
            raise UsageError(
                "a signal handler has called a store in the middle of a call to it: let it set an event for a thread"
            )
        try:
            self._calling_threads.add(thread)
            return call(*args)
        finally:
            self._calling_threads.discard(thread)


class BlockingClient(CallGuard, ABC):
    """One client of a store, used by any number of threads. ``name`` names the store in errors."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
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

    @abstractmethod
    def end_stream(self, stream: PendingStream[Any]) -> None:
        """End a stream that the program closes."""

    @abstractmethod
    def drop_stream(self, stream: PendingStream[Any]) -> None:
        """End a stream that the program has dropped; called on any thread, which may hold any lock."""

    def perform(self, command: Command[T], limit: float) -> T:
        """Carry out a command within ``limit`` seconds and return its result."""
        pending: PendingRequest[T] = PendingRequest()
        self.guard(self._settle, command, pending, limit)
        if pending.error is not None:
            raise pending.error
        return pending.value

    def open_stream(self, command: Command[Any], stream: PendingStream[Any], limit: float) -> None:
        """Begin a stream within ``limit`` seconds. Raises the error that has ended it before its first item."""
        self.guard(self._settle, command, stream, limit)
        if stream.error is not None and not stream.items:
            raise stream.error

    def _settle(self, command: Command[Any], pending: PendingRequest[Any], limit: float) -> None:
        """Send a command, and return when ``pending`` holds the first answer. Raises StoreTimeoutError."""
        deadline = Deadline.after(limit)
        try:
            self.begin(command, pending, deadline)
            if not pending.ready:
                self.wait_for(pending, deadline)
            if command.op is Op.QUEUE_POP and pending.error is None:
                self.confirm(pending.number)
        except BaseException as error:
            if pending.number:
                self.give_up(pending.number)
            if isinstance(error, TimeoutError):
                raise command.overdue(limit, self.name) from None
            raise

    def next_item(self, stream: PendingStream[T], deadline: Deadline) -> T:
        """Return the next item of a stream. Raises TimeoutError, and the error that has ended the stream."""
        item: T = self.guard(self._next_item, stream, deadline)
        return item

    def _next_item(self, stream: PendingStream[T], deadline: Deadline) -> T:
        acquire(stream.reading, deadline)
        try:
            while True:
                with self.lock:
                    if stream.update_ready():
                        return stream.items.popleft()
                self.wait_for(stream, deadline)
        finally:
            stream.reading.release()


class PendingStream(PendingRequest[Any], Generic[T]):
    """The request of a stream: ready when the stream has begun, later when an item is buffered or the stream has ended."""

    def __init__(self, buffer: StreamBuffer[T]) -> None:
        self._buffer = buffer
        self.items = buffer.items
        self.reading = threading.RLock()
        """Held by the one thread that waits for the next item, since the request has a single event."""

    def resolve(self, value: Any) -> None:
        self._buffer.begin(value)
        super().resolve(value)

    def publish(self, message: bytes) -> None:
        self._buffer.publish(message)
        super().resolve(None)

    def update_ready(self) -> bool:
        """Return whether an item is buffered, and update ``ready``. Raises the error that has ended the stream."""
        if not self.items and self.error is not None:
            raise self.error
        self.ready = bool(self.items)
        if self.event is not None and not self.ready:
            self.event.clear()
        return self.ready


class ClientStream(BlockingStream[T]):
    """A stream of a blocking client. It keeps ``store`` alive, and ends when it is closed or the program drops it."""

    _open = False

    def __init__(
        self, client: BlockingClient, command: Command[Any], buffer: StreamBuffer[T], limit: float, store: object
    ) -> None:
        self._store = store
        self.client = client
        self._command = command
        self._pending = PendingStream(buffer)
        client.open_stream(command, self._pending, limit)
        self._open = True

    # Not weakref.finalize: its arguments would keep the error of the request, whose traceback keeps this stream.
    def __del__(self) -> None:
        if self._open:
            self.client.drop_stream(self._pending)

    def get(self, timeout: Timeout = None) -> T:
        try:
            return self.client.next_item(self._pending, Deadline.after(timeout))
        except TimeoutError:
            raise StoreTimeoutError(self._command.name, self._command.keys, seconds(timeout)) from None

    def close(self) -> None:
        if self._open:
            self.client.end_stream(self._pending)
            self._open = False
