"""A TCP socket between every two ranks, for the pacer and for the contender "raw". Used by `rank`."""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Sequence

_HELLO = struct.Struct("!16sI")  # the token, and the rank that connects


def listen_at(address: str) -> socket.socket:
    """Return a socket that listens at an address: loopback, or that of the rank's host in a test bed."""
    return socket.create_server((address, 0), backlog=64)


def connect_ranks(
    rank: int, server: socket.socket, addresses: Sequence[tuple[str, int]], token: bytes, timeout: float = 30.0
) -> list[socket.socket | None]:
    """Connect to all lower ranks and accept all higher ones; return the sockets by rank, None for this rank.

    The sockets are non-blocking, with TCP_NODELAY.

    Args:
        rank: This rank.
        server: This rank's listening socket.
        addresses: The addresses of all ranks' listening sockets.
        token: 16 bytes that every rank sends first. Other connections are closed.
        timeout: Seconds to wait for each connection.

    Raises:
        TimeoutError: A rank does not connect.
    """
    table: list[socket.socket | None] = [None] * len(addresses)
    for peer in range(rank):
        connected = socket.create_connection(addresses[peer], timeout)
        connected.sendall(_HELLO.pack(token, rank))
        table[peer] = connected
    server.settimeout(timeout)
    while any(sock is None for sock in table[rank + 1 :]):
        accepted, _ = server.accept()
        accepted.settimeout(timeout)
        hello = accepted.recv(_HELLO.size, socket.MSG_WAITALL)
        received, peer = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0)
        if hmac.compare_digest(received, token) and rank < peer < len(addresses) and table[peer] is None:
            table[peer] = accepted
        else:
            accepted.close()
    for sock in table:
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
    return table
