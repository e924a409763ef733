"""Direct epoll path for clients of torch's TCPStore: one callback reads from, and replies to, all of their sockets.

A request of torch's client takes 1 to 2 microseconds, most of them in the loop's transports. The sockets of these clients
are therefore in an epoll instance of their own, which is one descriptor to the event loop. The server answers a short
request whose bytes it has seen before by a dictionary look-up between `read` and `write`, and passes every other request
to the session.

The socket's transport remains: it buffers bytes that the socket does not accept, applies flow control and closes the
socket. Without epoll, on loops that cannot watch descriptors, and with TLS, transports serve all clients. Used by
`c10d_session`. Measurements: docs/decisions/0035 and 0044.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable, Mapping
from os import read, write
from typing import Any

_READ_NBYTES = 64 << 10
_SHORT_NBYTES = 479
"""Bytes to read where a short request is expected: Python allocates a bytes object of this size without malloc."""
_SOCKETS_PER_POLL = 64
_POLLS = 8
"""Polls in one call from the event loop, at most."""
_BUSY = 2
"""With fewer ready sockets, the event loop polls next."""

Receive = Callable[[bytes], bool]
"""Receives data; returns whether the next bytes begin a request that may be answered at once."""
Answers = Mapping[bytes, Callable[[], bytes | None]]
"""By the bytes of a request: a function that returns its reply, or None, without any effect, if the session answers it."""
Heard = Callable[[object, int], None]
"""Called once per poll with the client (None: several) and the number of requests that were answered at once."""


class EpollFastPath:
    """The sockets of one server that are read from directly."""

    def __init__(self, loop: asyncio.AbstractEventLoop, answers: Answers, heard: Heard) -> None:
        self._loop = loop
        self._answers = answers
        self._heard = heard
        self._epoll: Any = None
        self._connections: dict[int, FastPathConnection] = {}
        self._between_requests: set[int] = set()
        """Descriptors whose next bytes begin a request, and to which nothing waits to be sent."""
        self.client_left = False
        """Whether a client has left since the event loop called `_serve`."""

    def take(self, transport: asyncio.Transport, receive: Receive) -> asyncio.Transport:
        """Return the transport to use instead of ``transport``, perhaps itself. Its bytes go to ``receive`` from now on."""
        if transport.get_extra_info("sslcontext") is not None or not self._open():
            return transport
        transport.pause_reading()
        return FastPathConnection(self, transport, receive)

    def _open(self) -> bool:
        if self._epoll is None and hasattr(select, "epoll"):
            epoll = select.epoll()
            try:
                self._loop.add_reader(epoll.fileno(), self._serve)
            except NotImplementedError:
                epoll.close()
                return False
            self._epoll = epoll
        return self._epoll is not None

    def close(self) -> None:
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def watch(self, fd: int, connection: FastPathConnection) -> None:
        if self._connections.get(fd) is not connection:
            self._connections[fd] = connection
            self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int, connection: FastPathConnection) -> None:
        """Stop reading from a socket. Its descriptor may be that of another connection by now."""
        if self._connections.get(fd) is connection:
            del self._connections[fd]
            self._between_requests.discard(fd)
            with contextlib.suppress(OSError):  # the transport closes the socket after an error
                self._epoll.unregister(fd)

    def answer_at_once(self, fd: int, allowed: bool) -> None:
        if not allowed:
            self._between_requests.discard(fd)
        elif fd in self._connections:
            self._between_requests.add(fd)

    def _serve(self) -> None:
        """Read from all ready sockets and answer; stop when a client has left, so that the loop can release it."""
        poll, connections = self._epoll.poll, self._connections
        self.client_left = False
        for _ in range(_POLLS):
            ready = poll(0, _SOCKETS_PER_POLL)
            if ready:
                first = connections.get(ready[0][0])
                count = self._answer(ready)
                self._heard(first if len(ready) == 1 else None, count)
            if len(ready) < _BUSY or self.client_left:
                return

    def _answer(self, ready: list[tuple[int, int]]) -> int:
        """Read from ready sockets; return how many requests were answered at once."""
        connections, between_requests, answers = self._connections, self._between_requests, self._answers
        count = 0
        for fd, _ in ready:
            data, reply, sent = b"", None, 0
            if fd in between_requests:
                try:
                    data = read(fd, _SHORT_NBYTES)
                    reply = answers[data]()
                    if reply is not None:
                        sent = write(fd, reply)
                except Exception:
                    pass  # the session executes the request below, and reports the error
            if reply is not None:
                count += 1
                if sent < len(reply):
                    connections[fd].write(reply[sent:])
            elif fd in connections:  # an earlier request may have removed it
                connections[fd].serve(data)
        return count


class FastPathConnection(asyncio.Transport):
    """A transport that reads and writes its socket directly, and leaves longer writes to the loop's transport."""

    __slots__ = ("_fast_path", "_fd", "_receive", "_transport", "_transport_buffers")

    def __init__(self, fast_path: EpollFastPath, transport: asyncio.Transport, receive: Receive) -> None:
        super().__init__()
        self._fast_path = fast_path
        self._transport = transport
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._transport_buffers = False  # the loop's transport may have data to send
        self._receive = receive
        self.resume_reading()

    def serve(self, data: bytes = b"") -> None:
        """Pass ``data``, and further bytes that have arrived, to the session."""
        if len(data) in (0, _SHORT_NBYTES):  # a full read may leave more in the socket
            try:
                more = read(self._fd, _READ_NBYTES)
            except (BlockingIOError, InterruptedError):
                more = b""
                if not data:
                    return
            except OSError:  # the connection was reset
                self.abort()
                return
            data += more
        if not data:
            self.close()
            return
        self._fast_path.answer_at_once(self._fd, self._receive(data) and not self._transport_buffers)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._transport_buffers:
            self._transport_buffers = self._transport.get_write_buffer_size() > 0
        if self._transport_buffers or self._fd < 0:
            self._transport.write(data)
            return
        try:
            sent = write(self._fd, data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.abort()
            return
        if sent < len(data):
            self._transport_buffers = True
            self._fast_path.answer_at_once(self._fd, False)
            self._transport.write(data[sent:])

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._fast_path.unwatch(self._fd, self)

    def resume_reading(self) -> None:
        if self._fd >= 0:
            self._fast_path.watch(self._fd, self)

    def close(self) -> None:
        self._leave()
        self._transport.close()

    def abort(self) -> None:
        self._leave()
        self._transport.abort()

    def _leave(self) -> None:
        self._fast_path.client_left = True
        self._fast_path.unwatch(self._fd, self)
        self._fd = -1
