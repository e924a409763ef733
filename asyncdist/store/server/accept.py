"""Admission of new connections, and the phase before a connection's protocol and authentication are known.

Clients of this package begin with the handshake of `net.security.auth`, and prove that they hold the token. Torch's clients
begin with a zero byte and a magic number. Torch's format has no authentication, so `C10d` defines from which
addresses the server accepts torch's clients. A `PendingConnection` then passes its transport to a session.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from enum import StrEnum
from typing import Any, Protocol, cast

from asyncdist.config import Config
from asyncdist.errors import ProtocolError
from asyncdist.net.acceptor import Acceptor
from asyncdist.net.admission import EvictingQueue
from asyncdist.net.host_watch import SERVER_LOOKS, look_interval, tune
from asyncdist.net.loop_socket import ready
from asyncdist.net.network import is_loopback, peer_name
from asyncdist.net.security.auth import WANTS_TLS, HandshakeDriver
from asyncdist.net.security.tls import handshake_error
from asyncdist.store.protocol import c10d as c10d_wire
from asyncdist.store.protocol.codec import hello
from asyncdist.store.protocol.operations import Reply
from asyncdist.store.server.c10d_session import C10dSession
from asyncdist.store.server.connection import ServerConnection, ServerContext
from asyncdist.store.server.session import Session

logger = logging.getLogger("asyncdist.store.server.server")

_TLS_HANDSHAKE = b"\x16"
_C10D_OPENING = bytes([c10d_wire.Code.VALIDATE]) + c10d_wire.U32.pack(c10d_wire.MAGIC)


class C10d(StrEnum):
    """The addresses from which a store accepts torch's clients, each of which can read and write every key.

    A store with a token or TLS refuses them by default, and so does a store of a rank: ranks use asyncdist's own format.
    """

    OFF = "off"
    LOOPBACK = "loopback"
    ANY = "any"

    @classmethod
    def of(cls, config: Config, token: str | None) -> C10d:
        """Return the policy of ``ASYNCDIST_STORE_C10D``, or for ``auto`` the default. Raises ValueError."""
        if config.store_c10d != "auto":
            return cls(config.store_c10d)
        return cls.OFF if token or config.tls_cert else cls.LOOPBACK


class Admission:
    """The connections of one server."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server
        self.max_connections, self.refusals = server.config.store_max_connections, server.refusals
        self._look_interval = look_interval(server.config.heartbeat, SERVER_LOOKS)
        self._looking: asyncio.TimerHandle | None = None
        self.connections: set[ServerConnection] = set()
        self.empty = asyncio.Event()
        self.empty.set()
        self.num_admitted = 0
        self.unauthenticated: EvictingQueue[ServerConnection] = EvictingQueue(self.max_connections, self._evict)
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self.refusals.flush()
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def admit(self, connection: ServerConnection) -> bool:
        """Add a new connection; return False when the server is full or closes.

        A full server evicts its oldest unauthenticated connection to make room.
        """
        # The event loop may deliver a connection one iteration after the listener was closed.
        if self._closed:
            return False
        if len(self.connections) >= self.max_connections:
            self.refuse_overflow()
            if not self.unauthenticated.evict_oldest():
                return False
        self.num_admitted += 1
        self.connections.add(connection)
        self.empty.clear()
        self.unauthenticated.add(connection)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(self._look_interval, self._look)
        return True

    def _look(self) -> None:
        for connection in list(self.connections):
            connection.end_if_vanished()
        self._looking = None
        if self.connections and not self._closed:
            self._looking = asyncio.get_running_loop().call_later(self._look_interval, self._look)

    def replace(self, before: ServerConnection, now: ServerConnection) -> None:
        self.connections.add(now)
        self.remove(before)

    def remove(self, connection: ServerConnection) -> None:
        self.connections.discard(connection)
        self.unauthenticated.discard(connection)
        if not self.connections:
            self.empty.set()

    def _evict(self, connection: ServerConnection) -> None:
        self._server.dismiss(connection)
        connection.abort()

    @property
    def is_full(self) -> bool:
        """Whether all connections that may be open have authenticated, so that none gives way."""
        return len(self.connections) - len(self.unauthenticated) >= self.max_connections

    def refuse_overflow(self) -> None:
        most = self.max_connections
        self.refusals.add(f"it has {most} connections; ASYNCDIST_STORE_MAX_CONNECTIONS raises the limit")


class PendingContext(ServerContext, Protocol):
    """What a connection needs of its server before it has a session."""

    admission: Admission
    c10d: C10d
    tls: ssl.SSLContext | None
    token: str | None


class PendingConnection(ServerConnection):
    """A connection whose protocol is not known yet, or whose client has not authenticated yet."""

    __slots__ = ("_handshake", "_local", "_private", "_received", "_timer")

    _server: PendingContext

    def __init__(self, server: PendingContext) -> None:
        super().__init__(server)
        self._received = b""
        self._handshake: HandshakeDriver | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._local = False  # the client is on this host
        self._private = False  # TLS or a socket file protects the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's transports have another base class
        self._transport = transport
        sock, address = transport.get_extra_info("socket"), transport.get_extra_info("peername")
        self.peer = peer_name(sock)
        through_file = sock.family == socket.AF_UNIX
        if address is None and not through_file:  # the connection was reset, and the client's address is unknown
            self._server.refusals.count += 1
            self.abort()
            return
        self._local = through_file or is_loopback(address[0])
        self._private = through_file or transport.get_extra_info("sslcontext") is not None
        if not self._server.admission.admit(self):
            self.abort()
            return
        tune(sock, self._server.config.heartbeat)
        timeout = self._server.config.handshake_timeout
        self._timer = asyncio.get_running_loop().call_later(timeout, self._too_late, timeout)

    def receive(self, data: bytes) -> None:
        if self._handshake is not None:
            self._continue_handshake(self._handshake, data)
            return
        self._received += data
        if self._received.startswith(_C10D_OPENING):
            self._accept_c10d(self._received[len(_C10D_OPENING) :])
        elif not _C10D_OPENING.startswith(self._received) and self._transport is not None:
            if not self._private and self._server.tls is not None:
                self._transport.write(WANTS_TLS)
                raise ProtocolError("a connection without TLS: set ASYNCDIST_TLS_CA in its process")
            self._handshake = HandshakeDriver.accepting(self._server.token, "store", self._transport.write)
            self._continue_handshake(self._handshake, self._received)

    def _continue_handshake(self, handshake: HandshakeDriver, data: bytes) -> None:
        rest = handshake.feed(data)
        if handshake.done and self._transport is not None:
            self._transport.write(hello(self._server.limit))
            self._hand_over(Session(self._server, self._transport, self.peer), rest)

    def _accept_c10d(self, rest: bytes) -> None:
        if self._server.c10d is C10d.OFF:
            raise ProtocolError(
                "a client of torch's TCPStore, which this store does not accept: torch's format has no authentication; "
                "if every user of this machine may read and write the store, `--c10d loopback` "
                "(ASYNCDIST_STORE_C10D=loopback) accepts such clients from this machine"
            )
        if self._server.c10d is C10d.LOOPBACK and not self._local:
            raise ProtocolError(
                "a client of torch's TCPStore from another machine: torch's format has no authentication, so this store "
                "accepts it from loopback only; in a network that you trust, `--c10d any` (ASYNCDIST_STORE_C10D=any) "
                "accepts it from anywhere"
            )
        if self._transport is not None:
            self._hand_over(C10dSession(self._server, self._transport, self.peer), rest)

    def _hand_over(self, session: ServerConnection, rest: bytes) -> None:
        assert self._transport is not None
        self._cancel_timer()
        self._server.admission.replace(self, session)
        self._transport.set_protocol(session)
        self._transport = None
        session.data_received(rest)

    def answer(self, reply: Reply) -> None:
        raise ProtocolError("a reply for a connection that has sent no request")

    @property
    def unfinished(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self, timeout: float) -> None:
        self.refuse(f"no proof of the token within {timeout:g} s")


class SniffingListener:
    """A listening socket that peeks at the first byte of a connection to choose TLS or plain TCP; closes like a server.

    `PendingConnection` refuses a plain connection unless its client is torch's TCPStore, which has no TLS.
    """

    def __init__(self, server: PendingContext, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._server, self._context = server, context
        self._loop = asyncio.get_running_loop()
        self._ending: list[asyncio.Task[None]] = []
        self._acceptor = Acceptor(
            sock, self._begin, what="the store", most=server.config.store_max_connections,
            timeout=server.config.handshake_timeout, loop=self._loop, refusals=server.refusals,
        )  # fmt: skip

    def close(self) -> None:
        self._ending += self._acceptor.stop()

    async def wait_closed(self) -> None:
        """Return when no handshake is running."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _begin(self, sock: socket.socket) -> None:
        """Give the connection to the server, inside TLS if it begins so."""
        first = b""
        try:
            if self._server.admission.is_full:
                self._server.admission.refuse_overflow()
            else:
                await ready(sock)
                first = sock.recv(1, socket.MSG_PEEK)
        finally:
            if not first:
                sock.close()
        if not first:
            return
        tls: dict[str, Any] = {"ssl": self._context, "ssl_handshake_timeout": self._server.config.handshake_timeout}
        if first != _TLS_HANDSHAKE:
            tls = {}
        try:
            await self._loop.connect_accepted_socket(lambda: PendingConnection(self._server), sock, **tls)
        except ssl.SSLError as error:
            raise handshake_error(error) from error
        except OSError as error:
            raise ConnectionResetError(f"it hung up during the TLS handshake ({error})") from error
