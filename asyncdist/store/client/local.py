"""HashStore: a store inside one process, for its threads."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.errors import StoreConnectionError
from asyncdist.store.base import Store, Subscription, Watch
from asyncdist.store.client.pending import BlockingClient, ClientStream, PendingRequest, SubscriptionBuffer, WatchBuffer
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.client_protocol import refusal
from asyncdist.store.protocol.operations import BLOCKING, STREAMS, Client, Command, Op, OperationKind, Reply
from asyncdist.store.state.machine import StoreState

DEFAULT_TIMEOUT = 300.0
T = TypeVar("T")


class LocalClient(BlockingClient):
    """A state machine, executed by whichever thread asks."""

    def __init__(self) -> None:
        super().__init__()
        self.state = StoreState()
        self._tickets: dict[int, tuple[Op, PendingRequest[Any]]] = {}
        self._last = 0
        self._over: StoreConnectionError | None = None

    # -- what a file store does otherwise ---------------------------------------------------------

    def execute(self, number: int, op: Op, args: tuple[Any, ...]) -> list[Reply]:
        """Execute a request, and return the replies to this client. The lock is held."""
        return self.state.execute(self.name_for(op), number, op, args)

    def name_for(self, op: Op) -> Client:
        """Return the client under whose name we ask for ``op``."""
        return "threads of this process"

    def wait_for(self, pending: PendingRequest[Any], deadline: Deadline) -> None:
        with self.lock:
            event = self.event_of(pending)
        if not event.wait(deadline.remaining_or_none()):
            raise TimeoutError

    # -- what both do -----------------------------------------------------------------------------

    def event_of(self, ticket: PendingRequest[Any]) -> threading.Event:
        """Return the event that is set when ``ticket`` is ready. The lock is held."""
        if ticket.event is None:
            ticket.event = threading.Event()
        if ticket.ready:
            ticket.event.set()
        return ticket.event

    def begin(self, command: Command[Any], pending: PendingRequest[Any], deadline: Deadline) -> None:
        with self.lock:
            if self._over is not None:
                raise StoreConnectionError(*self._over.args)
            self._last += 1
            number = pending.number = self._last
            self._tickets[number] = command.op, pending
            try:
                self.deliver(self.execute(number, command.op, command.args))
            except BaseException:
                self._tickets.pop(number, None)
                raise

    def give_up(self, number: int) -> None:
        with self.lock:
            op, _ = self._tickets.pop(number, (Op.QUEUE_POP, None))
            if op in BLOCKING and number and self._over is None:
                self.deliver(self.withdraw(number, op))

    def withdraw(self, number: int, op: Op) -> list[Reply]:
        """Cancel a request. The lock is held."""
        return self.execute(number, Op.CANCEL, (number,))

    def confirm(self, number: int) -> None:
        with self.lock:
            if self._over is None:
                self.deliver(self.execute(number, Op.CONFIRM, (number,)))

    def deliver(self, replies: list[Reply]) -> None:
        """Complete the requests that the replies belong to. The lock is held."""
        for _, number, kind, value in replies:
            op, ticket = self._tickets.get(number, (None, None))
            if ticket is None:
                continue
            if kind is OperationKind.PUBLISHED:
                ticket.publish(value)
                continue
            if op not in STREAMS or kind is OperationKind.REFUSED:
                del self._tickets[number]
            if kind is OperationKind.RESULT:
                ticket.resolve(value)
            else:
                ticket.reject(refusal(*value))

    def close(self) -> None:
        with self.lock:
            if self._over is None:
                self.leave()
                self._over = StoreConnectionError("this store was closed by this process: make another")
            tickets, self._tickets = self._tickets, {}
            for _, ticket in tickets.values():
                ticket.reject(StoreConnectionError(*self._over.args))

    def leave(self) -> None:
        """Remove this client from the state. The lock is held."""
        self.state.leave(self.name_for(Op.SET))


class LocalStore(Store):
    """A blocking store whose state is in this process."""

    def __init__(self, desk: LocalClient, timeout: Timeout) -> None:
        super().__init__(timeout)
        self._desk = desk

    def request(self, command: Command[T], timeout: Timeout = None) -> T:
        return self._desk.perform(command, self._timeout if timeout is None else seconds(timeout))

    def subscribe(self, channel: str) -> Subscription:
        return ClientStream(self._desk, operations.subscribe(channel), SubscriptionBuffer(), self._timeout, store=self)

    def watch(self, key: str) -> Watch:
        return ClientStream(self._desk, operations.watch(key), WatchBuffer(), self._timeout, store=self)

    def close(self) -> None:
        self._desk.close()


class HashStore(LocalStore):
    """A store in this process's memory, for any number of its threads; torch's HashStore by name and methods."""

    def __init__(self) -> None:
        super().__init__(LocalClient(), DEFAULT_TIMEOUT)
