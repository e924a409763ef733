"""A loopback TCP socket between every two ranks: they pace the run, and plain sockets compete over them.

Used by `rank`.
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Sequence

_HELLO = struct.Struct("!16sI")  # the token, who dials

Port = int


def listen_on_loopback() -> socket.socket:
    """Return a socket that listens where only this host can dial."""
    return socket.create_server(("127.0.0.1", 0), backlog=64)


def connect_ranks(
    rank: int, server: socket.socket, ports: Sequence[Port], token: bytes, timeout: float = 30.0
) -> list[socket.socket | None]:
    """Dial all lower ranks, accept all higher ones; return the sockets by rank, None for ourselves.

    ``ports`` are those of all ranks' servers. Who does not know the 16 bytes of ``token`` is turned away. The sockets
    do not block and do not delay. Raises TimeoutError if a rank does not come.
    """
    table: list[socket.socket | None] = [None] * len(ports)
    for peer in range(rank):
        dialled = socket.create_connection(("127.0.0.1", ports[peer]), timeout)
        dialled.sendall(_HELLO.pack(token, rank))
        table[peer] = dialled
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
