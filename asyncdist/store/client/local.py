"""HashStore: a store inside one process, for its threads. Users' programs create it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any, TypeVar

from asyncdist.base.deadline import Deadline, Timeout, seconds, wait_until_set
from asyncdist.errors import StoreConnectionError
from asyncdist.store.base import BlockingStream, Store
from asyncdist.store.client.pending import BlockingClient, ClientStream, PendingRequest, PendingStream
from asyncdist.store.protocol.client_protocol import refusal
from asyncdist.store.protocol.operations import BLOCKING, STREAMS, Command, Op, OperationKind
from asyncdist.store.protocol.streams import stream_buffer
from asyncdist.store.state.machine import StoreState

DEFAULT_TIMEOUT = 300.0
_CLIENT = "threads of this process"
T = TypeVar("T")


class LocalClient(BlockingClient):
    """A state machine, executed by the threads that call it."""

    def __init__(self) -> None:
        super().__init__("the store of this process")
        self._state = StoreState()
        self._requests: dict[int, PendingRequest[Any]] = {}
        self._last = 0
        self._dropped: deque[PendingStream[Any]] = deque()
        self._over: StoreConnectionError | None = None

    def wait_for(self, pending: PendingRequest[Any], deadline: Deadline) -> None:
        with self.lock:
            event = pending.event = pending.event or threading.Event()
            if pending.ready:
                event.set()
        if not wait_until_set(event, deadline.remaining()):
            raise TimeoutError

    def end_stream(self, stream: PendingStream[Any]) -> None:
        self.guard(self.give_up, stream.number)

    def drop_stream(self, stream: PendingStream[Any]) -> None:
        self._dropped.append(stream)  # cancelled before the next request: the lock may be held

    def begin(self, command: Command[Any], pending: PendingRequest[Any], deadline: Deadline) -> None:
        while self._dropped:
            with contextlib.suppress(IndexError):  # another thread has taken the last one
                self.give_up(self._dropped.popleft().number)
        with self.lock:
            if self._over is not None:
                raise StoreConnectionError(*self._over.args)
            self._last += 1
            number = pending.number = self._last
            pending.command = command
            self._requests[number] = pending
            try:
                self._execute(number, command.op, command.args)
            except BaseException:
                self._requests.pop(number, None)
                raise

    def give_up(self, number: int) -> None:
        with self.lock:
            pending = self._requests.pop(number, None)  # None for a pop that has been answered
            if (pending is None or pending.command.op in BLOCKING) and self._over is None:
                self._execute(number, Op.CANCEL, (number,))

    def confirm(self, number: int) -> None:
        with self.lock:
            if self._over is None:
                self._execute(number, Op.CONFIRM, (number,))

    def _execute(self, request: int, op: Op, args: tuple[Any, ...]) -> None:
        """Execute a request, and complete those that become ready. The lock is held."""
        for _, number, kind, value in self._state.execute(_CLIENT, request, op, args):
            if number not in self._requests:
                continue
            pending = self._requests[number]
            if kind is OperationKind.PUBLISHED:
                pending.publish(value)
                continue
            if pending.command.op not in STREAMS or kind is OperationKind.REFUSED:
                del self._requests[number]
            if kind is OperationKind.RESULT:
                pending.resolve(value)
            else:
                pending.reject(refusal(*value))

    def close(self) -> None:
        with self.lock:
            if self._over is None:
                self._state.leave(_CLIENT)
                self._over = StoreConnectionError("this store was closed by this process: make another")
            requests, self._requests = self._requests, {}
            for pending in requests.values():
                pending.reject(StoreConnectionError(*self._over.args))


class HashStore(Store):
    """A store in this process's memory, for any number of its threads; torch's HashStore by name and methods."""

    def __init__(self) -> None:
        super().__init__(DEFAULT_TIMEOUT)
        self._client = LocalClient()

    def request(self, command: Command[T], timeout: Timeout = None) -> T:
        return self._client.perform(command, self._timeout if timeout is None else seconds(timeout))

    def stream(self, command: Command[Any], hidden: str = "") -> BlockingStream[Any]:
        return ClientStream(self._client, command, stream_buffer(command, hidden), self._timeout, self)

    def clone(self) -> HashStore:
        """Return the same store with a timeout of its own. To close one closes both."""
        other = HashStore()
        other._client = self._client
        other.set_timeout(self.timeout)
        return other

    def close(self) -> None:
        self._client.guard(self._client.close)
