"""The sockets of the connections: how they are made and closed, and what the kernel knows of them."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
from typing import cast

from asyncdist.base import lifecycle
from asyncdist.kernel.transport.base import Host
from asyncdist.net.host_watch import tune
from asyncdist.net.security.tls import TlsSocket
from asyncdist_transports.byte_stream import Ended, Reader

Connected = socket.socket | TlsSocket

READ, WRITE = select.POLLIN, select.POLLOUT
# Linux 6.15: limits the time between two attempts to send a packet, which otherwise doubles each time.
_TCP_RTO_MAX_MS = 44
_RTO_MAX_MS = 1_000, 120_000
# Seconds within which the kernel notices the death of a host.
_SILENT_HOST = 40.0
_MOST_DISCARDED = 1 << 16
# Of Linux's `struct tcp_info`: the packets that are sent and not acknowledged, the bytes acknowledged so far, and those not
# sent yet.
_TCP_INFO = struct.Struct("=24xI92xQ16xI")


def read_all(sock: Connected, reader: Reader, ready: bool) -> bool:
    """Read until no decrypted bytes are left, which no poll would report."""
    moved = reader.read(ready)
    if isinstance(sock, TlsSocket):
        while sock.unread and not reader.blocked and reader.read():
            moved = True
    return moved


def delivery(sock: Connected) -> tuple[int, int, int]:
    """Return how many sent packets are not acknowledged, how many bytes are, and how many the system has not sent yet.

    Zeros where the system does not say.
    """
    if not hasattr(socket, "TCP_INFO"):
        return 0, 0, 0
    information = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    return _TCP_INFO.unpack(information.ljust(_TCP_INFO.size, b"\0"))


def flushed(sock: TlsSocket) -> bool:
    """Send the bytes that a TLS socket holds; return whether all were sent. Raises Ended."""
    try:
        sock.flush()
    except BlockingIOError:
        return False
    except OSError as cause:
        raise Ended(cause.strerror or str(cause)) from cause
    return True


def close_socket(sock: Connected, host: Host, peer: int | None) -> None:
    """Close a socket; say goodbye to ``peer``, if given, before."""
    if peer is not None:
        with contextlib.suppress(OSError):
            sock.send(host.closing_frames(peer))
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
    host.retire(cast(socket.socket, sock))


def discard_arrived(sock: Connected) -> None:
    """Read what has arrived on a connection that is about to be closed.

    If anything is left to read then, such as a heartbeat, the system discards what it has not sent yet.
    """
    with contextlib.suppress(OSError):
        while len(sock.recv(_MOST_DISCARDED)) == _MOST_DISCARDED:
            pass


def new_socket(address: str, host: Host) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    set_options(sock, host)
    return sock


def set_options(sock: socket.socket, host: Host) -> None:
    """Set the options of every connection, and close it in forked children."""
    lifecycle.close_in_children(sock)
    sock.setblocking(False)
    tune(sock, _SILENT_HOST)
    if host.config.heartbeat and sys.platform == "linux":
        # A network that comes back within the heartbeat limit must carry heartbeats again within it.
        longest = min(max(_RTO_MAX_MS[0], int(host.config.heartbeat * 200)), _RTO_MAX_MS[1])
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, longest)


def select_writable(sock: Connected) -> bool:
    """Return whether a connect has completed, with success or with an error."""
    poll = select.poll()
    poll.register(sock, WRITE)
    return bool(poll.poll(0))
