"""A probe that tells whether a port serves clients of torch's TCPStore. Torch's own error message does not name the cause.

`rendezvous.sources` and the handler of torchrun's rendezvous call it.
"""

from __future__ import annotations

from asyncdist.store.client.connect import connect
from asyncdist.store.protocol.c10d import MAGIC, U32, Code

_PING = bytes([Code.VALIDATE]) + U32.pack(MAGIC) + bytes([Code.PING]) + U32.pack(MAGIC)


def accepts_c10d_clients(host: str, port: int, timeout: float) -> bool:
    """Return whether the server at a port answers a client of torch's TCPStore within ``timeout`` seconds.

    An asyncdist store that refuses such clients from this host (`c10d_policy`) closes the connection instead.
    """
    try:
        with connect(host, port, timeout) as sock:
            sock.sendall(_PING)
            return bool(sock.recv(U32.size))
    except OSError:
        return False
