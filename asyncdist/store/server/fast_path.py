"""Direct epoll path for clients of torch's TCPStore: one callback reads and answers all of their sockets.

A request of torch's client takes 1 to 2 microseconds, most of them in the loop's transports. The sockets of these clients
are therefore in an epoll instance of their own, one descriptor to the event loop. A short request whose bytes were seen
before is answered by a dictionary look-up between `read` and `write`; every other request goes to the session.

The socket's transport remains: it buffers what the socket does not accept, applies flow control and closes the socket.
Without epoll, on loops that cannot watch descriptors, and with TLS, transports serve all clients. Used by `c10d_session`.
Measurements: docs/decisions/0035 and 0044.
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
"""Bytes to read where a short request is expected: Python allocates so few without malloc."""
_SOCKETS_PER_POLL = 64
_POLLS = 8
"""Polls before the loop continues, at most."""
_BUSY = 2
"""With fewer ready sockets the loop polls next."""

Receive = Callable[[bytes], bool]
"""Receives data; returns whether the next bytes begin a request that may be answered at once."""
Answers = Mapping[bytes, Callable[[], bytes | None]]
"""By the bytes of a request: a function that returns the reply, or None, without any effect, for the session's path."""
Heard = Callable[[object, int], None]
"""Is called once per poll with the client (None: several) and the number of requests that were answered at once."""


class EpollFastPath:
    """The sockets of one server that are read from directly."""

    def __init__(self, loop: asyncio.AbstractEventLoop, answers: Answers, heard: Heard) -> None:
        self._loop = loop
        self._answers = answers
        self._heard = heard
        self._epoll: Any = None
        self._there: dict[int, FastPathConnection] = {}
        self._between: set[int] = set()  # the next bytes begin a request, and nothing waits to be sent
        self._client_left = False  # since the last iteration of the loop

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
        """Close the epoll instance, after all connections have ended."""
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def watch(self, fd: int, shortcut: FastPathConnection) -> None:
        """Start to read from a socket."""
        if self._there.get(fd) is not shortcut:
            self._there[fd] = shortcut
            self._epoll.register(fd, select.EPOLLIN)

    def forget(self, fd: int, shortcut: FastPathConnection) -> None:
        """Stop reading from a socket. Its number may be that of another socket by now."""
        if self._there.get(fd) is shortcut:
            del self._there[fd]
            self._between.discard(fd)
            with contextlib.suppress(OSError):  # the transport has closed it after an error
                self._epoll.unregister(fd)

    def answer_at_once(self, fd: int, whether: bool) -> None:
        """Set whether the next bytes of a socket may be answered at once."""
        if not whether:
            self._between.discard(fd)
        elif fd in self._there:
            self._between.add(fd)

    def _serve(self) -> None:
        """Read from all ready sockets and answer; stop when a client has left, so that the loop can release it."""
        poll, there = self._epoll.poll, self._there
        self._client_left = False
        for _ in range(_POLLS):
            ready = poll(0, _SOCKETS_PER_POLL)
            if ready:
                shortcut = there.get(ready[0][0])
                count = self._answer(ready)
                self._heard(shortcut if len(ready) == 1 else None, count)
            if len(ready) < _BUSY or self._client_left:
                return

    def _answer(self, ready: list[tuple[int, int]]) -> int:
        """Read from ready sockets; return how many requests were answered at once."""
        there, between, answers = self._there, self._between, self._answers
        count = 0
        for fd, _ in ready:
            data, reply, sent = b"", None, 0
            if fd in between:
                try:
                    data = read(fd, _SHORT_NBYTES)
                    reply = answers[data]()
                    if reply is not None:
                        sent = write(fd, reply)
                except Exception:
                    pass  # the session repeats it below and reports it
            if reply is not None:
                count += 1
                if sent < len(reply):
                    there[fd].write(reply[sent:])
            elif fd in there:  # and not removed by an earlier request
                there[fd].serve(data)
        return count

    def left(self) -> None:
        """Let the loop release a client that has left."""
        self._client_left = True


class FastPathConnection(asyncio.Transport):
    """A transport that reads and writes its socket directly, and leaves longer writes to the loop's transport."""

    __slots__ = ("_behind", "_fd", "_receive", "_shortcuts", "_transport")

    def __init__(self, shortcuts: EpollFastPath, transport: asyncio.Transport, receive: Receive) -> None:
        super().__init__()
        self._shortcuts = shortcuts
        self._transport = transport
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._behind = False  # the loop's transport may still have data to send
        self._receive = receive
        self.resume_reading()

    def serve(self, data: bytes = b"") -> None:
        """Pass ``data`` and what else has arrived to the session."""
        if len(data) in (0, _SHORT_NBYTES):  # a full read may leave more in the socket
            try:
                more = read(self._fd, _READ_NBYTES)
            except (BlockingIOError, InterruptedError):
                more = b""
                if not data:
                    return
            except OSError:  # it was reset
                self.abort()
                return
            data += more
        if not data:
            self.close()
            return
        self._shortcuts.answer_at_once(self._fd, self._receive(data) and not self._behind)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._behind:
            self._behind = self._transport.get_write_buffer_size() > 0
        if self._behind or self._fd < 0:
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
            self._behind = True
            self._shortcuts.answer_at_once(self._fd, False)
            self._transport.write(data[sent:])

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._shortcuts.forget(self._fd, self)

    def resume_reading(self) -> None:
        if self._fd >= 0:
            self._shortcuts.watch(self._fd, self)

    def close(self) -> None:
        self._leave()
        self._transport.close()

    def abort(self) -> None:
        self._leave()
        self._transport.abort()

    def _leave(self) -> None:
        self._shortcuts.left()
        self._shortcuts.forget(self._fd, self)
        self._fd = -1
