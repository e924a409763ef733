"""One TCP connection of a rank: opened or accepted, authenticated, used, closed. `transport` owns the connections."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import ssl
import struct
from collections import deque
from time import monotonic
from typing import Protocol, cast

from asyncdist.errors import UNREACHED, ProtocolError
from asyncdist.kernel.transport.base import Host, Outgoing
from asyncdist.kernel.transport.wire_format import HEADER_NBYTES
from asyncdist.net.security.auth import HandshakeDriver
from asyncdist.net.security.tls import TlsSocket
from asyncdist_transports.byte_stream import Ended, Reader, Writer
from asyncdist_transports.tcp.sockets import (
    READ,
    WRITE,
    Connected,
    close_socket,
    delivery,
    discard_arrived,
    flushed,
    new_socket,
    read_all,
    select_writable,
)
from asyncdist_transports.tcp.transfer_threads import Lender, TransferThreads


class Unreached(Ended):
    """No host has answered the attempt to connect, which may succeed later."""


HELLO = struct.Struct("<IHxx")  # rank, lane
# Seconds after which a handshake counts as stalled: perhaps no thread drives the peer's transport.
_STALLED_AFTER = 1.0
# Seconds that the peer's host has to accept a connection: one lost packet takes that long.
_ACCEPTED_WITHIN = 1.0
# The same as a share of the heartbeat's timeout, for a host of which another rank is silent.
_ACCEPTED_WITHIN_SHARE = 0.2
# What a connect fails with while a link is down for a moment: it may succeed later.
_PASSING = {
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.EADDRNOTAVAIL
}  # fmt: skip
# The part of the heartbeat limit, almost the time between two heartbeats, in which a host acknowledges one.
_LONGEST_ANSWER = 0.09
# The bytes of a large body for which a driver that sleeps wakes up.
_WAKE_NBYTES = 128 << 10


def purpose(host: Host) -> str:
    """Return the purpose that a connection's proof is bound to, so that it is not valid in another world."""
    return f"peer of world {host.world_id}"


class ConnectionOwner(Protocol):
    """The transport that has a connection."""

    host: Host
    threads: TransferThreads

    def go_on(self, connection: Inbound | Outbound) -> None:
        """Go on with a connection after a thread has moved a message."""

    def end_authentication(self, connection: Inbound) -> None:
        """Note that the peer of a connection has proven who it is."""


class Outbound:
    """A connection that this rank opens to send to a peer."""

    def __init__(
        self, peer: int, lane: int, where: tuple[str, int], owner: ConnectionOwner, tls: ssl.SSLContext | None = None
    ) -> None:
        self.peer = peer
        self._lender = Lender(owner.threads, functools.partial(owner.go_on, self))
        self._tls = tls
        self._lane = lane
        self._where = where
        self._host = owner.host
        # The messages that have not been sent.
        self.queue: deque[Outgoing] = deque()
        self.closed = False
        self.tried_since = monotonic()
        """When the attempts to connect have begun."""
        self._sock = self._new_socket()
        self._begin()

    def _new_socket(self) -> Connected:
        sock = new_socket(self._where[0], self._host)
        if self._tls is None:
            return sock
        return TlsSocket(sock, self._tls, serves=False, name=self._where[0] if self._tls.check_hostname else None)

    def reconnect(self) -> None:
        """Connect again, after the peer closed the connection before any message was sent."""
        self.tried_since = monotonic()
        self.try_again()

    def rest(self) -> None:
        """Do nothing until `try_again`, after `Unreached`."""
        self._rests = True

    def try_again(self) -> None:
        """Connect anew."""
        self._host.retire(cast(socket.socket, self._sock))
        self._sock = self._new_socket()
        self._begin()

    def _begin(self) -> None:
        self.writer = Writer(self._sock, self.queue)
        self._reader = Reader(self._sock, self.peer, self._host, None)
        self._proving: HandshakeDriver | None = None
        self.established = False
        self._securing = False
        self._started_at = monotonic()
        self._rests = False
        code = self._sock.connect_ex(self._where)
        self._failed = 0 if code == errno.EINPROGRESS else code

    @property
    def handshake_stalled(self) -> bool:
        """Whether the handshake has taken so long that a closed connection does not mean the loss of the peer.

        The peer closes a connection that does not authenticate in time, also when no thread drives the peer.
        """
        patience = min(self._host.config.handshake_timeout, _STALLED_AFTER)
        return not self.established and self._proving is not None and monotonic() - self._started_at >= patience

    def fileno(self) -> int:
        return self._sock.fileno()

    def waits(self) -> int:
        if self.established:
            sends = (self.queue and self._lender.message is None) or self.holds_bytes
            return READ | WRITE if sends else READ
        if self._rests:
            return 0
        if isinstance(self._sock, TlsSocket) and self._securing:
            return WRITE if self._sock.wants_write else READ
        return READ if self._proving is not None else WRITE

    @property
    def unsent(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self.queue) or self.holds_bytes

    @property
    def holds_bytes(self) -> bool:
        """Whether the TLS socket holds bytes that it has accepted and not sent."""
        return isinstance(self._sock, TlsSocket) and self._sock.unsent

    def is_delivered(self) -> bool:
        """Return whether neither this process nor its system holds bytes of messages that are complete."""
        with contextlib.suppress(OSError):  # another thread may have closed it
            return not (self.established and (self.holds_bytes or delivery(self._sock)[2]))
        return True

    def pump(self, ready: bool) -> bool:
        """Connect, authenticate, send, and read control messages if the socket is ready. Raises Ended and
        AsyncdistError."""
        if self._rests or not (ready or self.unsent):
            return False
        if not self.established:
            return self._establish()
        try:
            if isinstance(self._sock, TlsSocket) and not flushed(self._sock):
                return self._reader.read() if ready else False
            moved = self._flush() if self.queue else False
        except Ended:
            # The peer may have sent the reason before.
            self._reader.read()
            raise
        return (self._reader.read() or moved) if ready else moved

    def send(self, message: Outgoing) -> bool:
        """Send a large message after those in the queue; return whether all of it was sent."""
        if self.established and not self.queue:
            self.queue.append(message)
            if self._lend():
                return False
            self.queue.pop()
        return self.writer.send(message)

    def _flush(self) -> bool:
        return self._lender.message is None and (self._lend() or self.writer.flush())

    def _lend(self) -> bool:
        return isinstance(self._sock, socket.socket) and self._lender.lends_send(self.writer, self._sock)

    @property
    def is_watched(self) -> bool:
        """Whether silence means something: the peer's host has accepted the connection, or had the time to do so."""
        if self.established or monotonic() - self.tried_since >= _ACCEPTED_WITHIN:
            return True
        return not self._failed and select_writable(self._sock)

    def is_unanswered(self) -> bool:
        """Return whether the peer's host has not accepted the connection, although it had the time to do so."""
        within = min(_ACCEPTED_WITHIN, _ACCEPTED_WITHIN_SHARE * self._host.config.heartbeat)
        if self.established or monotonic() - self.tried_since < within:
            return False
        return bool(self._failed) or self._rests or not select_writable(self._sock)

    def was_heard(self) -> bool:
        """Return whether anything has arrived since the last call. The end of the handshake counts."""
        if not self.established:
            return False
        heard, self._reader.heard = self._reader.heard, False
        return heard

    def beat(self) -> None:
        """Send a heartbeat."""
        self.writer.beat(self.peer)

    @property
    def connectivity_problem(self) -> str:
        """Describe a connection whose packets no host has answered, not even with a refusal; empty otherwise.

        It is also empty if the peer has not accepted the connection yet, because the peer's kernel answers.
        """
        if self.established or self.closed or (not self._failed and select_writable(self._sock)):
            return ""
        tried = f"tried for {monotonic() - self.tried_since:.0f} s"
        if self._failed:
            tried += f": {os.strerror(self._failed)}"
        return f"rank {self._host.rank} has no connection to rank {self.peer} at {self._address} yet, {tried}"

    @property
    def _address(self) -> str:
        host, port = self._where
        return f"{f'[{host}]' if ':' in host else host}:{port}"

    def _unreachable(self, code: int) -> Ended:
        self._failed = code
        kind = Unreached if code in _PASSING else Ended
        return kind(f"cannot connect to it at {self._address}: {os.strerror(code)}; {UNREACHED}")

    def _establish(self) -> bool:
        if self._failed:
            raise self._unreachable(self._failed)
        try:
            if self._proving is None:
                if not self._securing and not select_writable(self._sock):
                    return False
                code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise self._unreachable(code)
                if isinstance(self._sock, TlsSocket) and not self._sock.secured:
                    self._securing = True
                    self._sock.secure()
                    self._securing = False
                token = self._host.config.token
                # A few dozen bytes on an empty socket buffer do not block.
                self._proving = HandshakeDriver.dialling(token, purpose(self._host), self._sock.sendall)
            self._proving.pump(self._sock.recv)
            if self.handshake_stalled:
                # Raises Ended if the peer has closed the connection.
                self._reader.read()
            self._sock.sendall(HELLO.pack(self._host.rank, self._lane))
        except BlockingIOError:
            return False
        except EOFError as cause:
            raise Ended("connection closed during the handshake") from cause
        except OSError as cause:
            raise Ended(cause.strerror or str(cause)) from cause
        self.established = self.writer.open = True
        if isinstance(self._sock, socket.socket):
            # A heartbeat alone on the way back wakes no driver: `TcpTransport.beat` reads it.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, HEADER_NBYTES + 1)
        self.writer.flush()
        return True

    def close(self, *, say_goodbye: bool) -> None:
        if not self.closed:
            self.closed = True
            # The peer may have left as soon as it had the last bytes, before the driver knew that they were sent.
            if self._lender.stop():
                self.writer.complete_sent()
            whole = self.established and not any(message.sent for message in self.queue)
            if self.established:
                discard_arrived(self._sock)
            close_socket(self._sock, self._host, self.peer if say_goodbye and whole else None)


class Inbound:
    """A connection that another process opened to send to this rank. Its peer is unknown until it has authenticated."""

    def __init__(self, sock: socket.socket, owner: ConnectionOwner, tls: ssl.SSLContext | None = None) -> None:
        host = self._host = owner.host
        self._sock: Connected = sock if tls is None else TlsSocket(sock, tls, serves=True)
        self._owner = owner
        self._lender = Lender(owner.threads, functools.partial(owner.go_on, self))
        self._securing = tls is not None
        self.peer: int | None = None
        # Meaningful once `peer` is known.
        self.established = True
        self._proving = HandshakeDriver.accepting(host.config.token, purpose(host), self._sock.sendall)
        self._hello = bytearray()
        self._reader: Reader | None = None
        # Heartbeats travel on the way back, where no message stays on the wire before them.
        self._way_back = Writer(self._sock, deque())
        self._wake_nbytes = 1
        self._acknowledged, self._acknowledged_at = -1, 0.0
        self.closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def waits(self) -> int:
        if isinstance(self._sock, TlsSocket) and self._securing:
            return WRITE if self._sock.wants_write else READ
        return 0 if self._lender.message is not None or (self._reader is not None and self._reader.blocked) else READ

    @property
    def backlogged(self) -> bool:
        """Whether bytes have left the socket and wait, so that no readiness event reports them."""
        reader = self._reader
        return reader is not None and (reader.backlog is not None or reader.taken > 0)

    def pump(self, ready: bool) -> bool:
        """Authenticate the peer, then read; raises Ended and AsyncdistError."""
        reader = self._reader
        if self._lender.message is not None:
            return False
        if reader is not None:
            if isinstance(self._sock, TlsSocket):
                return read_all(self._sock, reader, ready)
            moved = reader.read(ready)
            is_large = self._wake_nbytes > 1 or reader.body_left >= _WAKE_NBYTES
            if moved and is_large and self._lender.message is None:
                self._wake_at(min(reader.body_left or 1, _WAKE_NBYTES))
            return moved
        if not ready:
            return False
        try:
            if isinstance(self._sock, TlsSocket) and self._securing:
                self._sock.secure()
                self._securing = False
            self._proving.pump(self._sock.recv)
            while len(self._hello) < HELLO.size:
                chunk = self._sock.recv(HELLO.size - len(self._hello))
                if not chunk:
                    raise EOFError
                self._hello += chunk
        except BlockingIOError:
            return False
        except EOFError as cause:
            raise Ended("connection closed during the handshake") from cause
        except OSError as cause:
            raise Ended(cause.strerror or str(cause)) from cause
        rank, lane = HELLO.unpack(self._hello)
        if not 0 <= rank < self._host.world_size or rank == self._host.rank:
            raise ProtocolError(f"a connection that claims to come from rank {rank}")
        if self._host.gone(rank) is not None:
            raise Ended(f"it comes from rank {rank}, which was lost before")
        self.peer = rank
        self._owner.end_authentication(self)
        inbox = self._host.inbox(rank)
        plain = isinstance(self._sock, socket.socket)
        self._reader = Reader(self._sock, rank, self._host, inbox, self._lend, short_reads_empty=plain)
        # A TLS socket holds decrypted bytes, which no readiness event reports.
        if lane == 0 and plain:
            self._reader.arrivals = ((self._sock.fileno(), READ),)
            inbox.source = self._reader
        self._way_back.open = True
        read_all(self._sock, self._reader, True)
        return True

    def _lend(self) -> bool:
        sock, reader = self._sock, self._reader
        if not (isinstance(sock, socket.socket) and reader and self._lender.lends_receive(reader, sock)):
            return False
        self._wake_at(1)
        return True

    def _wake_at(self, nbytes: int) -> None:
        """Let the socket be ready to read when this many bytes have arrived.

        A driver that sleeps while a large body arrives then wakes up for fewer, larger reads.
        """
        if self._wake_nbytes != nbytes and isinstance(self._sock, socket.socket) and not self.closed:
            self._wake_nbytes = nbytes
            # Some systems refuse it once the peer has closed the connection.
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    @property
    def is_proven(self) -> bool:
        """Whether the other side has proven the token, perhaps without having said its rank yet."""
        return self._proving.done

    @property
    def is_watched(self) -> bool:
        """Whether the peer has authenticated."""
        return self._reader is not None

    @property
    def blocked(self) -> bool:
        """Whether a message stays on the wire because no receive is posted for it."""
        return self._reader is not None and self._reader.blocked

    def was_heard(self) -> bool:
        """Return whether anything has arrived since the last call."""
        assert self._reader is not None
        heard, self._reader.heard = self._reader.heard, False
        return heard

    def answers(self) -> bool:
        """Return whether the peer's host has acknowledged anything in the time of a heartbeat, if anything waits for it.

        It is asked of the way back only. If a process does not read its messages, its host may drop further ones.
        """
        waiting, acknowledged, _ = delivery(self._sock)
        now = monotonic()
        if not waiting or acknowledged != self._acknowledged:
            self._acknowledged, self._acknowledged_at = acknowledged, now
        return now - self._acknowledged_at < _LONGEST_ANSWER * self._host.config.heartbeat

    def beat(self) -> None:
        """Send a heartbeat on the way back."""
        # The previous one is still there if the peer does not read.
        self._way_back.flush()
        self._way_back.beat(self.peer or 0)

    def close(self, *, say_goodbye: bool) -> None:
        if not self.closed:
            self.closed = True
            self._lender.stop()
            if self.peer is not None and (inbox := self._host.inbox(self.peer)).source is self._reader:
                inbox.source = None
            whole = self._way_back.open and not self._way_back.queue
            close_socket(self._sock, self._host, self.peer if say_goodbye and whole else None)
