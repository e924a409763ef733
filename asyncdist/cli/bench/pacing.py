"""Let all ranks start a timed call at the same instant, without using the contenders. Used by `rank` and the contenders.

A TCP socket connects every two ranks. The contender "raw" uses the sockets too.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
from collections.abc import Sequence
from time import monotonic_ns

from asyncdist.base.callables import Callback

_HELLO = struct.Struct("!16sI")  # the token, and the rank that connects
_INSTANT = struct.Struct("!q")
_AHEAD_NS = 40_000  # from rank 0's message to the start, for each rank of a core


def connect_ranks(
    rank: int, server: socket.socket, addresses: Sequence[tuple[str, int]], token: bytes, timeout: float = 30.0
) -> list[socket.socket | None]:
    """Connect to all lower ranks and accept all higher ones; return the sockets by rank, None for this rank.

    The sockets are non-blocking, with TCP_NODELAY. ``addresses`` are those of the ranks' listening sockets. Every rank
    sends ``token``, 16 bytes, first; other connections are closed. Raises TimeoutError if a rank does not connect.
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


class StartPacer:
    """A barrier after which all ranks continue at the same instant.

    When all ranks have arrived, rank 0 sends them an instant of the host's monotonic clock, and all ranks spin until then.
    So a rank's time does not include the wake-up of another rank, and no core sleeps when a call begins.

    With ``sleeps`` ranks sleep while they wait for each other, and start when they are woken: a rank that spins beside a
    process that computes would have used up its share of the core when the call begins.
    """

    def __init__(self, rank: int, sockets: Sequence[socket.socket | None], *, sleeps: bool = False) -> None:
        self._receive = _wait_and_receive if sleeps else _receive
        self._others = [sock for sock in sockets if sock is not None]
        self._leader = None if rank == 0 else sockets[0]
        cores = os.cpu_count() or 1
        self._ahead = 0 if sleeps else _AHEAD_NS * -(-len(sockets) // cores)
        self._oversubscribed = len(sockets) > cores

    def __call__(self) -> None:
        """Wait for all ranks; raise ConnectionError if one has ended."""
        if self._leader is None:
            for sock in self._others:
                self._receive(sock, 1)
            instant = monotonic_ns() + self._ahead
            for sock in self._others:
                sock.send(_INSTANT.pack(instant))
        else:
            self._leader.send(b"!")
            (instant,) = _INSTANT.unpack(self._receive(self._leader, _INSTANT.size))
        while monotonic_ns() < instant:
            # Otherwise a rank without a core begins only when this rank's time slice ends.
            if self._oversubscribed:
                os.sched_yield()

    def alone(self, work: Callback) -> None:
        """Do the work on rank 0 while all other ranks sleep; raise ConnectionError if one has ended."""
        if self._leader is None:
            for sock in self._others:
                self._receive(sock, 1)
            work()
            for sock in self._others:
                sock.send(b"!")
        else:
            self._leader.send(b"!")
            _wait_and_receive(self._leader, 1)


def _wait_and_receive(sock: socket.socket, nbytes: int) -> bytes:
    """Sleep until data has arrived, and receive ``nbytes``."""
    select.select([sock], [], [])
    return _receive(sock, nbytes)


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    """Spin until ``nbytes`` have arrived. They are few, and arrive together."""
    while True:
        try:
            data = sock.recv(nbytes)
        except BlockingIOError:
            os.sched_yield()
            continue
        if len(data) != nbytes:
            raise ConnectionError("another rank of the benchmark has ended")
        return data
