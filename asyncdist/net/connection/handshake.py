"""How two processes open a channel: connect, prove the job's token to each other, and say who they are.

After the handshake of `asyncdist.net.security.handshake` each side sends a greeting of limited length. The two sides are
`dial` and `accept`; a caller limits their time.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

from asyncdist.base import lifecycle
from asyncdist.base.backoff import Backoff
from asyncdist.base.descriptors import ClosingOnError
from asyncdist.errors import ProtocolError
from asyncdist.net.loop_socket import AnySocket, LoopSocket
from asyncdist.net.network import machine_name, namespace
from asyncdist.net.security import handshake
from asyncdist.net.security.handshake import Security

_MOST_GREETING_NBYTES = 1 << 16
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a process says about itself to the other side of a channel.

    ``id`` identifies its port: no other port ever has the same. ``stages`` says whether long messages to it may pass
    through shared memory. ``about`` is plain data of the service.
    """

    id: str
    name: str
    """A text for messages, such as ``"process 4711 on node7"``."""
    host_name: str | None
    identity: dict[str, Any] | None
    """See `asyncdist.net.process_identity`."""
    stages: bool
    about: Any

    @classmethod
    def decode(cls, data: Any) -> Greeting:
        """Return a greeting from plain data. Raises ProtocolError."""
        try:
            greeting = cls(**data)
        except TypeError as cause:
            raise ProtocolError(f"a greeting that is not legible: {cause}") from cause
        if not isinstance(greeting.id, str) or not isinstance(greeting.name, str):
            raise ProtocolError("a greeting without id and name")
        return greeting


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where a port listens; `encode` makes it plain data, for example for a store.

    ``id`` is that of the port, ``name`` a text for messages, and ``host`` the machine, or ASYNCDIST_HOST. The abstract Unix
    address ``unix``, empty without one, is valid for a user id in a ``network`` namespace.
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
    return host_name or machine_name(), os.getuid(), namespace("net")


async def dial(
    address: ChannelAddress, own: ChannelAddress, greeting: Greeting, security: Security
) -> tuple[AnySocket, Greeting]:
    """Connect to a port.

    Raises:
        OSError: Nothing listens there.
        ProtocolError: Another program, or another process of the job, answers there.
        EOFError, AuthenticationError, CertificateError: See `asyncdist.net.security.handshake.dial`.
    """
    if address.is_on(own):
        connection = await handshake.dial(await _connect_unix(address.unix), security)
    else:
        connection = await handshake.dial_tcp(*address.tcp, security)
    with ClosingOnError(connection):
        peer = await _greet(connection, greeting)
        if peer.id != address.id:
            raise ProtocolError(f"{peer.name} answers at the address of {address.name}, which has ended")
        return connection.sock, peer


async def accept(sock: socket.socket, greeting: Greeting, security: Security) -> tuple[AnySocket, Greeting]:
    """Authenticate a process that has connected. Closes the socket, and raises the errors of `dial`, if that fails."""
    connection = await handshake.accept(sock, security)
    with ClosingOnError(connection):
        return connection.sock, await _greet(connection, greeting)


async def _connect_unix(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lifecycle.close_in_children(sock)
    with ClosingOnError(sock):
        sock.setblocking(False)
        async for _ in Backoff(_FIRST_PAUSE, _LONGEST_PAUSE):
            # A full queue of connections.
            with contextlib.suppress(BlockingIOError):
                sock.connect(f"\0{name}")
                break
    return sock


async def _greet(connection: LoopSocket, greeting: Greeting) -> Greeting:
    """Exchange greetings. Each side writes first, because a greeting fits into the socket's buffer."""
    await connection.send_message(asdict(greeting), _MOST_GREETING_NBYTES)
    return Greeting.decode(await connection.receive_message(_MOST_GREETING_NBYTES))
