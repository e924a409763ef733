"""The awaited client of a store: one connection, any number of operations in flight on it."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Generator
from typing import Any, Self, cast

from asyncdist.deadline import Timeout, seconds
from asyncdist.errors import AuthenticationError, ProtocolError, StoreConnectionError, StoreTimeoutError
from asyncdist.handshake import NONCE_NBYTES, Pushed, dial
from asyncdist.store import operations
from asyncdist.store.conversation import Conversation
from asyncdist.store.dialling import Persistence, broken, closed, describe, tune
from asyncdist.store.faces import AsyncFace
from asyncdist.store.operations import Command, Op

_CLOSE_TIMEOUT = 5.0
"""Seconds that a store may take to accept our last bytes before we hang up all the same."""


class AsyncStore(AsyncFace):
    """A store reached over one connection. Make one with `connect`, on the loop that is to use it."""

    def __init__(self, link: _Link, host: str, port: int, timeout: float) -> None:
        self.host = host
        self.port = port
        self.timeout = timeout
        self._link = link
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, host: str, port: int, *, token: str | None = None, timeout: Timeout = 300.0) -> Self:
        """Connect to the store at ``host:port``, trying again while nothing answers there, for ``timeout`` seconds.

        ``timeout`` is also that of operations that name none. Raises StoreConnectionError when nothing has answered in
        time, AddressError when the host does not resolve, AuthenticationError at once when the token is refused, and
        ProtocolError when something else answers. `close` it in the end.
        """
        persistence = Persistence(host, port, timeout)
        while True:
            try:
                link = await _reach(host, port, token, persistence)
                return cls(link, host, port, seconds(timeout))
            except OSError as error:
                await asyncio.sleep(persistence.pause_after(error))

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it was made on and must be used on."""
        return self._loop

    async def request(self, command: Command, timeout: Timeout = None) -> Any:
        answer = _Answer(self._loop)
        future = answer.future
        limit = self.timeout if timeout is None else seconds(timeout)
        number = self._link.ask(command, answer)
        timer = None
        if limit != float("inf"):
            timer = self._loop.call_later(limit, _expire, future, command, limit)
        try:
            result = await future
        except (asyncio.CancelledError, StoreTimeoutError):
            self._link.give_up(number)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if command.op is Op.QUEUE_POP:
            self._link.confirm(number)
        return result

    def subscribe(self, channel: str) -> LinkSubscription:
        """Return the messages of a channel: use ``async with``, or ``await`` it, and then ``async for``.

        Messages are kept in this process until they are taken.
        """
        return LinkSubscription(self._link, operations.subscribe(channel))

    async def close(self) -> None:
        """Hang up; whatever is still awaited fails with StoreConnectionError."""
        await self._link.close()

    def __repr__(self) -> str:
        return f"<AsyncStore {self.host}:{self.port}{' closed' if self._link.over else ''}>"


def _expire(future: asyncio.Future[Any], command: Command, limit: float) -> None:
    if not future.done():
        future.set_exception(StoreTimeoutError(command.name, command.keys, limit))


class _Answer:
    """Where one request's answer goes."""

    __slots__ = ("future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Any] = loop.create_future()

    def resolve(self, value: Any) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def reject(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def publish(self, message: bytes) -> None:
        """Only subscriptions get messages."""


# -- the connection --------------------------------------------------------------------------------


async def _reach(host: str, port: int, token: str | None, persistence: Persistence) -> _Link:
    """Make one attempt. Raises OSError where another may do better."""
    loop = asyncio.get_running_loop()
    link = _Link(f"{host}:{port}", token)
    try:
        async with asyncio.timeout(persistence.attempt().remaining_or_none()):
            await loop.create_connection(lambda: link, host, port)
            await asyncio.shield(link.greeted)
    except UnicodeError as error:  # a label that no name can have
        link.abort()
        raise _unresolvable(error) from None
    except BaseException:
        link.abort()
        raise
    return link


def _unresolvable(error: UnicodeError) -> OSError:
    import socket

    return socket.gaierror(socket.EAI_NONAME, str(error))


class _Link(asyncio.Protocol):
    """A connection to the store: bytes between a transport and a `Conversation`."""

    def __init__(self, where: str, token: str | None) -> None:
        loop = asyncio.get_running_loop()
        self.where = where
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.greeted.add_done_callback(lambda greeted: greeted.cancelled() or greeted.exception())
        self.over: StoreConnectionError | None = None
        self._token = token
        self._loop = loop
        self._lost: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._greeting: Pushed | None = None
        self._conversation = Conversation()
        self._why: str | None = None
        self._corked = False
        self._out: list[bytes] = []

    # -- what the loop calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # which uvloop's is in all but its bases
        self._transport = transport
        tune(transport.get_extra_info("socket"))
        self._greeting = Pushed(dial(self._token, "store", os.urandom(NONCE_NBYTES)), transport.write)

    def data_received(self, data: bytes) -> None:
        try:
            if self._greeting is not None:
                data = self._greeting.feed(data)
                if not self._greeting.done:
                    return
                self._greeting = None
            self._conversation.receive(data)
        except (ProtocolError, AuthenticationError) as error:
            self._why = str(error)
            if not self.greeted.done():
                self.greeted.set_exception(error)
            self.abort()
            return
        if self._conversation.greeted and not self.greeted.done():
            self.greeted.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end(broken(self.where, self._why or (describe(exc) if exc else "it hung up")))
        if not self.greeted.done():
            why = f": {describe(exc)}" if exc else ""
            self.greeted.set_exception(ConnectionResetError(f"it hung up while we said hello{why}"))
        if not self._lost.done():
            self._lost.set_result(None)

    # -- what the store calls ---------------------------------------------------------------------

    def ask(self, command: Command, sink: Any) -> int:
        if self.over is not None:
            raise StoreConnectionError(*self.over.args)
        number, frame = self._conversation.ask(command, sink)
        self._send(frame)
        return number

    def give_up(self, number: int) -> None:
        self._send(self._conversation.give_up(number))

    def confirm(self, number: int) -> None:
        self._send(self._conversation.confirm(number))

    async def close(self) -> None:
        self._end(closed(self.where))
        if self._transport is None:
            return
        self._uncork()
        self._transport.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await asyncio.shield(self._lost)
        except TimeoutError:
            self.abort()
            await asyncio.shield(self._lost)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- inside -----------------------------------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        """Send at once what comes first in an iteration of the loop, and the rest of it together."""
        if self._transport is None or not frame:
            return
        if self._corked:
            self._out.append(frame)
            return
        self._corked = True
        self._loop.call_soon(self._uncork)
        self._transport.write(frame)

    def _uncork(self) -> None:
        self._corked = False
        out, self._out = self._out, []
        if out and self._transport is not None:
            self._transport.write(b"".join(out))

    def _end(self, error: StoreConnectionError) -> None:
        if self.over is None:
            self.over = error
        self._conversation.end(self.over)


class LinkSubscription:
    """Messages of one channel over the store's connection."""

    def __init__(self, link: _Link, command: Command) -> None:
        self._link = link
        self._command = command
        self._number: int | None = None
        self._loop = asyncio.get_running_loop()
        self._subscribed: asyncio.Future[None] = self._loop.create_future()
        self._messages: deque[bytes] = deque()
        self._wanted: list[asyncio.Future[None]] = []
        self._over: Exception | None = None

    async def __aenter__(self) -> Self:
        if self._number is None:
            self._number = self._link.ask(self._command, self)
        try:
            await asyncio.shield(self._subscribed)
        except asyncio.CancelledError:
            self._leave()
            raise
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aexit__(self, *exc: object) -> None:
        self._leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Return the next message, however long it takes. Raises StoreConnectionError when there can be no more."""
        if self._number is None:
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
        if self._number is not None and self._over is None:
            self._link.give_up(self._number)
            self._finish(StoreConnectionError(f"the subscription to {self._command.keys[0]!r} was closed by us"))

    # -- what the conversation calls --------------------------------------------------------------

    def resolve(self, value: Any) -> None:
        if not self._subscribed.done():
            self._subscribed.set_result(None)

    def publish(self, message: bytes) -> None:
        self._messages.append(message)
        self._wake()

    def reject(self, error: Exception) -> None:
        self._finish(error)

    def _finish(self, error: Exception) -> None:
        self._over = error
        if not self._subscribed.done():
            self._subscribed.set_exception(error)
            self._subscribed.exception()  # whoever awaits it sees it; nobody else need
        self._wake()

    def _wake(self) -> None:
        for wanted in self._wanted:
            if not wanted.done():
                wanted.set_result(None)
