"""Messages over a byte stream, a socket or a ring: from a send queue, and into the receives of a matching queue.

`tcp` and `shm` use it. A frame is a header of `HEADER_NBYTES` bytes and a body (see `asyncdist.transport.wire_format`).
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from asyncdist.errors import ProtocolError
from asyncdist.transport.base import DiscardReceive, Host, MatchingQueue, Outgoing, Receive
from asyncdist.transport.wire_format import DATA, HEADER_NBYTES, KEY_NBYTES, KINDS, unpack_tail

# Bytes moved in one direction before the other direction gets its turn.
QUANTUM = 1 << 20
# Longest body of a control message.
NOTICE_NBYTES = 1 << 16


class Ended(Exception):
    """The stream has ended; the message is the reason."""


class FrameSink(Protocol):
    """Accepts bytes like a non-blocking socket: BlockingIOError if there is no space, OSError at the end."""

    def sendmsg(self, buffers: Any, /) -> int: ...

    def send(self, data: memoryview, /) -> int: ...


class Source(Protocol):
    """Provides bytes like a non-blocking socket: BlockingIOError if no byte has arrived."""

    def recv_into(self, buffer: memoryview, nbytes: int, /) -> int: ...

    def recvmsg_into(self, buffers: Any, /) -> Any: ...


class Writer:
    """The sending half: a queue of messages, of which the first may be partly sent."""

    __slots__ = ("_sock", "open", "queue")

    def __init__(self, sock: FrameSink, queue: deque[Outgoing]) -> None:
        self._sock = sock
        # Messages wait in the queue until the peer has authenticated.
        self.open = False
        self.queue = queue

    def send(self, message: Outgoing) -> bool:
        """Send at once if the queue is empty; return whether all of the message was sent."""
        body = message.body
        if self.queue or not self.open:
            self.queue.append(message)
            return False
        try:
            message.sent = self._sock.sendmsg((message.header, body if len(body) <= QUANTUM else body[:QUANTUM]))
        except BlockingIOError:
            pass
        # The reading half reports the end, after the peer's last messages.
        except OSError:
            pass
        if message.sent == HEADER_NBYTES + len(body):
            message.done = True
            return True
        self.queue.append(message)
        return False

    def flush(self) -> bool:
        """Send up to a quantum; return whether anything was sent."""
        queue, budget = self.queue, QUANTUM
        try:
            while queue and budget > 0:
                message = queue[0]
                # Withdrawn before its first byte was sent.
                if message.done and not message.sent:
                    queue.popleft()
                    continue
                budget -= self._send_some(message)
                if message.sent == HEADER_NBYTES + len(message.body):
                    queue.popleft()
                    if not message.done:
                        message.finish()
        except BlockingIOError:
            pass
        except OSError as cause:
            raise Ended(str(cause)) from cause
        return budget < QUANTUM

    def _send_some(self, message: Outgoing) -> int:
        at = message.sent - HEADER_NBYTES
        if at < 0:
            sent = self._sock.sendmsg((message.header[message.sent :], message.body[:QUANTUM]))
        else:
            sent = self._sock.send(message.body[at : at + QUANTUM])
        message.sent += sent
        return sent


class Notice(Receive):
    """A control message (abort or goodbye), whose body goes to the host instead of an operation."""

    __slots__ = ("_bytes", "_host", "_kind")

    def __init__(self, peer: int, key: bytes, nbytes: int, kind: int, host: Host) -> None:
        self._bytes = bytearray(nbytes)
        super().__init__(peer, key, 0, memoryview(self._bytes), None)
        self._kind = kind
        self._host = host

    def finish(self) -> None:
        self.done = True
        self._host.control(self.peer, self._kind, self.key, bytes(self._bytes))


class Reader:
    """The receiving half: reads a header, then the body into the receive that the inbox names, and repeats.

    One system call reads a header and the expected body behind it, the body straight into its destination if the message is
    the expected one. Otherwise the body's bytes are copied to ``_backlog`` and read again from there. Without an ``inbox``
    only control messages are accepted.
    """

    __slots__ = (
        "_backlog", "_blocked", "_got", "_head", "_head_view", "_host", "_inbox", "_left", "_receive", "_room", "_sock",
        "fingerprint", "key", "nbytes", "peer",
    )  # fmt: skip

    def __init__(self, sock: Source, peer: int, host: Host, inbox: MatchingQueue | None) -> None:
        self._sock = sock
        self.peer = peer
        self._host = host
        self._inbox = inbox
        self._head = bytearray(HEADER_NBYTES)
        self._head_view = memoryview(self._head)
        self._got = 0
        self._backlog: memoryview | None = None
        self._receive: Receive | None = None
        self._room: memoryview | None = None
        self._left = 0
        self._blocked = False
        self.key, self.fingerprint, self.nbytes = b"", 0, 0

    @property
    def blocked(self) -> bool:
        """Whether a message waits on the wire because no receive is posted for it."""
        return self._blocked

    @property
    def eager(self) -> bool:
        """Whether a read may succeed without a readiness event."""
        if self._blocked:
            return False
        return self._receive is not None or self._backlog is not None or bool(self._inbox and self._inbox.posted)

    @property
    def backlogged(self) -> bool:
        """Whether bytes that have been read off the stream are not parsed yet."""
        return self._backlog is not None

    def read(self) -> bool:
        """Read up to a quantum; return whether any byte was read. Raises Ended and ProtocolError."""
        budget = QUANTUM
        try:
            while budget > 0 and not self._blocked:
                if self._receive is not None:
                    budget -= self._read_body()
                # The first attempt is for callers that know that bytes have arrived.
                elif budget == QUANTUM or self.eager:
                    budget -= self._read_head()
                else:
                    break
        except BlockingIOError:
            pass
        except OSError as cause:
            raise Ended(cause.strerror or str(cause)) from cause
        return budget < QUANTUM

    def resume(self, receive: Receive) -> None:
        """Continue with the body of the blocked message."""
        self._blocked = False
        self._start(receive)

    def _read_head(self) -> int:
        expected = None
        if self._got == 0 and self._backlog is None and self._inbox is not None:
            expected = self._inbox.first()
        if expected is None:
            count = self._read_into(self._head_view[self._got :])
        else:
            count = self._sock.recvmsg_into((self._head, expected.room))[0]
            if count == 0:
                raise Ended("connection closed")
        self._got += count
        if self._got >= HEADER_NBYTES:
            beyond, self._got = self._got - HEADER_NBYTES, 0
            self._begin(expected, beyond)
        return count

    def _begin(self, expected: Receive | None, beyond: int) -> None:
        """Match a complete header, of whose body ``beyond`` bytes already lie in the expected receive's memory."""
        key = bytes(self._head_view[:KEY_NBYTES])
        fingerprint, nbytes, kind = unpack_tail(self._head)
        if kind not in KINDS or nbytes > (self._host.config.max_message_nbytes if kind == DATA else NOTICE_NBYTES):
            raise ProtocolError(f"a frame of kind {kind} that claims {nbytes} bytes: the stream is damaged")
        if kind == DATA:
            if self._inbox is None:
                raise ProtocolError("a data message on the side of the connection that carries only control messages")
            receive = self._inbox.arrive(key, fingerprint, nbytes)
        else:
            receive = Notice(self.peer, key, nbytes, kind, self._host)
        if receive is expected and receive is not None:
            # Most messages come whole, with the header.
            if beyond and beyond == nbytes:
                receive.filled()
                if not receive.done:
                    receive.finish()
                return
            self._start(receive)
            if beyond:
                self._took(beyond)
            return
        if beyond and expected is not None:
            self._backlog = memoryview(bytes(expected.room[:beyond]))
        if receive is not None:
            self._start(receive)
        elif self._inbox is not None:
            self.key, self.fingerprint, self.nbytes = key, fingerprint, nbytes
            self._blocked = True
            self._inbox.block(self)

    def _start(self, receive: Receive) -> None:
        self._left = receive.nbytes
        if self._left:
            self._receive, self._room = receive, receive.room
        else:
            receive.finish()

    def _read_body(self) -> int:
        receive = self._receive
        assert receive is not None
        # Withdrawn during the transfer: its memory belongs to the caller again, and the rest is discarded.
        if receive.done:
            self._start(DiscardReceive(self.peer, receive.key, self._left))
        assert self._room is not None
        count = self._read_into(self._room)
        self._took(count)
        return count

    def _took(self, count: int) -> None:
        receive, room = self._receive, self._room
        assert receive is not None
        assert room is not None
        self._left -= count
        if count < len(room):
            self._room = room[count:]
            return
        self._room = receive.filled()
        if self._room is None:
            self._receive = None
            if not receive.done:
                receive.finish()

    def _read_into(self, room: memoryview) -> int:
        backlog = self._backlog
        if backlog is not None:
            count = min(len(backlog), len(room))
            room[:count] = backlog[:count]
            self._backlog = backlog[count:] if count < len(backlog) else None
            return count
        count = self._sock.recv_into(room, min(len(room), QUANTUM))
        if count == 0:
            raise Ended("connection closed")
        return count
