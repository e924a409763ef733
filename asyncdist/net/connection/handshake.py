"""How two processes open a channel: connect, prove the job's token to each other, and say who they are.

Over a Unix socket the accepting side also checks that the same user dials. Between hosts the connection is TLS if the
settings ask for it between ranks (see `asyncdist.net.security.tls`). No byte is interpreted before the proof of
`asyncdist.net.security.auth`, and then a greeting of limited length. The two sides are `dial` and `accept`; a caller
limits their time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
import struct
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from asyncdist.base import lifecycle
from asyncdist.base.backoff import Backoff
from asyncdist.errors import AuthenticationError, ProtocolError
from asyncdist.net.host_watch import tune
from asyncdist.net.network import machine_name
from asyncdist.net.security import auth
from asyncdist.net.security.tls import TlsSocket

ChannelSocket = socket.socket | TlsSocket

_LENGTH = struct.Struct("<I")
_MOST_GREETING_NBYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
_UNSENT_NBYTES = 256 << 10
"""Bytes that the kernel holds of an outgoing TCP stream. A short message waits behind them."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a process says about itself to the other side of a channel.

    Attributes:
        id: Identifies its port; no other port ever has the same.
        name: A text for messages, such as ``"process 4711 on node7"``.
        host_name: ASYNCDIST_HOST of the process; None without one.
        identity: See `asyncdist.net.process_identity`; None where the system does not provide it.
        stages: Whether long messages to it may pass through shared memory.
        about: Plain data of the service.
    """

    id: str
    name: str
    host_name: str | None
    identity: dict[str, Any] | None
    stages: bool
    about: Any

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb(asdict(self))
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Greeting:
        """Return a greeting. Raises ProtocolError."""
        try:
            greeting = cls(**msgpack.unpackb(data))
        except (ValueError, TypeError, msgpack.UnpackException) as cause:
            raise ProtocolError(f"a greeting that is not legible: {cause}") from cause
        if not isinstance(greeting.id, str) or not isinstance(greeting.name, str):
            raise ProtocolError("a greeting without id and name")
        return greeting


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where a port listens; `encode` makes it plain data, for example for a store.

    Attributes:
        id: The id of the port.
        name: A text for messages.
        host: The machine, or ASYNCDIST_HOST.
        user: The user id of its process.
        network: The network namespace, to which abstract Unix addresses belong.
        unix: The abstract Unix address; empty without one.
        tcp: Host and port.
    """

    id: str
    name: str
    host: str
    user: int
    network: int
    unix: str
    tcp: tuple[str, int]

    def encode(self) -> list[Any]:
        return [self.id, self.name, self.host, self.user, self.network, self.unix, list(self.tcp)]

    @classmethod
    def decode(cls, data: Any) -> ChannelAddress:
        """Return an address from plain data. Raises ProtocolError."""
        try:
            port_id, name, host, user, network, unix, (where, port) = data
            return cls(str(port_id), str(name), str(host), int(user), int(network), str(unix), (str(where), int(port)))
        except (TypeError, ValueError) as cause:
            raise ProtocolError(f"an address of a channel that is not legible: {data!r}") from cause

    def is_on(self, other: ChannelAddress) -> bool:
        """Return whether two processes can connect over a Unix socket."""
        same = (self.host, self.user, self.network) == (other.host, other.user, other.network)
        return same and bool(self.unix and other.unix)


def this_place(host_name: str | None) -> tuple[str, int, int]:
    """Return host, user and network namespace of this process, as in a `ChannelAddress`."""
    network = 0
    with contextlib.suppress(OSError):
        network = os.stat("/proc/self/ns/net").st_ino
    return host_name or machine_name(), os.getuid() if hasattr(os, "getuid") else 0, network


@dataclass(frozen=True, slots=True)
class ChannelSecurity:
    """The settings of both sides of a handshake.

    Attributes:
        token: The token of the job.
        purpose: To which the proof is bound, so that it is valid for this service of this job only.
        accepting: The TLS context for connections from other hosts; None without TLS.
        dialling: The TLS context for connections to other hosts; None without TLS.
    """

    token: str | None
    purpose: str
    accepting: ssl.SSLContext | None = None
    dialling: ssl.SSLContext | None = None


async def dial(
    address: ChannelAddress, own: ChannelAddress, greeting: Greeting, security: ChannelSecurity
) -> tuple[ChannelSocket, Greeting]:
    """Connect to a port.

    Raises:
        OSError: Nothing listens there.
        EOFError: The other side closed the connection during the handshake.
        AuthenticationError: One side does not hold the token.
        ProtocolError: Another program, or another process of the job, answers there.
    """
    sock: ChannelSocket = await _connect_unix(address.unix) if address.is_on(own) else await _connect_tcp(address.tcp)
    try:
        if isinstance(sock, socket.socket) and sock.family != _AF_UNIX and security.dialling is not None:
            name = address.tcp[0] if security.dialling.check_hostname else None
            sock = await _secured(TlsSocket(sock, security.dialling, serves=False, name=name))
        await _prove(sock, auth.dial(security.token, security.purpose, secrets.token_bytes(auth.NONCE_NBYTES)))
        peer = await _greet(sock, greeting)
        if peer.id != address.id:
            raise ProtocolError(f"{peer.name} answers at the address of {address.name}, which has ended")
        return sock, peer
    except BaseException:
        sock.close()
        raise


async def accept(sock: socket.socket, greeting: Greeting, security: ChannelSecurity) -> tuple[ChannelSocket, Greeting]:
    """Authenticate a process that has connected. Closes the socket, and raises the errors of `dial`, if that fails."""
    accepted: ChannelSocket = sock
    try:
        lifecycle.close_in_children(sock)
        sock.setblocking(False)
        if sock.family == _AF_UNIX:
            _check_user(sock)
        else:
            _tune_tcp(sock)
            if security.accepting is not None:
                accepted = await _secured(TlsSocket(sock, security.accepting, serves=True))
        nonce = secrets.token_bytes(auth.NONCE_NBYTES)
        await _prove(accepted, auth.accept(security.token, security.purpose, nonce))
        return accepted, await _greet(accepted, greeting)
    except BaseException:
        accepted.close()
        raise


_AF_UNIX = getattr(socket, "AF_UNIX", None)


def _check_user(sock: socket.socket) -> None:
    if hasattr(socket, "SO_PEERCRED"):
        _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != os.getuid():
            raise AuthenticationError(f"a connection of another user, {user}")


async def _connect_unix(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lifecycle.close_in_children(sock)
    try:
        sock.setblocking(False)
        async for _ in Backoff(_FIRST_PAUSE, _LONGEST_PAUSE):
            # A full queue of connections.
            with contextlib.suppress(BlockingIOError):
                sock.connect(f"\0{name}")
                break
        return sock
    except BaseException:
        sock.close()
        raise


async def _connect_tcp(where: tuple[str, int]) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET, socket.SOCK_STREAM)
    lifecycle.close_in_children(sock)
    try:
        sock.setblocking(False)
        _tune_tcp(sock)
        await asyncio.get_running_loop().sock_connect(sock, where)
        return sock
    except BaseException:
        sock.close()
        raise


def _tune_tcp(sock: socket.socket) -> None:
    tune(sock)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_NBYTES)


# -- over a non-blocking socket ----------------------------------------------------------------------


async def _prove(sock: ChannelSocket, handshake: auth.Handshake) -> None:
    try:
        step = next(handshake)
        while True:
            if isinstance(step, bytes):
                await _write(sock, step)
                step = next(handshake)
            else:
                step = handshake.send(await _read(sock, step))
    except StopIteration:
        return


async def _greet(sock: ChannelSocket, greeting: Greeting) -> Greeting:
    """Exchange greetings. Each side writes first, because a greeting fits into the socket's buffer."""
    own = greeting.encode()
    if len(own) > _MOST_GREETING_NBYTES:
        raise ProtocolError(f"the greeting of this process has {len(own)} bytes, of at most {_MOST_GREETING_NBYTES}")
    await _write(sock, _LENGTH.pack(len(own)) + own)
    (nbytes,) = _LENGTH.unpack(await _read(sock, _LENGTH.size))
    if nbytes > _MOST_GREETING_NBYTES:
        raise ProtocolError(f"a greeting that claims {nbytes} bytes")
    return Greeting.decode(await _read(sock, nbytes))


async def _secured(sock: TlsSocket) -> TlsSocket:
    while True:
        try:
            sock.secure()
            return sock
        except BlockingIOError:
            await _ready(sock, writable=sock.wants_write)
        except BaseException:
            sock.close()
            raise


async def _read(sock: ChannelSocket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        try:
            piece = sock.recv(nbytes - len(data))
        except BlockingIOError:
            await _ready(sock)
            continue
        if not piece:
            raise EOFError("the other side closed the connection during the handshake; see its log")
        data += piece
    return data


async def _write(sock: ChannelSocket, data: bytes) -> None:
    if isinstance(sock, TlsSocket):
        sock.sendall(data)
        while sock.unsent:
            await _ready(sock, writable=True)
            with contextlib.suppress(BlockingIOError):
                sock.flush()
        return
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            await _ready(sock, writable=True)


async def _ready(sock: ChannelSocket, *, writable: bool = False) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    descriptor = sock.fileno()

    def resolve() -> None:
        if not ready.done():
            ready.set_result(None)

    (loop.add_writer if writable else loop.add_reader)(descriptor, resolve)
    try:
        await ready
    finally:
        (loop.remove_writer if writable else loop.remove_reader)(descriptor)
