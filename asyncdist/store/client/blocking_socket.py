"""A socket on which threads send and receive with deadlines. `BlockingConnection` opens one per connection."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from typing import Any

from asyncdist.base.deadline import LONGEST_POLL, Deadline
from asyncdist.base.descriptors import ClosingOnError
from asyncdist.net.connection.outbox import Flushed, Outbox
from asyncdist.net.host_watch import CLIENT_LOOKS, HostWatch, look_interval, tune
from asyncdist.net.security.auth import HandshakeDriver
from asyncdist.net.security.tls import TlsSocket
from asyncdist.store.client.connect import CONNECT_TIMEOUT, connect, hung_up, resolution_error
from asyncdist.store.client.pending import PendingRequest

_READ_NBYTES, _LONG_READ_NBYTES = 64 << 10, 1 << 20


class BlockingSocket:
    """A connected socket with deadlines and a queue of outgoing messages.

    One thread may send while another one receives. Any thread may add to ``outbox``, one at a time.
    """

    def __init__(self, sock: socket.socket, tls: TlsSocket | None) -> None:
        sock.setblocking(False)
        self._sock: socket.socket | TlsSocket = tls or sock
        self._tls = tls
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        self._read_nbytes = _READ_NBYTES
        self.outbox = Outbox(self._sock, in_order=True)
        self._host_watch: HostWatch | None = None
        self._longest_poll: float = LONGEST_POLL
        self._plain_sock = sock

    def watch_host(self, limit: float) -> None:
        """Let `wait` raise ConnectionResetError from now on when the other host is silent for ``limit`` seconds."""
        self._host_watch = HostWatch(self._plain_sock, limit)
        self._longest_poll = look_interval(limit, CLIENT_LOOKS) * 1000

    def secure(self, deadline: Deadline) -> None:
        """Begin TLS. Raises TimeoutError, CertificateError and ConnectionError."""
        while self._tls is not None and not self._tls.secured:
            try:
                self._tls.secure()
            except BlockingIOError:
                self.wait(deadline, self._writable if self._tls.wants_write else self._readable)

    @property
    def secured(self) -> bool:
        return self._tls is not None and self._tls.secured

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send the few bytes of a handshake. Raises ConnectionError and TimeoutError."""
        self._sock.sendall(data)
        self.drain(deadline)

    def drain(self, deadline: Deadline, pending: PendingRequest[Any] | None = None) -> None:
        """Send the queue, short messages first, then one part, and so on. Return early when ``pending`` is ready.

        Raises ConnectionError, and TimeoutError: the next call then continues at the same byte.
        """
        flush = self.outbox.flush
        while not (pending is not None and pending.ready):
            left = flush()
            if left is Flushed.ALL:
                if self.outbox.error is not None:
                    raise ConnectionError(*self.outbox.error.args)
                return
            if left is Flushed.BLOCKED:
                self.wait(deadline, self._writable)
            if deadline.expired():  # a socket that takes every part at once never waits
                raise TimeoutError

    def wait(self, deadline: Deadline, poll: select.poll | None = None) -> None:
        """Return when bytes may have arrived, or when ``poll`` reports an event.

        Raises TimeoutError, and ConnectionResetError if the other host has vanished.
        """
        poll = poll or self._readable
        left = deadline.remaining()
        while not poll.poll(int(min(left * 1000 + 1, self._longest_poll))):
            if self._host_watch is not None and self._host_watch.has_vanished():
                raise ConnectionResetError(self._host_watch.why())
            left = deadline.remaining()
            if not left:
                raise TimeoutError

    def take(self, most: int | None = None) -> bytes:
        """Return the bytes that have arrived, at most ``most``, possibly b"". Raises ConnectionError."""
        try:
            data = self._sock.recv(most or self._read_nbytes)
        except BlockingIOError:  # poll() may report bytes that the kernel then discards
            return b""
        if not data:
            raise ConnectionResetError("it hung up")
        self._read_nbytes = _LONG_READ_NBYTES if len(data) == self._read_nbytes else _READ_NBYTES
        return data

    def receive(self, deadline: Deadline, most: int | None = None) -> bytes:
        """Wait for bytes and return at most ``most`` of them. Raises TimeoutError or ConnectionError."""
        while True:
            # The rest of a TLS record, of which no poll knows.
            if self._tls is None or not self._tls.unread:
                self.wait(deadline)
            data = self.take(most)
            if data:
                return data

    def wake(self) -> None:
        """Shut down, so that the threads that wait on this socket raise ConnectionError."""
        with contextlib.suppress(OSError):  # the connection has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def open_blocking_socket(
    host: str, port: int, tls: ssl.SSLContext | None, deadline: Deadline, heartbeat: float
) -> BlockingSocket:
    """Connect, without the TLS handshake (`secure`). Over a Unix socket there is no TLS.

    Raises OSError if another attempt may succeed.
    """
    try:
        sock = connect(host, port, max(deadline.remaining(), 0.001), CONNECT_TIMEOUT)
    except UnicodeError as error:
        raise resolution_error(error) from None
    with ClosingOnError(sock):
        tune(sock, heartbeat)
        secured = (
            None if tls is None or sock.family == socket.AF_UNIX else TlsSocket(sock, tls, serves=False, name=host)
        )
        return BlockingSocket(sock, secured)


def shake_hands(sock: BlockingSocket, token: str | None, deadline: Deadline) -> None:
    """Authenticate both sides with the token.

    Raises the errors of `dial`, TimeoutError, OSError, and CertificateError if the server sends only a TLS alert.
    """
    silent = True

    def receive(nbytes: int) -> bytes:
        nonlocal silent
        data = sock.receive(deadline, nbytes)
        silent = False
        return data

    try:
        HandshakeDriver.dialling(token, "store", lambda data: sock.send(data, deadline)).pump(receive)
    except (ConnectionError, ssl.SSLError) as error:
        if not silent:
            raise
        raise hung_up(error, secured=sock.secured) from error
