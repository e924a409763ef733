"""How ranks start each timed call together, without help from anything that is being measured."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from time import monotonic_ns

_INSTANT = struct.Struct("!q")
_AHEAD_NS = 40_000


class StartPacer:
    """A barrier after which all ranks go on at the same instant.

    Rank 0 hears that everyone is there and names an instant of the clock that processes of one host share; everyone
    spins until then. So no rank's time contains another's waking up, and a contender begins with the processors awake.
    ``sockets`` are non-blocking and connected, by rank, None for ourselves.
    """

    def __init__(self, rank: int, sockets: Sequence[socket.socket | None]) -> None:
        self._others = [sock for sock in sockets if sock is not None]
        self._leader = None if rank == 0 else sockets[0]
        cores = os.cpu_count() or 1
        self._ahead = _AHEAD_NS * -(-len(sockets) // cores)
        self._crowded = len(sockets) > cores

    def __call__(self) -> None:
        """Wait for all ranks; ConnectionError if one has gone."""
        if self._leader is None:
            for sock in self._others:
                _receive(sock, 1)
            instant = monotonic_ns() + self._ahead
            for sock in self._others:
                sock.send(_INSTANT.pack(instant))
        else:
            self._leader.send(b"!")
            (instant,) = _INSTANT.unpack(_receive(self._leader, _INSTANT.size))
        while monotonic_ns() < instant:
            if self._crowded:  # else those who do not get a core begin when our slice of it is over
                os.sched_yield()

    def alone(self, work: Callable[[], None]) -> None:
        """Do the work on rank 0 while all other ranks sleep; ConnectionError if one has gone."""
        if self._leader is None:
            for sock in self._others:
                _receive(sock, 1)
            work()
            for sock in self._others:
                sock.send(b"!")
        else:
            self._leader.send(b"!")
            select.select([self._leader], [], [])
            _receive(self._leader, 1)


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    """Spin until ``nbytes`` have come; they are so few that they come at once."""
    while True:
        try:
            got = sock.recv(nbytes)
        except BlockingIOError:
            os.sched_yield()
            continue
        if len(got) != nbytes:
            raise ConnectionError("another rank of the benchmark has ended")
        return got
