"""A socket on which threads send and receive with deadlines. `BlockingConnection` opens one per connection."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any

from asyncdist.base.deadline import LONGEST_POLL, Deadline
from asyncdist.net.host_watch import CLIENT_LOOKS, HostWatch, look_interval, tune
from asyncdist.net.security.auth import HandshakeDriver
from asyncdist.net.security.tls import TlsSocket
from asyncdist.store.client.connect import connect, hung_up, resolution_error
from asyncdist.store.client.pending import PendingRequest
from asyncdist.store.protocol.chunk_sender import ChunkSender
from asyncdist.store.protocol.chunking import ChunkedMessage
from asyncdist.store.protocol.codec import framed

_READ_NBYTES, _LONG_READ_NBYTES = 64 << 10, 1 << 20


class BlockingSocket:
    """A connected socket with deadlines and a queue of outgoing messages.

    One thread may send while another one receives. Any thread may call `enqueue`, one at a time.
    ``is_open(request)`` tells whether the rest of a request's long message still has to be sent.
    """

    def __init__(self, sock: socket.socket, tls: TlsSocket | None, is_open: Callable[[int], bool]) -> None:
        sock.setblocking(False)
        self._sock: socket.socket | TlsSocket = tls or sock
        self._tls = tls
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        self._read_nbytes = _READ_NBYTES
        self._queue: deque[bytes] = deque()
        self._chunks = ChunkSender(lambda data: self._unsent.append(data), is_open, schedule=lambda call: None)
        self._unsent: deque[bytes | memoryview] = deque()
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
        """Whether TLS has begun."""
        return self._tls is not None and self._tls.secured

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send all of ``data``. Raises ConnectionError, and TimeoutError: the next call then sends the rest first."""
        self._unsent.append(data)
        self._send_unsent(deadline)

    def _send_unsent(self, deadline: Deadline) -> None:
        unsent = self._unsent
        while unsent:
            data = unsent[0]
            try:
                nbytes = self._sock.send(data)
            except BlockingIOError:
                self.wait(deadline, self._writable)
                continue
            if nbytes == len(data):
                unsent.popleft()
            else:
                unsent[0] = memoryview(data)[nbytes:]
        while self._tls is not None and self._tls.unsent:
            try:
                self._tls.flush()
            except BlockingIOError:
                self.wait(deadline, self._writable)

    # -- the outgoing queue -------------------------------------------------------------------------

    def enqueue(self, message: bytes | ChunkedMessage) -> None:
        """Queue a message."""
        if isinstance(message, ChunkedMessage):
            self._chunks.send(message)
        else:
            self._queue.append(message)

    @property
    def has_unsent(self) -> bool:
        """Whether there is anything to be sent."""
        return bool(self._queue or self._unsent or self._chunks.queue or (self._tls is not None and self._tls.unsent))

    def drain(self, deadline: Deadline, pending: PendingRequest[Any] | None = None) -> None:
        """Send the queue, short messages first, then one chunk, and so on. Return early when ``pending`` is ready.

        Raises ConnectionError, and TimeoutError: the next call then continues at the same byte.
        """
        queue, unsent, chunks = self._queue, self._unsent, self._chunks
        while not (pending is not None and pending.ready):
            if not unsent:
                messages = list(queue)
                for _ in messages:  # other threads may have appended
                    queue.popleft()
                if messages:
                    unsent.append(framed(messages))
                if chunks.queue:
                    chunks.send_next()
            self._send_unsent(deadline)
            if not queue and not chunks.queue:
                return
            if deadline.expired():  # a socket that takes every chunk at once never waits
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
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    deadline: Deadline,
    is_open: Callable[[int], bool],
    heartbeat: float,
) -> BlockingSocket:
    """Connect, without the TLS handshake (`secure`). Over a Unix socket there is no TLS.

    Raises OSError if another attempt may succeed.
    """
    try:
        sock = connect(host, port, max(deadline.remaining(), 0.001))
    except UnicodeError as error:
        raise resolution_error(error) from None
    try:
        tune(sock, heartbeat)
        secured = (
            None if tls is None or sock.family == socket.AF_UNIX else TlsSocket(sock, tls, serves=False, name=host)
        )
        return BlockingSocket(sock, secured, is_open)
    except BaseException:
        sock.close()
        raise


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
