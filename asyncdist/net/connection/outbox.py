"""The sending half of a connection: frames that wait, and long messages that are sent in parts between them.

One thread at a time adds messages, and one at a time flushes. Another thread may call `pulse` at any time, so that the peer
hears this process while a callback or a call of the program holds up its loop. The lock is held for system calls that do
not block. `asyncdist.net.connection.part_sender` drives an outbox over an asyncio transport.
"""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from asyncdist.base.descriptors import close_all
from asyncdist.errors import AsyncdistError, SharedMemoryError, UsageError
from asyncdist.net.connection.frames import (
    BEAT_FRAME,
    CHUNK,
    CHUNK_NBYTES,
    HEADER,
    HEADER_NBYTES,
    MOST_BUFFERS,
    MOST_DESCRIPTORS,
    NUMBER,
    PIECE,
    PIECE_BODY,
    SHORT,
    SHORT_NBYTES,
    STAGING,
    STAGING_BODY,
    WITHDRAWN,
    frame,
    pack_opening,
    pack_short,
)
from asyncdist.net.connection.messages import OutgoingMessage
from asyncdist.net.connection.staging import NUM_SLOTS, SLOT_NBYTES, StagingArea
from asyncdist.net.security.tls import TlsSocket

_QUANTUM = 4 << 20
"""About the most bytes of long messages that one flush of a channel sends, so that other callbacks get their turn."""
_BATCH = 512
"""The most frames that one system call sends."""
_MOST_VIEWS = 64
"""The most buffers of which one chunk has bytes."""


class Flushed(enum.Enum):
    ALL = "nothing can be sent at present"
    BLOCKED = "the socket is full"
    MORE = "more can be sent after other callbacks"


class _DescriptorFrame(NamedTuple):
    """A frame with descriptors, which are closed when it has been sent."""

    whole: bytes
    descriptors: Sequence[int]

    def __len__(self) -> int:
        return len(self.whole)


class Sending(Protocol):
    """What an outbox needs of a socket. The methods raise BlockingIOError while the socket is full."""

    def send(self, data: bytes, /) -> int: ...

    def sendmsg(self, buffers: Sequence[bytes | memoryview], /) -> int: ...

    def shutdown(self, how: int, /) -> None: ...


class Outbox:
    """The sending side of one connection in one process.

    Args:
        sock: A non-blocking socket.
        stages: Whether long messages may pass through shared memory.
        most_nbytes: The most bytes of a message.
        in_order: Whether a long message begins when the one before it has ended, and a flush sends one part. Else all
            advance together.
    """

    def __init__(self, sock: Sending, *, stages: bool = False, most_nbytes: int = 0, in_order: bool = False) -> None:
        self.error: OSError | None = None
        """Why nothing can be sent any more; None while the connection is not known to be broken."""
        self._sock = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self._stages, self._most_nbytes, self._in_order = stages, most_nbytes, in_order
        self._lock = threading.Lock()
        self._frames: deque[bytes | _DescriptorFrame] = deque()
        self._frames_nbytes = 0
        self._partial: list[memoryview] = []
        """The rest of what a system call has sent in part."""
        self._long: deque[OutgoingMessage] = deque()
        self._leaving: OutgoingMessage | None = None
        """The message whose last part is in `_partial`."""
        self._finished: list[OutgoingMessage] = []
        """The messages that have left, and whose senders `flush` tells."""
        self._number = 0
        self._staging: StagingArea | None = None
        self._ready_staging: StagingArea | None = None
        """The staging area, once the receiver has mapped it."""
        self._is_closed = False
        """Whether nothing can be sent any more."""

    @property
    def unsent_nbytes(self) -> int:
        """The bytes of frames that wait, without the long messages."""
        return self._frames_nbytes + sum(view.nbytes for view in self._partial)

    @property
    def is_empty(self) -> bool:
        return not (self._frames or self._partial or self._long or (self._tls is not None and self._tls.unsent))

    @property
    def first_long(self) -> OutgoingMessage | None:
        """The long message that is being sent, or is the next one."""
        return self._long[0] if self._long else None

    # -- adding ------------------------------------------------------------------------------------

    def add(
        self, head: bytes, buffers: Sequence[memoryview] = (), descriptors: Sequence[int] = ()
    ) -> OutgoingMessage | None:
        """Add a message after those added before; return it if it is long, None if it is short.

        Raises UsageError if it is too long, or has too many buffers or descriptors.
        """
        nbytes = len(head)
        for buffer in buffers:
            nbytes += buffer.nbytes
        if descriptors and (len(descriptors) > MOST_DESCRIPTORS or nbytes > SHORT_NBYTES):
            raise UsageError(
                f"a message of at most {SHORT_NBYTES} bytes carries at most {MOST_DESCRIPTORS} descriptors, not one of "
                f"{nbytes} with {len(descriptors)}"
            )
        if nbytes <= SHORT_NBYTES and len(buffers) < MOST_BUFFERS:
            if not buffers and not descriptors:
                self._frames.append(HEADER.pack(nbytes, SHORT, 0, 0) + head)
                self._frames_nbytes += HEADER_NBYTES + nbytes
            else:
                self._add_frame(pack_short(head, buffers, len(descriptors)), descriptors)
            return None
        if len(head) > SHORT_NBYTES or len(buffers) > MOST_BUFFERS or nbytes > self._most_nbytes:
            raise UsageError(
                f"a message has a head of at most {SHORT_NBYTES} bytes, at most {MOST_BUFFERS} buffers and at most "
                f"{self._most_nbytes} bytes (ASYNCDIST_MAX_MESSAGE_NBYTES); this one has {len(head)}, {len(buffers)} and "
                f"{nbytes}"
            )
        self._number = self._number + 1 & 0xFFFFFFFF
        message = OutgoingMessage(self._number, [each if each.format == "B" else each.cast("B") for each in buffers])
        sizes = [buffer.nbytes for buffer in buffers]
        self._add_frame(pack_opening(message.number, head, sizes))
        if not message.cursor.left:
            message.finish()
            return message
        self._long.append(message)
        if self._stages and self._staging is None:
            self._make_staging()
        return message

    def enqueue(self, message: bytes | OutgoingMessage) -> None:
        """Add the body of a short message, or a long message whose ``opening`` leaves in its turn."""
        if isinstance(message, bytes):
            self._frames.append(HEADER.pack(len(message), SHORT, 0, 0) + message)
            self._frames_nbytes += HEADER_NBYTES + len(message)
        else:
            self._long.append(message)

    def add_frame(self, kind: int, body: bytes = b"") -> None:
        self._add_frame(frame(kind, body))

    def _add_frame(self, whole: bytes, descriptors: Sequence[int] = ()) -> None:
        self._frames.append(_DescriptorFrame(whole, _duplicates(descriptors)) if descriptors else whole)
        self._frames_nbytes += len(whole)

    def withdraw(self, message: OutgoingMessage, error: AsyncdistError | None = None) -> None:
        """Send no further part of a long message, and read its memory no more. Idempotent."""
        if message.done:
            return
        with self._lock:
            # A part that is sent in part is completed from a copy.
            self._partial = [memoryview(bytes(view)) for view in self._partial]
            if message is self._leaving:
                self._leaving = None
            # Else all of it has left, and `flush` has not told its sender yet.
            elif message in self._long:
                self._long.remove(message)
                self._add_frame(frame(WITHDRAWN, NUMBER.pack(message.number)))
        message.finish(error)

    # -- sending -----------------------------------------------------------------------------------

    def flush(self) -> Flushed:
        """Send what can be sent now. The receiving half reports a broken connection, after what the peer has sent."""
        left = Flushed.ALL
        finished: list[OutgoingMessage] = []
        try:
            with self._lock:
                try:
                    left = self._send_all()
                except BlockingIOError:
                    left = Flushed.BLOCKED
                except OSError as error:
                    self._break_off(error)
                if self._finished:
                    finished, self._finished = self._finished, []
            for message in finished:
                message.finish()
        except BaseException:
            # After an interrupt, `close` finishes those that are left.
            self._finished += finished
            raise
        return left

    def pulse(self) -> None:
        """Send a heartbeat, after the rest of a frame that has been sent in part. Any thread may call it."""
        if not self._lock.acquire(blocking=False):
            # The thread that holds it is sending.
            return
        try:
            if not self._is_closed:
                self._send_partial()
                self._send_bytes(BEAT_FRAME)
        except BlockingIOError:
            pass
        except OSError as error:
            self._break_off(error)
        finally:
            self._lock.release()

    def _send_all(self) -> Flushed:
        """Send frames, and parts between them. Raises BlockingIOError when the socket is full, and OSError."""
        if self._is_closed:
            return Flushed.ALL
        budget = 1 if self._in_order else _QUANTUM
        if self._partial or self._leaving is not None or self._tls is not None:
            self._send_partial()
        frames = self._frames
        while True:
            if frames:
                data = frames[0]
                if len(frames) > 1 or not isinstance(data, bytes):
                    self._send_frames()
                    continue
                # Most flushes send one frame: no call for it.
                frames.popleft()
                self._frames_nbytes -= len(data)
                try:
                    count = self._sock.send(data)
                except BlockingIOError:
                    count = 0
                if count < len(data):
                    self._partial = [memoryview(data)[count:]]
                    self._send_partial()
            elif not self._long or (self._ready_staging is not None and not self._ready_staging.free):
                return Flushed.BLOCKED if self._tls is not None and self._tls.unsent else Flushed.ALL
            elif budget > 0:
                budget -= self._send_part()
            else:
                return Flushed.MORE

    def _send_partial(self) -> None:
        if self._tls is not None:
            self._tls.flush()
        while self._partial:
            self._sent(self._partial, self._sock.sendmsg(self._partial[:_MOST_VIEWS]))
        if self._leaving is not None:
            self._finished.append(self._leaving)
            self._leaving = None

    def _send_bytes(self, data: bytes) -> None:
        try:
            count = self._sock.send(data)
        except BlockingIOError:
            count = 0
        if count < len(data):
            self._partial = [memoryview(data)[count:]]
            self._send_partial()

    def _send_frames(self) -> None:
        frames = self._frames
        first = frames[0]
        if isinstance(first, _DescriptorFrame):
            frames.popleft()
            self._frames_nbytes -= len(first)
            self._send_descriptors(first)
            return
        batch: list[bytes] = []
        while frames and len(batch) < _BATCH and not isinstance(first := frames[0], _DescriptorFrame):
            batch.append(first)
            frames.popleft()
        data = batch[0] if len(batch) == 1 else b"".join(batch)
        self._frames_nbytes -= len(data)
        self._send_bytes(data)

    def _send_descriptors(self, message: _DescriptorFrame) -> None:
        assert isinstance(self._sock, socket.socket)
        try:
            count = socket.send_fds(self._sock, [message.whole], message.descriptors)
        except BlockingIOError:
            self._frames.appendleft(message)
            self._frames_nbytes += len(message)
            raise
        close_all(message.descriptors)
        self._partial = [memoryview(message.whole)[count:]] if count < len(message) else []
        self._send_partial()

    # -- the parts of long messages ----------------------------------------------------------------

    def _send_part(self) -> int:
        """Send a part of the first long message, and return its bytes."""
        message = self._long[0]
        if not message.is_wanted():
            self._abandon(message)
            return 0
        staging, cursor, before = self._ready_staging, message.cursor, message.cursor.left
        if staging is not None:
            slot = staging.put(cursor.take(SLOT_NBYTES, SLOT_NBYTES))
        else:
            views = cursor.take(CHUNK_NBYTES, _MOST_VIEWS)
        nbytes = before - cursor.left
        if not cursor.left:
            self._long.popleft()
        elif not self._in_order:
            self._long.rotate(-1)
        if staging is not None:
            if not cursor.left:
                self._finished.append(message)
            self._send_bytes(frame(PIECE, PIECE_BODY.pack(message.number, slot, nbytes)))
            return nbytes
        if not cursor.left:
            self._leaving = message
        head = HEADER.pack(NUMBER.size + nbytes, CHUNK, 0, 0) + NUMBER.pack(message.number) if nbytes else b""
        self._partial = [memoryview(message.opening + head), *views]
        message.opening = b""
        self._send_partial()
        return nbytes

    def _abandon(self, message: OutgoingMessage) -> None:
        """Withdraw the message that is being sent. Of one that has not begun the peer learns nothing."""
        self._long.popleft()
        if not message.opening:
            self._add_frame(frame(WITHDRAWN, NUMBER.pack(message.number)))
        self._finished.append(message)

    def _make_staging(self) -> None:
        try:
            staging = self._staging = StagingArea()
        except SharedMemoryError:
            self._stages = False
            return
        self._add_frame(frame(STAGING, STAGING_BODY.pack(NUM_SLOTS, SLOT_NBYTES), 1), [staging.descriptor])
        staging.forget_descriptor()

    def staging_answered(self, *, is_ready: bool) -> None:
        """Note whether the receiver has mapped the staging area."""
        self._ready_staging = self._staging if is_ready else None
        if self._ready_staging is None:
            self._stages = False
            staging, self._staging = self._staging, None
            if staging is not None:
                staging.close()

    def slots_returned(self, slots: bytes) -> None:
        """Note that the receiver has returned slots. Raises ProtocolError."""
        if self._staging is not None:
            self._staging.take_back(slots)

    # -- the end -----------------------------------------------------------------------------------

    def close(self, error: AsyncdistError) -> None:
        """Send nothing more. The long messages fail."""
        with self._lock:
            self._is_closed = True
            self._drop_frames()
            failed = [*self._long, *([self._leaving] if self._leaving is not None else ())]
            finished, self._finished, self._leaving = self._finished, [], None
            self._long.clear()
            if self._staging is not None:
                self._staging.close()
        for message in finished:
            message.finish()
        for message in failed:
            message.finish(error)

    def _break_off(self, error: OSError) -> None:
        """Send nothing more after an error: a later frame would follow a part of another one."""
        self.error, self._is_closed = error, True
        self._drop_frames()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _drop_frames(self) -> None:
        for each in self._frames:
            if isinstance(each, _DescriptorFrame):
                close_all(each.descriptors)
        self._frames.clear()
        self._partial = []
        self._frames_nbytes = 0

    def _sent(self, views: list[memoryview], count: int) -> None:
        """Remove the bytes that have been sent from the views."""
        while count:
            first = views[0]
            if first.nbytes > count:
                views[0] = first[count:]
                return
            count -= first.nbytes
            del views[0]


def _duplicates(descriptors: Sequence[int]) -> list[int]:
    """Return duplicates of all descriptors. Raises OSError, and leaves none."""
    found: list[int] = []
    try:
        for each in descriptors:
            found.append(os.dup(each))  # noqa: PERF401 - those before a failure are closed
    except OSError:
        close_all(found)
        raise
    return found
