"""Ask a port whether it takes clients of torch's TCPStore: what torch says where it does not helps nobody."""

from __future__ import annotations

import socket

from asyncdist.store.protocol.c10d import MAGIC, U32, Code

_PING = bytes([Code.VALIDATE]) + U32.pack(MAGIC) + bytes([Code.PING]) + U32.pack(MAGIC)


def accepts_c10d_clients(host: str, port: int, timeout: float) -> bool:
    """Return whether what serves there answers a client of torch's TCPStore from here within ``timeout`` seconds.

    A store of ours that takes no such client from here (`c10d_policy`) hangs up instead.
    """
    try:
        with socket.create_connection((host, port), timeout=timeout) as sock:
            sock.sendall(_PING)
            return bool(sock.recv(U32.size))
    except OSError:
        return False
