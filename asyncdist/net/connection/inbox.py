"""The receiving half of a channel: reads frames, and puts the parts of long messages into their memory."""

from __future__ import annotations

import array
import mmap
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

from asyncdist.base.descriptors import close_all, describe_exhaustion
from asyncdist.errors import ProtocolError, SharedMemoryError
from asyncdist.net.connection.frames import (
    BEAT,
    CHUNK,
    HEADER,
    HEADER_NBYTES,
    MOST_DESCRIPTORS,
    NUMBER,
    OPENING,
    PIECE,
    PIECE_BODY,
    SHORT,
    SLOTS_FREE,
    STAGING,
    STAGING_BODY,
    STAGING_READY,
    WITHDRAWN,
    check_header,
    unpack_opening,
    unpack_short,
)
from asyncdist.net.connection.messages import IncomingMessage
from asyncdist.net.connection.staging import StagedParts
from asyncdist.net.security.tls import TlsSocket

_BUFFER_NBYTES = 64 << 10
"""A read of this size has hundreds of short messages. Pages that no read has filled take no memory."""
_MOST_OPEN = 1 << 16
"""The most long messages of one sender that are open at a time."""
_ANCILLARY_NBYTES = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4) if hasattr(socket, "CMSG_SPACE") else 0


class StreamEnded(Exception):
    """The peer has closed the connection, or it broke; the message is the reason."""


class InboxOwner(Protocol):
    """The interface that handles the frames of an inbox."""

    def on_short(self, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]) -> None: ...

    def on_opening(self, message: IncomingMessage) -> None: ...

    def on_completed(self, message: IncomingMessage) -> None: ...

    def on_withdrawn(self, message: IncomingMessage) -> None: ...

    def on_frame(self, kind: int, body: bytes) -> None: ...

    def reply(self, kind: int, body: bytes) -> None: ...


class Inbox:
    """The receiving side of one channel in one process.

    Args:
        sock: A non-blocking socket.
        owner: Handles the frames.
        takes_descriptors: Whether descriptors may come with the frames.
        most_nbytes: The most bytes of a message; one that claims more ends the channel.
    """

    def __init__(
        self, sock: socket.socket | TlsSocket, owner: InboxOwner, *, takes_descriptors: bool, most_nbytes: int
    ) -> None:
        self._sock, self._owner = sock, owner
        self._takes_descriptors, self._most_nbytes = takes_descriptors, most_nbytes
        self._buffer = _new_buffer(_BUFFER_NBYTES)
        self._filled = 0
        self._descriptors: list[int] = []
        self._open: dict[int, IncomingMessage] = {}
        self._chunk: IncomingMessage | None = None
        """The message of the chunk whose body has arrived in part, with the memory and the bytes that are left."""
        self._room: list[memoryview] = []
        self._chunk_left = 0
        self._staged: StagedParts | None = None
        self._slots = bytearray()
        self._is_closed = False
        self.heard = True
        """Whether bytes have arrived, or the channel has begun, since the owner last reset this."""

    @property
    def open_messages(self) -> list[IncomingMessage]:
        """The long messages that have begun and not ended."""
        return list(self._open.values())

    def read(self) -> None:
        """Read what has arrived, once, and handle the complete frames.

        Raises:
            StreamEnded: The connection has ended.
            ProtocolError: The bytes are not those of a channel.
        """
        try:
            self._receive()
            self._parse()
            while isinstance(self._sock, TlsSocket) and self._sock.unread and not self._is_closed:
                self._receive()
                self._parse()
        except BlockingIOError:
            return
        except OSError as cause:
            raise StreamEnded(cause.strerror or str(cause)) from cause
        finally:
            if self._slots and not self._is_closed:
                slots, self._slots = bytes(self._slots), bytearray()
                self._owner.reply(SLOTS_FREE, slots)

    # -- reading -----------------------------------------------------------------------------------

    def _receive(self) -> None:
        free = self._buffer[self._filled :]
        buffers = [*self._room, free] if self._room else [free]
        if not self._takes_descriptors:
            count = self._sock.recvmsg_into(buffers)[0]
        else:
            assert isinstance(self._sock, socket.socket)
            count, ancillary, flags, _ = self._sock.recvmsg_into(buffers, _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
            if ancillary or flags & socket.MSG_CTRUNC:
                self._take_descriptors(ancillary, flags)
        if count == 0:
            raise StreamEnded("connection closed")
        self.heard = True
        if self._room:
            count -= self._fill_room(count)
        self._filled += count

    def _take_descriptors(self, ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            raise StreamEnded(f"descriptors of the peer were lost: this process {describe_exhaustion(OSError())}")
        if len(self._descriptors) > 2 * MOST_DESCRIPTORS:
            raise ProtocolError("descriptors that belong to no message")

    def _fill_room(self, count: int) -> int:
        """Note that up to ``count`` bytes have arrived in the memory of the open chunk; return how many."""
        room, taken = self._room, 0
        while room and taken < count:
            part = min(room[0].nbytes, count - taken)
            taken += part
            if part == room[0].nbytes:
                del room[0]
            else:
                room[0] = room[0][part:]
        self._chunk_arrived(taken)
        return taken

    def _chunk_arrived(self, nbytes: int) -> None:
        self._chunk_left -= nbytes
        if not self._chunk_left:
            message, self._chunk, self._room = self._chunk, None, []
            assert message is not None
            self._complete_if_all(message)

    # -- parsing -----------------------------------------------------------------------------------

    def _parse(self) -> None:
        """Handle the frames in the buffer, and move the rest to its beginning."""
        at, filled, buffer, owner = 0, self._filled, self._buffer, self._owner
        unpack = HEADER.unpack_from
        if self._chunk is not None:
            # The message is dropped, and its bytes came into the buffer.
            at = min(filled, self._chunk_left) if not self._room else 0
            if at:
                self._chunk_arrived(at)
        while filled - at >= HEADER_NBYTES and not self._is_closed:
            nbytes, kind, num_descriptors, count = unpack(buffer, at)
            end = at + HEADER_NBYTES + nbytes
            if kind == SHORT and end <= filled and not count and not num_descriptors:
                head = bytes(buffer[at + HEADER_NBYTES : end])
                at = end
                owner.on_short(head, (), ())
                continue
            check_header(nbytes, kind)
            if kind == CHUNK:
                if filled - at < HEADER_NBYTES + NUMBER.size:
                    break
                at = self._begin_chunk(at + HEADER_NBYTES, nbytes, filled)
                continue
            if end > filled:
                if HEADER_NBYTES + nbytes > len(buffer):
                    self._grow(HEADER_NBYTES + nbytes)
                    buffer = self._buffer
                break
            body = bytes(buffer[at + HEADER_NBYTES : end])
            at = end
            self._dispatch(kind, body, num_descriptors, count)
        if self._is_closed:
            return
        if at:
            # A memoryview's slices may overlap.
            buffer[: filled - at] = buffer[at:filled]
        self._filled = filled - at

    def _grow(self, nbytes: int) -> None:
        larger = _new_buffer(nbytes)
        larger[: len(self._buffer)] = self._buffer
        self._buffer = larger

    def _dispatch(self, kind: int, body: bytes, num_descriptors: int, count: int) -> None:
        if kind == PIECE:
            self._copy_piece(*PIECE_BODY.unpack(_exactly(body, PIECE_BODY)))
        elif kind == SHORT:
            head, buffers = unpack_short(body, count)
            self._owner.on_short(head, buffers, self._take(num_descriptors))
        elif kind == OPENING:
            self._begin(body, num_descriptors)
        elif kind == WITHDRAWN:
            (number,) = NUMBER.unpack(_exactly(body, NUMBER))
            self._owner.on_withdrawn(self._message(number, ends=True))
        elif kind == STAGING:
            self._map_staging(body, num_descriptors)
        elif kind != BEAT:
            self._owner.on_frame(kind, body)

    def _take(self, count: int) -> list[int]:
        taken, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        if len(taken) < count:
            close_all(taken)
            raise ProtocolError(f"a frame with {count} descriptors, of which {len(taken)} have arrived")
        return taken

    # -- long messages -----------------------------------------------------------------------------

    def _begin(self, body: bytes, num_descriptors: int) -> None:
        number, head, sizes = unpack_opening(body, self._most_nbytes)
        if number in self._open or len(self._open) >= _MOST_OPEN:
            raise ProtocolError(f"message {number} is opened twice, or more than {_MOST_OPEN} are open")
        message = IncomingMessage(head, sizes, self._take(num_descriptors))
        if message.left:
            self._open[number] = message
        self._owner.on_opening(message)
        if not message.left:
            message.room(0)
            self._owner.on_completed(message)

    def _message(self, number: int, nbytes: int = 0, *, ends: bool = False) -> IncomingMessage:
        message = self._open.get(number)
        if message is None or nbytes > message.left:
            raise ProtocolError(f"{nbytes} bytes of message {number}, which is not open or has fewer")
        if ends or nbytes == message.left:
            del self._open[number]
        return message

    def _begin_chunk(self, at: int, nbytes: int, filled: int) -> int:
        """Copy the part of a chunk that has arrived, and return the position behind it in the buffer."""
        if nbytes <= NUMBER.size:
            raise ProtocolError("an empty chunk: the stream is damaged")
        (number,) = NUMBER.unpack_from(self._buffer, at)
        at, nbytes = at + NUMBER.size, nbytes - NUMBER.size
        message = self._chunk = self._message(number, nbytes)
        room, arrived = message.room(nbytes), min(nbytes, filled - at)
        self._room, self._chunk_left = room, nbytes
        if room:
            scatter(self._buffer[at : at + arrived], room)
            self._fill_room(arrived)
        else:
            self._chunk_arrived(arrived)
        return at + arrived

    def _copy_piece(self, number: int, slot: int, nbytes: int) -> None:
        if self._staged is None or not nbytes:
            raise ProtocolError("a piece in shared memory that was not announced")
        message = self._message(number, nbytes)
        # The view must have ended before the handler may end the channel, because it keeps the mapping.
        with self._staged.part(slot, nbytes) as part:
            if room := message.room(nbytes):
                scatter(part, room)
        self._slots.append(slot)
        self._complete_if_all(message)

    def _complete_if_all(self, message: IncomingMessage) -> None:
        if not message.left:
            self._owner.on_completed(message)

    def _map_staging(self, body: bytes, num_descriptors: int) -> None:
        num_slots, slot_nbytes = STAGING_BODY.unpack(_exactly(body, STAGING_BODY))
        descriptors = self._take(num_descriptors)
        try:
            if len(descriptors) != 1 or self._staged is not None:
                raise ProtocolError("a staging area without its descriptor, or a second one")
            self._staged = StagedParts(descriptors[0], num_slots, slot_nbytes)
        except SharedMemoryError:
            pass
        finally:
            close_all(descriptors)
        self._owner.reply(STAGING_READY, bytes([self._staged is not None]))

    def close(self) -> list[IncomingMessage]:
        """Read nothing more. Return the long messages that are open."""
        self._is_closed = True
        close_all(self._descriptors)
        self._descriptors = []
        if self._staged is not None:
            self._staged.close()
        left = self.open_messages
        if self._chunk is not None and self._chunk not in left:
            left.append(self._chunk)
        self._open, self._chunk, self._room = {}, None, []
        return left

    def drop(self, message: IncomingMessage, error: Exception) -> None:
        """Write no further byte into the memory of a message. Its handler gets it with this error."""
        message.drop(error)
        if message is self._chunk:
            self._room = []


def _new_buffer(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY))


def scatter(part: memoryview, room: Sequence[memoryview]) -> None:
    """Copy bytes into several memories, as far as they go."""
    at = 0
    for view in room:
        count = min(view.nbytes, part.nbytes - at)
        view[:count] = part[at : at + count]
        at += count
        if at == part.nbytes:
            return


def _exactly(body: bytes, layout: struct.Struct) -> bytes:
    if len(body) != layout.size:
        raise ProtocolError(f"a frame of {len(body)} bytes where {layout.size} were expected: the stream is damaged")
    return body
