"""Messages over a byte stream, which is a TCP socket or a ring in shared memory.

`Writer` sends the messages of a queue. `Reader` receives messages into the receives that a `MatchingQueue` chooses.
Used by `tcp.connection` and `shm.local_peer`. On the stream a message is a frame: a header of `HEADER_NBYTES` bytes and
a body (see `asyncdist.kernel.transport.wire_format`). No call blocks.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from asyncdist.base.callables import Predicate
from asyncdist.errors import ProtocolError
from asyncdist.kernel.transport.base import DiscardReceive, Host, MatchingQueue, Outgoing, Receive, Wait
from asyncdist.kernel.transport.wire_format import BEAT, DATA, HEADER_NBYTES, KEY_NBYTES, KINDS, pack_key, unpack_tail

# About the most bytes that one call moves in one direction, so that the other direction gets its turn.
QUANTUM = 1 << 20
# A body up to this size is faster copied behind its header than passed as a buffer of its own.
_JOINED_NBYTES = 1 << 10
# Most bytes that one read takes together with a header. They are copied if the message belongs to another receive.
_MOST_AHEAD_NBYTES = 256 << 10
LENT_NBYTES = 1 << 20
"""Bytes left of the smallest body that is worth a thread."""
PACKET_NBYTES = 1 << 17
"""Most bytes of control messages that are sent together, with their headers."""
_MAX_CONTROL_NBYTES = PACKET_NBYTES - HEADER_NBYTES


class Ended(Exception):
    """The stream has ended; the message is the reason."""


class FrameSink(Protocol):
    """A `Writer` writes to it: like a non-blocking socket, with BlockingIOError if full and OSError at the end."""

    def sendmsg(self, buffers: Any, /) -> int: ...

    def send(self, data: Any, /) -> int: ...


class Source(Protocol):
    """A `Reader` reads from it: like a non-blocking socket, with BlockingIOError if no byte has arrived."""

    def recv_into(self, buffer: memoryview, nbytes: int, /) -> int: ...

    def recvmsg_into(self, buffers: Any, /) -> Any: ...


class _FailedSource:
    """The source of a reader that has read an error: every further read raises it."""

    def __init__(self, cause: OSError) -> None:
        self._cause = cause

    def recv_into(self, buffer: memoryview, nbytes: int, /) -> int:
        raise self._cause

    def recvmsg_into(self, buffers: Any, /) -> Any:
        raise self._cause


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
        # The stream is full, or has ended. The `Reader` reports the end, after the peer's last messages.
        except OSError:
            message.sent = 0
        if message.sent == HEADER_NBYTES + len(body):
            message.done = True
            return True
        self.queue.append(message)
        return False

    def send_now(self, peer: int, header: bytes, body: memoryview) -> Outgoing | None:
        """Send a small message at once; return None if all of it was sent, else the message, which is in the queue."""
        sent = 0
        if self.open and not self.queue:
            try:
                small = len(body) <= _JOINED_NBYTES
                sent = self._sock.send(header + body) if small else self._sock.sendmsg((header, body))
            # As in `send`.
            except OSError:
                pass
            if sent == HEADER_NBYTES + len(body):
                return None
        message = Outgoing.copied(peer, header, body, sent)
        self.queue.append(message)
        return message

    def beat(self, peer: int) -> None:
        """Send a heartbeat, unless messages wait: these show as well that this rank is alive."""
        if self.open and not self.queue:
            self.send(Outgoing(peer, pack_key(0, 0, 0), 0, memoryview(b""), None, BEAT))

    def flush(self) -> bool:
        """Send about `QUANTUM` bytes at most; return whether any byte was sent. Raises Ended."""
        queue, budget = self.queue, QUANTUM
        try:
            while queue and budget > 0:
                message = queue[0]
                # The operation has ended before the first byte was sent.
                if message.done and not message.sent:
                    queue.popleft()
                    continue
                # A thread may have sent the last bytes.
                if not self.complete_sent():
                    before = message.sent
                    self.send_some(message)
                    budget -= message.sent - before
                    self.complete_sent()
        except BlockingIOError:
            pass
        except OSError as cause:
            raise Ended(str(cause)) from cause
        return budget < QUANTUM

    def complete_sent(self) -> bool:
        """Complete the first message of the queue if all of it has been sent; return whether."""
        message = self.queue[0]
        if message.sent < HEADER_NBYTES + len(message.body):
            return False
        self.queue.popleft()
        if not message.done:
            message.finish()
        return True

    def send_some(self, message: Outgoing) -> bool:
        """Send the next bytes of a message, and count them; return whether any are left. Raises BlockingIOError and
        OSError."""
        body_sent = message.sent - HEADER_NBYTES
        if body_sent < 0:
            sent = self._sock.sendmsg((message.header[message.sent :], message.body[:QUANTUM]))
        else:
            sent = self._sock.send(message.body[body_sent : body_sent + QUANTUM])
        message.sent += sent
        return message.sent < HEADER_NBYTES + len(message.body)


class _ControlMessage(Receive):
    """A message of any kind but DATA. It is passed to the host, not to an operation."""

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
    """The receiving half: reads a header, asks the matching queue for the receive, and reads the body into its memory.

    The receive that was posted first is the *expected* one. To save a system call, one read takes a header and the bytes
    after it, which go to the memory of the expected receive. If the message belongs to another receive, the reader copies
    these bytes to ``backlog`` and reads them again from there.

    Args:
        inbox: The peer's matching queue; None to accept only control messages.
        lend: Called before the body of a large message is read, which it may lend to a thread; returns whether it has.
        short_reads_empty: Whether a read that returns fewer bytes than wanted has emptied the stream.
    """

    __slots__ = (
        "_header", "_header_received", "_header_view", "_host", "_inbox", "_is_empty", "_lend", "_receive",
        "_room", "_short_reads_empty", "_sock", "_taking", "arrivals", "backlog", "blocked", "body_left",
        "fingerprint", "heard", "key", "nbytes", "peer", "taken",
    )  # fmt: skip

    def __init__(
        self,
        sock: Source,
        peer: int,
        host: Host,
        inbox: MatchingQueue | None,
        lend: Predicate | None = None,
        *,
        short_reads_empty: bool = False,
    ) -> None:
        self._sock = sock
        self._lend = lend
        self._short_reads_empty = short_reads_empty
        self._is_empty = False
        self.peer = peer
        self._host = host
        self._inbox = inbox
        self._header = bytearray(HEADER_NBYTES)
        self._header_view = memoryview(self._header)
        self._header_received = 0
        self.backlog: memoryview | None = None
        """Bytes that have left the stream and are not parsed yet."""
        self._receive: Receive | None = None
        self._room: memoryview | None = None
        self.body_left = 0
        """Bytes of a body that are still to be read."""
        self.blocked = False
        """Whether the body of a message stays on the wire because no receive is posted for it."""
        self._taking: memoryview | None = None
        self.taken = 0
        self.arrivals: tuple[Wait, ...] = ()
        self.key, self.fingerprint, self.nbytes = b"", 0, 0
        self.heard = True
        """Whether bytes have been read, or the stream has begun, since the owner last reset this."""

    @property
    def backlogged(self) -> bool:
        """Whether bytes have left the stream and are not parsed yet, so that no readiness event reports them."""
        return self.backlog is not None or self.taken > 0

    def read(self, ready: bool = True) -> bool:
        """Read about `QUANTUM` bytes at most; return whether any byte was read. Raises Ended and ProtocolError.

        Args:
            ready: Whether bytes may have arrived, as after a readiness event. Without it the reader asks the stream only
                if a receive is posted, or a body or the backlog is partly read.
        """
        if self.taken:
            self.put_back()
        budget, self._is_empty = QUANTUM, False
        try:
            while budget > 0 and not self.blocked and not (self._is_empty and self.backlog is None):
                if self._receive is not None:
                    if self.body_left >= LENT_NBYTES and self._lend is not None and self._lend():
                        break
                    budget -= self._read_body()
                    # The next large message, of the same task, would arrive before the driver has posted its receive.
                    if not self.body_left and budget <= QUANTUM - _MOST_AHEAD_NBYTES:
                        break
                elif ready or self.backlog is not None or (self._inbox is not None and self._inbox.posted):
                    ready = False
                    budget -= self._read_header()
                else:
                    break
        except BlockingIOError:
            pass
        except OSError as cause:
            raise Ended(cause.strerror or str(cause)) from cause
        if self._receive is not None and self._receive.transfer is None:
            self._receive.transfer = self
        if budget < QUANTUM:
            self.heard = True
            return True
        return False

    def take(self, header: bytes, room: memoryview, tries: int, frame: bytearray | None = None) -> bool | None:
        """Read the next message into ``room`` if it is the expected one; see `MessageSource`.

        Bytes of anything else go to the backlog, and an error of the stream is raised again by the next read.
        """
        if self._receive is not None or self.backlog is not None or self.blocked or self._header_received:
            return False
        if self.taken and self._header != header:
            self.put_back()
            return False
        left = tries
        while True:
            try:
                if self.taken:
                    count = self._sock.recv_into(room[self.taken - HEADER_NBYTES :], 0)
                elif frame is None:
                    count = self._sock.recvmsg_into((self._header, room))[0]
                else:
                    count = self._sock.recv_into(frame, len(frame))  # type: ignore[arg-type]
                    if frame.startswith(header) and count == len(frame):
                        self.heard = True
                        return True
                    self._header_view[:] = memoryview(frame)[:HEADER_NBYTES]
            except BlockingIOError:
                left -= 1
                if left <= 0:
                    return None
                continue
            except OSError as cause:
                self._sock, count = _FailedSource(cause), 0
            if count:
                self.heard = True
            taken = self.taken + count
            if taken == HEADER_NBYTES + len(room) and self._header == header:
                self._taking, self.taken = None, 0
                return True
            self._taking, self.taken, left = room, taken, tries
            if not count or taken < HEADER_NBYTES or self._header != header:
                self.put_back()
                return False

    def put_back(self) -> None:
        """Move the bytes of a message that `take` has read in part to the backlog, for `read`."""
        taken, room = self.taken, self._taking
        self._taking, self.taken = None, 0
        if taken and room is not None:
            self.backlog = memoryview(bytes(self._header_view[:taken]) + room[: max(0, taken - HEADER_NBYTES)])

    @property
    def lendable(self) -> Receive | None:
        """The receive whose body comes next on the stream, if a thread may read it."""
        return self._receive if self.backlog is None else None

    def receive_some(self) -> bool:
        """Read the next bytes of a body, in any thread; return whether any are left. `read` finishes the receive.

        Raises BlockingIOError, OSError and Ended.
        """
        assert self._room is not None
        try:
            count = self._read_into(self._room)
        except BlockingIOError:
            raise
        except (OSError, Ended) as cause:
            # The driver reads next, and gets the same error.
            self._lend = None
            if isinstance(cause, OSError):
                self._sock = _FailedSource(cause)
            raise
        self.heard = True
        return not self._fill(count)

    def stop(self) -> None:
        """Let go of the receive whose body is partly read; the rest of it is discarded. Called by `Receive.abandon`."""
        receive = self._receive
        if receive is not None:
            self._receive = self._room = receive.transfer = None
            if self.body_left:
                self._start_body(DiscardReceive(self.peer, receive.key, self.body_left))

    def resume(self, receive: Receive) -> None:
        """Read the body of the blocked message into a receive."""
        self.blocked = False
        self._start_body(receive)

    def _read_header(self) -> int:
        expected, room = None, self._header_view
        if self._header_received == 0 and self.backlog is None and self._inbox is not None:
            expected = self._inbox.first()
        if expected is None:
            count = self._read_into(self._header_view[self._header_received :])
        else:
            room = expected.room[:_MOST_AHEAD_NBYTES]
            count = self._sock.recvmsg_into((self._header, room))[0]
            if count == 0:
                raise Ended("connection closed")
            self._is_empty = self._short_reads_empty and count < HEADER_NBYTES + len(room)
        self._header_received += count
        if self._header_received >= HEADER_NBYTES:
            beyond, self._header_received = self._header_received - HEADER_NBYTES, 0
            if self._match_header(expected, room, beyond) == BEAT:
                return beyond
        return count

    def _match_header(self, expected: Receive | None, room: memoryview, beyond: int) -> int:
        """Find the receive for a complete header, and return the kind of its message.

        ``beyond`` bytes after it lie in ``room``, the memory of ``expected``. A mismatch gives that memory back.
        """
        key = bytes(self._header_view[:KEY_NBYTES])
        fingerprint, nbytes, kind = unpack_tail(self._header)
        limit = self._host.config.max_message_nbytes if kind == DATA else _MAX_CONTROL_NBYTES * (kind != BEAT)
        if kind not in KINDS or nbytes > limit:
            raise ProtocolError(f"a frame of kind {kind} that claims {nbytes} bytes: the stream is damaged")
        if kind == DATA:
            if self._inbox is None:
                raise ProtocolError("a data message on a connection where the peer may send only control messages")
            receive = self._inbox.arrive(key, fingerprint, nbytes)
        elif kind == BEAT:
            # It moves nothing, so no driver has to continue because of it.
            self.heard, receive = True, None
        else:
            receive = _ControlMessage(self.peer, key, nbytes, kind, self._host)
        if receive is expected and receive is not None:
            # The usual case: one read has received the whole message.
            if beyond and beyond == nbytes:
                receive.filled()
                if not receive.done:
                    receive.finish()
                return kind
            self._start_body(receive)
            if beyond:
                self._advance_body(beyond)
            return kind
        # The bytes belong to another message, and the expected message will overwrite them.
        if beyond and expected is not None:
            self.backlog = memoryview(bytes(room[:beyond]))
        if receive is not None:
            self._start_body(receive)
        elif kind == DATA and self._inbox is not None:
            self.key, self.fingerprint, self.nbytes = key, fingerprint, nbytes
            self.blocked = True
            self._inbox.block(self)
        return kind

    def _start_body(self, receive: Receive) -> None:
        self.body_left = receive.nbytes
        if self.body_left:
            self._receive, self._room = receive, receive.room
        else:
            receive.finish()

    def _read_body(self) -> int:
        receive = self._receive
        assert receive is not None
        # A thread has read the last bytes, of a large message.
        if not self.body_left:
            self._end_body(receive)
            return QUANTUM
        # The operation has ended during the transfer, so its memory belongs to the user again.
        if receive.done:
            self._start_body(DiscardReceive(self.peer, receive.key, self.body_left))
        assert self._room is not None
        count = self._read_into(self._room)
        self._advance_body(count)
        return count

    def _advance_body(self, count: int) -> None:
        """Advance by ``count`` bytes, which are in the receive's memory; finish the receive after its last byte."""
        receive = self._receive
        assert receive is not None
        if self._fill(count):
            self._end_body(receive)

    def _fill(self, count: int) -> bool:
        """Count bytes that are in the receive's memory, and let it reduce a complete piece; return whether it is full."""
        receive, room = self._receive, self._room
        assert receive is not None
        assert room is not None
        self.body_left -= count
        self._room = room[count:] if count < len(room) else receive.filled()
        return self._room is None

    def _end_body(self, receive: Receive) -> None:
        self._receive = self._room = receive.transfer = None
        if not receive.done:
            receive.finish()

    def _read_into(self, room: memoryview) -> int:
        """Read from the backlog, or from the stream without one; return the number of bytes read."""
        backlog = self.backlog
        if backlog is not None:
            count = min(len(backlog), len(room))
            room[:count] = backlog[:count]
            self.backlog = backlog[count:] if count < len(backlog) else None
            return count
        wanted = min(len(room), QUANTUM)
        count = self._sock.recv_into(room, wanted)
        if count == 0:
            raise Ended("connection closed")
        self._is_empty = self._short_reads_empty and count < wanted
        return count
