"""A loopback TCP socket between every two ranks, for the pacing and for the contender "raw". Used by `rank`."""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Sequence

_HELLO = struct.Struct("!16sI")  # the token, the rank that connects

Port = int


def listen_on_loopback() -> socket.socket:
    """Return a socket that listens on loopback only."""
    return socket.create_server(("127.0.0.1", 0), backlog=64)


def connect_ranks(
    rank: int, server: socket.socket, ports: Sequence[Port], token: bytes, timeout: float = 30.0
) -> list[socket.socket | None]:
    """Connect to all lower ranks and accept all higher ones; return the sockets by rank, None for this rank.

    ``ports`` are those of all ranks' servers. A connection without the 16 bytes of ``token`` is closed. The sockets are
    non-blocking, with TCP_NODELAY. Raises TimeoutError if a rank does not connect.
    """
    table: list[socket.socket | None] = [None] * len(ports)
    for peer in range(rank):
        connected = socket.create_connection(("127.0.0.1", ports[peer]), timeout)
        connected.sendall(_HELLO.pack(token, rank))
        table[peer] = connected
    server.settimeout(timeout)
    while any(sock is None for sock in table[rank + 1 :]):
        accepted, _ = server.accept()
        accepted.settimeout(timeout)
        hello = accepted.recv(_HELLO.size, socket.MSG_WAITALL)
        shown, peer = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0)
        if hmac.compare_digest(shown, token) and rank < peer < len(ports) and table[peer] is None:
            table[peer] = accepted
        else:
            accepted.close()
    for sock in table:
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
    return table
