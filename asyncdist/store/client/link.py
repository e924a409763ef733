"""One awaited connection to a store: the bytes between an asyncio transport and a `ClientProtocol`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from asyncdist.base import lifecycle
from asyncdist.base.callables import Callback
from asyncdist.base.deadline import Deadline
from asyncdist.base.error_text import describe_error
from asyncdist.errors import AuthenticationError, ProtocolError
from asyncdist.net.connection.part_sender import PartSender, descriptor_of
from asyncdist.net.host_watch import CLIENT_LOOKS, HostWatch, look_interval, tune
from asyncdist.net.network import is_address, look_up
from asyncdist.net.security.auth import HandshakeDriver
from asyncdist.net.security.tls import handshake_error
from asyncdist.store.client.connect import (
    CONNECT_TIMEOUT,
    ConnectRetry,
    SilentServer,
    hung_up,
    look_up_overdue,
    resolution_error,
)
from asyncdist.store.protocol.client_protocol import ClientProtocol
from asyncdist.store.protocol.codec import framed
from asyncdist.store.protocol.long_messages import LongMessage

_CLOSE_TIMEOUT = 5.0
"""Seconds within which the socket must accept the client's last bytes; then the client aborts the connection."""
_BATCH_NBYTES = 8 << 10
"""The client writes queued requests to the socket as soon as they have this size, so that the store can begin."""

Lost = Callable[["StoreConnection", str, bool], None]
"""``lost(connection, why, for_good)`` is called when an established connection has ended."""


async def open_connection(
    protocol: ClientProtocol,
    token: str | None,
    retry: ConnectRetry,
    lost: Lost,
    tls: ssl.SSLContext | None = None,
    heartbeat: float = 0.0,
) -> StoreConnection:
    """Try once to connect, and resume the session. Raises OSError if another attempt may succeed.

    A store whose host is silent for ``heartbeat`` seconds is lost.
    """
    loop = asyncio.get_running_loop()
    connection = StoreConnection(protocol, token, heartbeat)
    deadline = retry.attempt_deadline()
    try:
        addresses = await _addresses_of(retry.host, deadline)
        async with asyncio.timeout(deadline.remaining_or_none()):
            if retry.host.startswith("/"):
                await loop.create_unix_connection(lambda: connection, retry.host)
            else:
                await _connect(connection, retry, addresses, tls)
            await asyncio.wait([connection.greeted])  # shield() would log its exception after a cancellation
            connection.greeted.result()
    except ssl.SSLError as error:
        connection.abort()
        raise handshake_error(error) from error
    except UnicodeError as error:
        raise resolution_error(error) from None
    except TimeoutError as error:
        is_silent = connection.transport is not None
        connection.abort()
        if is_silent:
            raise SilentServer from error
        raise
    except BaseException:
        connection.abort()
        raise
    connection.begin(lost)
    return connection


async def _addresses_of(host: str, deadline: Deadline) -> list[str]:
    if host.startswith("/") or is_address(host):
        return [host]
    try:
        async with asyncio.timeout(deadline.remaining_or_none()):
            return await look_up(host)
    except TimeoutError:
        raise look_up_overdue(host) from None


async def _connect(
    connection: StoreConnection, retry: ConnectRetry, addresses: list[str], tls: ssl.SSLContext | None
) -> None:
    """Connect to the first address that accepts. Raises the error of the first one if none does."""
    loop, name, first = asyncio.get_running_loop(), retry.host if tls else None, OSError()
    for address in addresses:
        try:
            # With TLS this contains a handshake, which a busy server may answer late.
            async with asyncio.timeout(None if tls else CONNECT_TIMEOUT):
                await loop.create_connection(lambda: connection, address, retry.port, ssl=tls, server_hostname=name)
            return
        except ssl.SSLError:
            raise
        except OSError as error:
            # It may have connected in the last moment.
            if connection.transport is not None:
                raise
            first = error if address == addresses[0] else first
    raise first


class StoreConnection(asyncio.Protocol):
    """A connection to the store. ``transport`` is None before and after it is open."""

    def __init__(self, protocol: ClientProtocol, token: str | None, heartbeat: float) -> None:
        self._heartbeat = heartbeat
        self._looking: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        self.greeted.add_done_callback(lambda greeted: greeted.cancelled() or greeted.exception())
        self.transport: asyncio.Transport | None = None
        self._token = token
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._handshake: HandshakeDriver | None = None
        self._secured = False
        self._silent = True  # the server has sent nothing but TLS records
        self._protocol = protocol
        self._lost: Lost | None = None
        self._why = ""
        self._is_over = False
        self._corked = False
        self._out: list[bytes] = []
        self._out_nbytes = 0

    def begin(self, lost: Lost) -> None:
        if self.transport is None:
            raise ConnectionResetError("it hung up after the handshake")
        self._lost = lost
        self._host_watch = HostWatch(self.transport.get_extra_info("socket"), self._heartbeat)
        self._look_later()
        self.transport.write(framed([self._protocol.introduce()]))

    # -- called by the loop ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's transport does not derive from it
        self.transport = transport
        lifecycle.close_in_children(self)
        self._parts = PartSender(transport, lambda call: self._loop.call_soon(self._guard, call))
        self._secured = transport.get_extra_info("sslcontext") is not None
        tune(transport.get_extra_info("socket"), self._heartbeat)
        self._handshake = HandshakeDriver.dialling(self._token, "store", transport.write)
        self._protocol.interrupted()

    def data_received(self, data: bytes) -> None:
        protocol = self._protocol
        try:
            if self._handshake is not None:
                self._silent = False
                data = self._handshake.feed(data)
                if not self._handshake.done:
                    return
                self._handshake = None
            protocol.receive(data)
            if protocol.output:
                for message in protocol.data_to_send():
                    self.send(message)
            elif protocol.lost is not None:
                self.abort()
            elif protocol.greeted and not self.greeted.done():
                self.greeted.set_result(None)
        except (ProtocolError, AuthenticationError, ConnectionRefusedError) as error:
            self._why, self._is_over = describe_error(error), True
            if not self.greeted.done():
                self.greeted.set_exception(error)
            self.abort()
        except BaseException as error:  # the bytes that were read are lost
            self._interrupted(error)
            raise

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._looking is not None:
            self._looking.cancel()
        self._parts.drop()
        if not self.greeted.done():
            why = f": {describe_error(exc)}" if exc else ""
            during = ConnectionResetError(f"it hung up during the handshake{why}")
            self.greeted.set_exception(hung_up(exc, secured=self._secured) if self._silent else during)
        if not self._gone.done():
            self._gone.set_result(None)
        if self._lost is not None:
            self._protocol.interrupted()
            self._lost(self, self._why or (describe_error(exc) if exc else "it hung up"), self._is_over)

    def _look_later(self) -> None:
        self._looking = self._loop.call_later(look_interval(self._heartbeat, CLIENT_LOOKS), self._look)

    def _look(self) -> None:
        if self._host_watch.has_vanished():
            self._why = self._host_watch.why()
            self.abort()
        else:
            self._look_later()

    def pause_writing(self) -> None:
        self._parts.pause()

    def resume_writing(self) -> None:
        self._parts.resume()

    def fileno(self) -> int:
        return -1 if self.transport is None else descriptor_of(self.transport)

    # -- called by the store ----------------------------------------------------------------------

    def send(self, message: bytes | LongMessage) -> None:
        """Write the first message of a loop iteration at once, further ones together, and a long one in parts."""
        if self.transport is None or not message:
            return
        try:
            if isinstance(message, LongMessage):
                self._parts.add(message)
            elif not self._corked:
                self._corked = True
                self._loop.call_soon(self._guard, self._uncork)
                self.transport.write(framed([message]))
            else:
                self._out.append(message)
                self._out_nbytes += len(message)
                if self._out_nbytes >= _BATCH_NBYTES:
                    self._flush()
        except BaseException as error:
            self._interrupted(error)
            raise

    def _uncork(self) -> None:
        self._corked = False
        self._flush()

    def _guard(self, call: Callback) -> None:
        try:
            call()
        except BaseException as error:
            self._interrupted(error)
            raise

    def _interrupted(self, error: BaseException) -> None:
        """End the connection, which a signal handler has interrupted in the middle of a message: another one resumes."""
        self._why = f"it was interrupted: {describe_error(error)}"
        self.abort()

    def _flush(self) -> None:
        out, self._out, self._out_nbytes = self._out, [], 0
        if out and self.transport is not None:
            self.transport.write(framed(out))

    async def close(self) -> None:
        self._lost = None
        if self.transport is None:
            return
        self._flush()
        self.transport.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await asyncio.shield(self._gone)
        except TimeoutError:
            self.abort()
            await asyncio.shield(self._gone)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
