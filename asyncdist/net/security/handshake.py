"""How a connection begins on an event loop: TLS if the settings ask for it, then the proof of the job's token.

Over a Unix socket the accepting side checks instead of TLS that the same user dials. No byte is interpreted before the
proof of `asyncdist.net.security.auth`. The two sides are `dial` and `accept`; a caller limits their time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from dataclasses import dataclass

from asyncdist.base import lifecycle
from asyncdist.base.descriptors import ClosingOnError
from asyncdist.errors import AuthenticationError
from asyncdist.net.host_watch import tune
from asyncdist.net.loop_socket import LoopSocket, prove
from asyncdist.net.security.auth import HandshakeDriver
from asyncdist.net.security.tls import TlsSocket

_CREDENTIALS = struct.Struct("3i")
_UNSENT_NBYTES = 256 << 10
"""Bytes that the kernel holds of an outgoing TCP stream. A short message waits behind them."""


@dataclass(frozen=True, slots=True)
class Security:
    """The settings of both sides of a handshake: the job's token, and the TLS contexts for other hosts, None without TLS.

    The proof of the token is bound to ``purpose``, so that it is valid for this service of this job only.
    """

    token: str | None
    purpose: str
    accepting: ssl.SSLContext | None = None
    dialling: ssl.SSLContext | None = None


async def dial_tcp(host: str, port: int, security: Security) -> LoopSocket:
    """Connect to another host, and run the handshake of `dial`."""
    sock = _prepared(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM))
    with ClosingOnError(sock):
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
    return await dial(sock, security, host)


async def dial(sock: socket.socket, security: Security, host: str = "") -> LoopSocket:
    """Run the dialling side on a connected socket, which does not block. Closes it if that fails.

    Raises:
        OSError: The connection broke.
        EOFError: The other side closed the connection during the handshake.
        AuthenticationError: One side does not hold the token.
        CertificateError: One side does not trust the certificate of the other.
        ProtocolError: Another program answers there.
    """
    tls, secured = security.dialling, None
    if tls is not None and sock.family != socket.AF_UNIX:
        secured = TlsSocket(sock, tls, serves=False, name=host if tls.check_hostname else None)
    return await _begun(sock, secured, security, serves=False)


async def accept(sock: socket.socket, security: Security) -> LoopSocket:
    """Run the accepting side on a socket. Closes it, and raises the errors of `dial`, if that fails."""
    secured = None
    with ClosingOnError(sock):
        _prepared(sock)
        if sock.family == socket.AF_UNIX:
            if (user := peer_user(sock)) != os.getuid():
                raise AuthenticationError(f"a connection of another user, {user}")
        elif security.accepting is not None:
            secured = TlsSocket(sock, security.accepting, serves=True)
    return await _begun(sock, secured, security, serves=True)


async def _begun(sock: socket.socket, tls: TlsSocket | None, security: Security, *, serves: bool) -> LoopSocket:
    connection = LoopSocket(sock)
    with ClosingOnError(connection):
        if tls is not None:
            await connection.secure(tls)
        side = HandshakeDriver.accepting if serves else HandshakeDriver.dialling
        # The few bytes of a handshake fit into an empty socket buffer.
        await prove(connection.sock, side(security.token, security.purpose, connection.sock.sendall))
    return connection


def peer_user(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket; this process's own where it is unknown."""
    if not hasattr(socket, "SO_PEERCRED"):
        return os.getuid()
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _prepared(sock: socket.socket) -> socket.socket:
    lifecycle.close_in_children(sock)
    sock.setblocking(False)
    tune(sock)
    if sock.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_NBYTES)
    return sock
