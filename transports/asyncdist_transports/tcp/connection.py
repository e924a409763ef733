"""A connection from its first packet to its last: opened or accepted, proven, used, ended."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from time import monotonic

from asyncdist.errors import AsyncdistError, ProtocolError
from asyncdist.handshake import Handshake, accept, dial
from asyncdist.transport import Host, Outgoing
from asyncdist_transports.stream import Ended, Reader, Writer

READ, WRITE = select.POLLIN, select.POLLOUT
HELLO = struct.Struct("<IHxx")  # rank, lane
_KEPT_WAITING = 1.0  # seconds


def purpose(host: Host) -> str:
    """Return what a connection of this world proves itself for; one world's proof is worth nothing in another."""
    return f"peer of world {host.world_id}"


class Proving:
    """Runs a handshake over a non-blocking socket, as far as bytes have come."""

    def __init__(self, sock: socket.socket, steps: Handshake) -> None:
        self._sock = sock
        self._steps = steps
        self._got = bytearray()
        self._need = 0
        self._next(None)

    def _next(self, answer: bytes | None) -> None:
        step = self._steps.send(answer) if answer is not None else next(self._steps)
        while isinstance(step, bytes):
            self._sock.sendall(step)  # a few dozen bytes on an empty socket buffer
            step = next(self._steps)
        self._need = step

    def go_on(self) -> bool:
        """Take what has come; True when the handshake is over. Raises what the handshake raises, and Ended."""
        while True:
            chunk = self._sock.recv(self._need - len(self._got))
            if not chunk:
                raise Ended("connection closed during the handshake")
            self._got += chunk
            if len(self._got) == self._need:
                answer = bytes(self._got)
                self._got.clear()
                try:
                    self._next(answer)
                except StopIteration:
                    return True


class Outbound:
    """A connection that we open to write to a peer."""

    def __init__(self, peer: int, lane: int, where: tuple[str, int], host: Host) -> None:
        self.peer = peer
        self._lane = lane
        self._where = where
        self._host = host
        self.queue: deque[Outgoing] = deque()  # messages that wait to be sent
        self.closed = False
        self._sock = _new_socket(where[0])
        self._begin()

    def begin_again(self) -> None:
        """Connect once more: the peer gave us up before we had said anything."""
        self._host.retire(self._sock)
        self._sock = _new_socket(self._where[0])
        self._begin()

    def _begin(self) -> None:
        self.writer = Writer(self._sock, self.queue)
        self._reader = Reader(self._sock, self.peer, self._host, None)
        self._proving: Proving | None = None
        self.established = False
        self._since = monotonic()
        code = self._sock.connect_ex(self._where)
        self._failed = "" if code in (0, errno.EINPROGRESS) else os.strerror(code)

    @property
    def kept_waiting(self) -> bool:
        """Whether the handshake took so long, as it does where nobody drives, that its end means nothing."""
        return not self.established and self._proving is not None and monotonic() - self._since > _KEPT_WAITING

    def fileno(self) -> int:
        return self._sock.fileno()

    def waits(self) -> int:
        if self.established:
            return READ | WRITE if self.queue else READ
        return READ if self._proving is not None else WRITE

    @property
    def eager(self) -> bool:
        return bool(self.queue)

    def pump(self, ready: bool) -> bool:
        """Connect, prove, flush, and if the socket is ready listen for notices. Raises Ended and AsyncdistError."""
        if not self.established:
            return self._establish()
        try:
            moved = self.writer.flush() if self.queue else False
        except Ended:
            self._reader.read()  # the peer may have said why it went
            raise
        return (self._reader.read() or moved) if ready else moved

    def _establish(self) -> bool:
        if self._failed:
            raise Ended(self._failed)
        try:
            if self._proving is None:
                if not select_writable(self._sock):
                    return False
                code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise Ended(os.strerror(code))
                steps = dial(self._host.config.token, purpose(self._host), secrets.token_bytes(32))
                self._proving = Proving(self._sock, steps)
            if not self._proving.go_on():
                return False
            self._sock.sendall(HELLO.pack(self._host.rank, self._lane))
        except BlockingIOError:
            return False
        except OSError as cause:
            raise Ended(cause.strerror or str(cause)) from cause
        self.established = self.writer.open = True
        self.writer.flush()
        return True

    def close(self, *, say_goodbye: bool) -> None:
        if not self.closed:
            self.closed = True
            whole = self.established and not any(message.sent for message in self.queue)
            _end(self._sock, self._host, say_goodbye and whole)


class Inbound:
    """A connection that somebody opened to write to us: nobody in particular until it has proven itself."""

    def __init__(self, sock: socket.socket, host: Host, proven: Callable[[Inbound], None]) -> None:
        self._sock = sock
        self._host = host
        self._proven = proven
        self.peer: int | None = None
        self.established = True  # as soon as the peer is known
        self._proving: Proving | None = Proving(sock, accept(host.config.token, purpose(host), secrets.token_bytes(32)))
        self._hello = bytearray()
        self._reader: Reader | None = None
        self.closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def waits(self) -> int:
        return 0 if self._reader is not None and self._reader.blocked else READ

    @property
    def eager(self) -> bool:
        reader = self._reader
        return reader is not None and reader.eager

    def pump(self, ready: bool) -> bool:
        """Prove, then read; raises Ended and AsyncdistError."""
        if self._reader is not None:
            return self._reader.read()
        try:
            if self._proving is not None and self._proving.go_on():
                self._proving = None
            while len(self._hello) < HELLO.size:
                chunk = self._sock.recv(HELLO.size - len(self._hello))
                if not chunk:
                    raise Ended("connection closed during the handshake")
                self._hello += chunk
        except BlockingIOError:
            return False
        except OSError as cause:
            raise Ended(cause.strerror or str(cause)) from cause
        rank, _lane = HELLO.unpack(self._hello)
        if not 0 <= rank < self._host.world_size or rank == self._host.rank:
            raise ProtocolError(f"a connection that claims to come from rank {rank}")
        if self._host.gone(rank) is not None:
            raise Ended(f"it comes from rank {rank}, which was lost before")
        self.peer = rank
        self._proven(self)
        self._reader = Reader(self._sock, rank, self._host, self._host.inbox(rank))
        self._reader.read()
        return True

    def close(self, *, say_goodbye: bool) -> None:
        if not self.closed:
            self.closed = True
            _end(self._sock, self._host, say_goodbye and self._reader is not None)


def _end(sock: socket.socket, host: Host, say_goodbye: bool) -> None:
    if say_goodbye:
        with contextlib.suppress(OSError):
            sock.send(host.last_words)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
    host.retire(sock)


def _new_socket(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    prepare(sock)
    return sock


def prepare(sock: socket.socket) -> None:
    """Set the options that every connection has."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):  # a host that vanished without a word is noticed within 40 s
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def select_writable(sock: socket.socket) -> bool:
    """Return whether a connect has come to an end, well or badly."""
    poll = select.poll()
    poll.register(sock, WRITE)
    return bool(poll.poll(0))


__all__ = ["AsyncdistError", "Ended", "Inbound", "Outbound", "prepare"]
