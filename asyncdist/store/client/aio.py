"""The awaited client of a store: one connection at a time, any number of operations in flight on it.

`rendezvous` and users' programs use it.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator
from math import inf
from typing import Any, Generic, Self, TypeVar

from asyncdist.base.deadline import Timeout, seconds
from asyncdist.base.tls import client_context
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError, StoreConnectionError, UsageError
from asyncdist.store.base import AsyncStoreBase
from asyncdist.store.client.connect import FIRST_PAUSE, ConnectRetry, ReconnectPolicy, closed
from asyncdist.store.client.link import StoreConnection, reach
from asyncdist.store.client.request_future import DeadlineTimer, RequestFuture
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.chunking import ChunkedMessage
from asyncdist.store.protocol.client_protocol import IDENTITY_NBYTES, ClientProtocol
from asyncdist.store.protocol.operations import Command

T = TypeVar("T")


class AsyncStore(AsyncStoreBase):
    """A store reached over one connection at a time. Make one with `connect`, on the loop that is to use it."""

    def __init__(self, line: _ReconnectingConnection, host: str, port: int, timeout: float) -> None:
        self.host = host
        self.port = port
        self.timeout = timeout
        self._line = line
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(
        cls, host: str, port: int, *, token: str | None = None, timeout: Timeout = 300.0, config: Config | None = None
    ) -> Self:
        """Connect to the store at ``host:port``, trying again while nothing answers there, for ``timeout`` seconds.

        ``timeout`` is also that of operations that name none. ``config`` (that of the environment) says how long a
        connection that breaks is tried to be made again (``store_reconnect``), for how long the store keeps this
        client's ephemeral keys meanwhile (``store_lease``), and the token where ``token`` is None.

        Raises StoreConnectionError when nothing has answered in time, AddressError when the host does not resolve,
        AuthenticationError at once when the token is refused, and ProtocolError when something else answers. `close` it
        in the end.
        """
        retry = ConnectRetry(host, port, timeout)
        config = config or Config.from_environment()
        line = _ReconnectingConnection(host, port, config.token if token is None else token, config)
        async for _ in retry:
            try:
                await line.reach(retry)
                return cls(line, host, port, seconds(timeout))
            except OSError as error:
                retry.failed(error)
        raise retry.overdue()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it was made on and must be used on."""
        return self._loop

    def request(self, command: Command[T], timeout: Timeout = None) -> asyncio.Future[T]:
        return self._ask(command, timeout)

    async def take(self, command: Command[T], timeout: Timeout = None) -> T:
        popping = self._ask(command, timeout)
        try:
            item = await popping
        except asyncio.CancelledError:
            self._line.give_up(popping.number)
            raise
        self._line.confirm(popping.number)
        return item

    def _ask(self, command: Command[T], timeout: Timeout) -> RequestFuture[T]:
        asked = RequestFuture(command, self.timeout if timeout is None else seconds(timeout), self._line, self._loop)
        self._line.ask(asked)
        return asked

    def subscribe(self, channel: str) -> RemoteSubscription:
        """Return the messages of a channel: use ``async with``, or ``await`` it, and then ``async for``.

        Messages are kept in this process until they are taken. It ends with StoreConnectionError when a connection broke
        and was made again, since messages may have been missed then.
        """
        return RemoteSubscription(self._line, operations.subscribe(channel), self.timeout)

    def watch(self, key: str) -> RemoteKeyWatch:
        """Return what a key holds now, and then each time that it changes: ``async with`` and ``async for``."""
        return RemoteKeyWatch(self._line, operations.watch(key), self.timeout)

    def watch_keys(self, prefix: str = "") -> RemotePrefixWatch:
        """Return each key that begins with ``prefix`` with its value, and again whenever one comes, changes or goes.

        ``async with`` and ``async for key, value in …``; the value is None when the key is gone. It goes on over a
        connection that broke, and then tells what has changed meanwhile. Changes are kept in this process until they
        are taken.
        """
        return RemotePrefixWatch(self._line, operations.watch_keys(prefix), self.timeout)

    async def close(self) -> None:
        """Close the connection; open requests fail with StoreConnectionError."""
        await self._line.close()

    def __repr__(self) -> str:
        return f"<AsyncStore {self.host}:{self.port}{' closed' if self._line.over else ''}>"


# -- one connection after the other ------------------------------------------------------------------


class _ReconnectingConnection:
    """A conversation with a store, over one connection, and the next when that breaks."""

    def __init__(self, host: str, port: int, token: str | None, config: Config) -> None:
        self.where = f"{host}:{port}"
        self.over: StoreConnectionError | None = None
        self.link: StoreConnection | None = None
        self._token = token
        self._tls = client_context(config)
        self._conversation = ClientProtocol(self.where, config.store_lease, os.urandom(IDENTITY_NBYTES))
        self._limits = DeadlineTimer(self._conversation.open_requests)
        self._loop = asyncio.get_running_loop()
        self._redial = ReconnectPolicy(self._conversation, host, port, config.store_reconnect)
        self._redialling: asyncio.TimerHandle | asyncio.Task[None] | None = None

    def ask(self, sink: RequestFuture[Any] | _Stream[Any]) -> None:
        """Open a request; one of a line that is over fails. Raises UsageError for what cannot be sent, or not here."""
        here = asyncio._get_running_loop()
        if here is not self._loop and (here is not None or self._loop.is_running() or self._loop.is_closed()):
            raise self._elsewhere()
        if self.over is not None:
            sink.reject(StoreConnectionError(*self.over.args))
            return
        sink.number, message = self._conversation.ask(sink)
        if self._conversation.has_more:
            for before in self._conversation.data_to_send():
                self._send(before)
        self._send(message)
        self._limits.note(sink.deadline)

    def _elsewhere(self) -> UsageError:
        """Return the error of a call from outside the store's loop."""
        if not self._loop.is_running():
            return UsageError("this store's loop has ended: connect on the loop that is to use it")
        return UsageError(
            "this store's loop runs in another thread: call it in a coroutine there, which "
            "asyncio.run_coroutine_threadsafe starts; or use TCPStore, which any thread may call"
        )

    def give_up(self, number: int) -> None:
        self._send(self._conversation.give_up(number))

    def confirm(self, number: int) -> None:
        self._send(self._conversation.confirm(number))

    def _send(self, message: bytes | ChunkedMessage) -> None:
        if self.link is not None:
            self.link.send(message)

    async def reach(self, retry: ConnectRetry) -> None:
        """Make one attempt to connect."""
        self.link = await reach(self._conversation, self._token, retry, self._lost, self._tls)
        self._redial.succeeded()

    def _lost(self, link: StoreConnection, why: str, for_good: bool) -> None:
        self.link = None
        over = self._redial.lost(why, for_good=for_good)
        if over is not None:
            self._end(over)
        elif self.over is None:
            # After a moment: on a loop that is just being closed, a task would be destroyed before its end.
            self._redialling = asyncio.get_running_loop().call_later(FIRST_PAUSE, self._begin_to_redial)

    def _begin_to_redial(self) -> None:
        self._redialling = asyncio.ensure_future(self._dial_again())

    async def _dial_again(self) -> None:
        """Connect again, until that succeeds or there is no point in it any more."""
        policy = self._redial
        try:
            async for _ in policy.retry:
                try:
                    await self.reach(policy.retry)
                    return
                except (OSError, AsyncdistError) as error:
                    policy.failed(error)
            raise policy.overdue()
        except StoreConnectionError as over:
            self._end(over)

    def _end(self, error: StoreConnectionError) -> None:
        if self.over is None:
            self.over = error
        self._conversation.end(self.over)
        self._limits.cancel()

    async def close(self) -> None:
        goodbye = self._conversation.goodbye() if self.over is None else b""
        self._end(closed(self.where))
        if self._redialling is not None:
            self._redialling.cancel()
            if isinstance(self._redialling, asyncio.Task):
                await asyncio.wait([self._redialling])
        if self.link is not None:
            self.link.send(goodbye)
            await self.link.close()


class _Stream(ABC, Generic[T]):
    """The stream of answers to one request."""

    deadline = inf

    def __init__(self, line: _ReconnectingConnection, command: Command[Any], limit: float) -> None:
        self._line = line
        self._limit = limit
        self.command = command
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._subscribed: asyncio.Future[None] = self._loop.create_future()
        self._messages: deque[T] = deque()
        self._wanted: list[asyncio.Future[None]] = []
        self._over: Exception | None = None

    async def __aenter__(self) -> Self:
        if not self.number:
            self._line.ask(self)
        try:
            # shield() would log what becomes of it after a cancellation
            await asyncio.wait([self._subscribed], timeout=None if self._limit == inf else self._limit)
        except asyncio.CancelledError:
            self._leave()
            raise
        if not self._subscribed.done():
            self._leave()
            raise self.command.overdue(self._limit)
        self._subscribed.result()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aexit__(self, *exc: object) -> None:
        self._leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Return the next, however long that takes. Raises StoreConnectionError when there can be no more."""
        if not self.number:
            await self
        while not self._messages:
            if self._over is not None:
                raise self._over
            wanted = self._loop.create_future()
            self._wanted.append(wanted)
            try:
                await wanted
            finally:
                self._wanted.remove(wanted)
        return self._messages.popleft()

    def _leave(self) -> None:
        if self.number and self._over is None:
            self._line.give_up(self.number)
            self._finish(StoreConnectionError(f"the {self.command.name} of {self.command.keys[0]!r} was closed by us"))

    # -- what the conversation calls --------------------------------------------------------------

    def resolve(self, value: Any) -> None:
        if not self._subscribed.done():
            self._subscribed.set_result(None)

    @abstractmethod
    def publish(self, message: bytes) -> None: ...

    def reject(self, error: Exception) -> None:
        self._finish(error)

    def _finish(self, error: Exception) -> None:
        self._over = error
        if not self._subscribed.done():
            self._subscribed.set_exception(error)
            self._subscribed.exception()  # an error that no task awaits is not logged
        self._wake()

    def _wake(self) -> None:
        for wanted in self._wanted:
            if not wanted.done():
                wanted.set_result(None)


class RemoteSubscription(_Stream[bytes]):
    """Messages of one channel over the store's connection."""

    def publish(self, message: bytes) -> None:
        self._messages.append(message)
        self._wake()


class RemoteKeyWatch(_Stream[bytes | None]):
    """What a key holds, None if it is gone; of what has not been looked at yet only the newest is kept."""

    _last: Any = ()

    def resolve(self, value: Any) -> None:
        self._note(value)
        super().resolve(value)

    def publish(self, message: bytes) -> None:
        self._note(operations.watched(message))

    def _note(self, value: bytes | None) -> None:
        if value != self._last:  # it may be told again over another connection
            self._last = value
            self._messages.clear()
            self._messages.append(value)
            self._wake()


class RemotePrefixWatch(_Stream[tuple[str, bytes | None]]):
    """The changes of the keys under a prefix: each key with its value, or None when it is gone."""

    def __init__(self, line: _ReconnectingConnection, command: Command[Any], limit: float) -> None:
        super().__init__(line, command, limit)
        self._known: dict[str, bytes] = {}

    def resolve(self, value: Any) -> None:
        there = dict(zip(value[::2], value[1::2], strict=False))
        for key in self._known.keys() - there.keys():  # gone while there was no connection
            self._note(key, None)
        for key in sorted(there):
            self._note(key, there[key])
        super().resolve(value)

    def publish(self, message: bytes) -> None:
        self._note(*operations.watched_key(message))

    def _note(self, key: str, value: bytes | None) -> None:
        if self._known.get(key) == value:  # it may be told again over another connection
            return
        if value is None:
            del self._known[key]
        else:
            self._known[key] = value
        self._messages.append((key, value))
        self._wake()
