"""The awaited client of a store: one connection at a time, any number of requests in flight on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Generator
from math import inf
from typing import Any, Generic, Self, TypeVar

from asyncdist.base.background_loop import running_loop
from asyncdist.base.backoff import Backoff
from asyncdist.base.deadline import Timeout, seconds
from asyncdist.base.timers import DeadlineTimer
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError, StoreConnectionError, UsageError
from asyncdist.net.security.tls import client_context
from asyncdist.store.base import AsyncStoreBase, AsyncStream
from asyncdist.store.client.connect import FIRST_PAUSE, ConnectRetry, ReconnectPolicy, closed
from asyncdist.store.client.link import StoreConnection, open_connection
from asyncdist.store.protocol.client_protocol import IDENTITY_NBYTES, ClientProtocol
from asyncdist.store.protocol.long_messages import LongMessage
from asyncdist.store.protocol.operations import Command
from asyncdist.store.protocol.streams import StreamBuffer, stream_buffer

T = TypeVar("T")

_SUCCESSOR_FIRST_PAUSE, _SUCCESSOR_LONGEST_PAUSE = 0.1, 10.0
"""Seconds between two attempts to connect to the store that follows one."""


class AsyncStore(AsyncStoreBase):
    """A client of a store server, for the event loop on which `connect` made it."""

    def __init__(self, connection: ReconnectingConnection, host: str, port: int, timeout: float) -> None:
        self.host = host
        self.port = port
        self.timeout = timeout
        self.connection = connection

    @classmethod
    async def connect(
        cls, host: str, port: int, *, token: str | None = None, timeout: Timeout = 300.0, config: Config | None = None
    ) -> Self:
        """Connect to a store server; retry until one answers. `close` the client after use.

        Args:
            host: Name or address, or the absolute path of a Unix socket.
            port: The store's port.
            token: The token; by default that of ``config``.
            timeout: Seconds or a timedelta, for connecting and for operations without a timeout of their own.
            config: Settings; by default those of the environment. ``store_reconnect`` limits how long the client tries
                to replace a broken connection, ``store_lease`` how long the store keeps its ephemeral keys without one.

        Raises:
            StoreConnectionError: No store has answered in time.
            AddressError: The host does not resolve.
            AuthenticationError: The tokens differ.
            ProtocolError: The server is not an asyncdist store.
        """
        running_loop("AsyncStore.connect")
        retry = ConnectRetry(host, port, timeout)
        config = config or Config.from_environment()
        connection = ReconnectingConnection(host, port, config.token if token is None else token, config)
        async for _ in retry:
            try:
                await connection.open(retry)
                return cls(connection, host, port, seconds(timeout))
            except OSError as error:
                retry.failed(error)
        raise retry.overdue()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which the store must be used."""
        return self.connection.loop

    @property
    def lease(self) -> float:
        return self.connection.protocol.lease

    @property
    def expiries(self) -> int:
        return self.connection.protocol.expiries

    def request(self, command: Command[T], timeout: Timeout = None) -> RequestFuture[T]:
        limit = self.timeout if timeout is None else seconds(timeout)
        future = RequestFuture(command, limit, self.connection)
        self.connection.ask(future)
        return future

    async def take(self, command: Command[T], timeout: Timeout = None) -> T:
        popping = self.request(command, timeout)
        try:
            item = await popping
        except asyncio.CancelledError:
            self.connection.give_up(popping.number)
            raise
        self.connection.confirm(popping.number)
        return item

    def stream(self, command: Command[Any], hidden: str = "") -> AsyncStream[Any]:
        return RemoteStream(self.connection, command, stream_buffer(command, hidden), self.timeout)

    async def close(self) -> None:
        """Close the connection; open requests fail with StoreConnectionError."""
        await self.connection.close()

    async def successor(self) -> AsyncStore:
        """Close this client, whose store is lost, and connect to the one that follows at its address, however late."""
        await self.close()
        token, config = self.connection.token, self.connection.config
        async for _ in Backoff(_SUCCESSOR_FIRST_PAUSE, _SUCCESSOR_LONGEST_PAUSE):
            with contextlib.suppress(AsyncdistError):
                return await AsyncStore.connect(self.host, self.port, token=token, timeout=self.timeout, config=config)
        raise AssertionError("attempts without a deadline do not end")

    def __repr__(self) -> str:
        return f"<AsyncStore {self.host}:{self.port}{' closed' if self.connection.over else ''}>"


class ReconnectingConnection:
    """A session with a store, over one connection at a time."""

    def __init__(self, host: str, port: int, token: str | None, config: Config) -> None:
        self.where = f"{host}:{port}"
        self.over: StoreConnectionError | None = None
        self.link: StoreConnection | None = None
        """The present connection, None during a reconnect."""
        self.protocol = ClientProtocol(self.where, config.store_lease, os.urandom(IDENTITY_NBYTES))
        self.policy = ReconnectPolicy(self.protocol, host, port, config.store_reconnect)
        self.deadlines = DeadlineTimer(self._open_requests)
        self.reconnecting: asyncio.TimerHandle | asyncio.Task[None] | None = None
        """The latest reconnect; first a timer that starts it."""
        self.token, self.config = token, config
        self._tls = client_context(config)
        self._heartbeat = config.heartbeat
        self.loop = asyncio.get_running_loop()

    def ask(self, request: RequestFuture[Any] | StreamRequest[Any]) -> None:
        """Send a request, or reject it after `close`. Raises UsageError off the loop, and if the request is too long."""
        here = asyncio._get_running_loop()
        if here is not self.loop and (here is not None or self.loop.is_running() or self.loop.is_closed()):
            raise self._wrong_loop()
        if self.over is not None:
            request.reject(StoreConnectionError(*self.over.args))
            return
        request.number, message = self.protocol.ask(request)
        if self.protocol.output:
            for earlier in self.protocol.data_to_send():
                self._send(earlier)
        self._send(message)
        self.deadlines.note(request.deadline)

    def _wrong_loop(self) -> UsageError:
        if not self.loop.is_running():
            return UsageError("this store's loop has ended: connect on the loop that uses the store")
        return UsageError(
            "this store's loop runs in another thread: call it in a coroutine there, which "
            "asyncio.run_coroutine_threadsafe starts; or use TCPStore, which any thread may call"
        )

    def _open_requests(self) -> list[RequestFuture[Any]]:
        return [request for request in self.protocol.open_requests() if isinstance(request, RequestFuture)]

    def give_up(self, number: int) -> None:
        self._send(self.protocol.give_up(number))

    def confirm(self, number: int) -> None:
        self._send(self.protocol.confirm(number))

    def _send(self, message: bytes | LongMessage) -> None:
        if self.link is not None:
            self.link.send(message)

    async def open(self, retry: ConnectRetry) -> None:
        """Make one attempt to connect. Raises OSError if another attempt may succeed."""
        self.link = await open_connection(self.protocol, self.token, retry, self._lost, self._tls, self._heartbeat)
        self.policy.succeeded()

    def _lost(self, link: StoreConnection, why: str, for_good: bool) -> None:
        self.link = None
        over = self.policy.lost(why, for_good=for_good)
        if over is not None:
            self._end(over)
        elif self.over is None:
            # Not at once, because a loop that is closing would destroy a new task before its end.
            self.reconnecting = self.loop.call_later(FIRST_PAUSE, self._begin_reconnect)

    def _begin_reconnect(self) -> None:
        self.reconnecting = asyncio.ensure_future(self._reconnect())

    async def _reconnect(self) -> None:
        """Connect again, as long as the policy allows it."""
        policy = self.policy
        try:
            async for _ in policy.retry:
                try:
                    await self.open(policy.retry)
                    return
                except (OSError, AsyncdistError) as error:
                    policy.failed(error)
            raise policy.overdue()
        except StoreConnectionError as over:
            self._end(over)
        except (KeyboardInterrupt, SystemExit):  # the loop may run again
            self.reconnecting = self.loop.call_later(FIRST_PAUSE, self._begin_reconnect)
            raise

    def _end(self, error: StoreConnectionError) -> None:
        if self.over is None:
            self.over = error
        self.protocol.end(self.over)
        self.deadlines.cancel()

    async def close(self) -> None:
        goodbye = self.protocol.goodbye() if self.over is None else b""
        self._end(closed(self.where))
        if self.reconnecting is not None:
            self.reconnecting.cancel()
            if isinstance(self.reconnecting, asyncio.Task):
                await asyncio.wait([self.reconnecting])
        if self.link is not None:
            self.link.send(goodbye)
            await self.link.close()


class RequestFuture(asyncio.Future[T]):
    """A request that has been sent: a future and not a coroutine, because a thousand requests then need no tasks.

    Args:
        command: The command.
        limit: Seconds from now to its ``deadline``, which is in the loop's time.
        connection: Where it is sent.
    """

    __slots__ = ("_connection", "_limit", "command", "deadline", "number")

    def __init__(self, command: Command[T], limit: float, connection: ReconnectingConnection) -> None:
        loop = connection.loop
        super().__init__(loop=loop)
        self.command = command
        self.deadline = loop.time() + limit
        self.number = 0
        self._limit = limit
        self._connection = connection

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
        self.reject(self.command.overdue(self._limit, f"the store at {self._connection.where}"))
        self._connection.give_up(self.number)

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self._connection.give_up(self.number)
        return cancelled

    def __repr__(self) -> str:
        """Return an advice, which asyncio shows in its error if a program makes a task of this future."""
        state = "cancelled" if self.cancelled() else "done" if self.done() else "pending"
        keys = self.command.keys
        about = "" if not keys else f" of {keys[0]!r}" if len(keys) == 1 else f" of {len(keys)} keys"
        return f"<a future, {self.command.name}{about}, that is {state}: await it as it is, it needs no task>"


class StreamRequest(Generic[T]):
    """The request of a stream, with the answers that the program has not read. The protocol calls its methods."""

    deadline = inf

    def __init__(self, command: Command[Any], buffer: StreamBuffer[T]) -> None:
        self.command = command
        self.number = 0
        self.buffer = buffer
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.changed = asyncio.Event()
        self.over: Exception | None = None

    def resolve(self, value: Any) -> None:
        self.buffer.begin(value)
        if not self.begun.done():
            self.begun.set_result(None)
        self.changed.set()

    def publish(self, message: bytes) -> None:
        self.buffer.publish(message)
        self.changed.set()

    def reject(self, error: Exception) -> None:
        self.over = error
        if not self.begun.done():
            self.begun.set_exception(error)
            self.begun.exception()  # an error that no task awaits is not logged
        self.changed.set()


class RemoteStream(Generic[T]):
    """The stream of answers to one request. It ends when it is left, or when the program drops it."""

    def __init__(
        self, connection: ReconnectingConnection, command: Command[Any], buffer: StreamBuffer[T], limit: float
    ) -> None:
        self._connection = connection
        self._limit = limit
        self._request = StreamRequest(command, buffer)

    # Not weakref.finalize: its arguments would keep the error of the request, whose traceback keeps this stream.
    def __del__(self) -> None:
        # The protocol keeps the request, which would go on to buffer answers that nothing can read.
        request = self._request
        if request.number and request.over is None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._connection.loop.call_soon_threadsafe(self._connection.give_up, request.number)

    async def __aenter__(self) -> Self:
        request = self._request
        if not request.number:
            self._connection.ask(request)
        try:
            # shield() would log an exception after a cancellation
            await asyncio.wait([request.begun], timeout=None if self._limit == inf else self._limit)
        except asyncio.CancelledError:
            self._leave()
            raise
        if not request.begun.done():
            self._leave()
            raise request.command.overdue(self._limit, f"the store at {self._connection.where}")
        request.begun.result()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aexit__(self, *exc: object) -> None:
        self._leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Wait for the next item and return it. Raises StoreConnectionError when the stream has ended."""
        request = self._request
        if not request.number:
            await self
        while not request.buffer.items:
            if request.over is not None:
                raise request.over
            request.changed.clear()
            await request.changed.wait()
        return request.buffer.items.popleft()

    def _leave(self) -> None:
        request = self._request
        if request.number and request.over is None:
            self._connection.give_up(request.number)
            name, key = request.command.name, request.command.keys[0]
            request.reject(StoreConnectionError(f"this process has closed the {name} of {key!r}"))
