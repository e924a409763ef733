"""The receiving half of a connection, without I/O: bytes in, and calls of the owner for the frames that they complete.

The driver passes the bytes that it has read to `Inbox.feed`. While `Inbox.room` is not empty, it may read straight into it,
the memory of a long message, and call `Inbox.filled` (`asyncdist.net.connection.channel`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from asyncdist.base.descriptors import close_all
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


class InboxOwner:
    __slots__ = ()

    def on_short(self, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]) -> None:
        raise NotImplementedError

    def on_opening(self, message: IncomingMessage) -> None:
        raise NotImplementedError

    def on_completed(self, message: IncomingMessage) -> None:
        raise NotImplementedError

    def on_withdrawn(self, message: IncomingMessage) -> None:
        """Note that the sender has given up a long message."""

    def on_frame(self, kind: int, body: bytes) -> None:
        raise ProtocolError(f"a frame of kind {kind}, which does not belong here: run the same asyncdist on both sides")

    def reply(self, kind: int, body: bytes) -> None:
        """Send a frame about shared memory. A connection without descriptors has none."""


class Inbox:
    """The receiving side of one connection in one process.

    A message that claims more than ``most_nbytes`` bytes is a ProtocolError, and so is one that is opened while
    ``most_open`` long messages are open. ``room`` is memory for the next bytes. `feed` takes them as well.
    """

    __slots__ = (
        "_chunk", "_chunk_left", "_descriptors", "_most_open", "_open", "_owner", "_rest", "_slots", "_staged",
        "_wanted", "heard", "is_closed", "most_nbytes", "room",
    )  # fmt: skip

    def __init__(self, owner: InboxOwner, *, most_nbytes: int, most_open: int = 1 << 16) -> None:
        self._owner, self._most_open = owner, most_open
        self.most_nbytes = most_nbytes
        self._rest = bytearray()
        """An unfinished frame, which is parsed when it has `_wanted` bytes."""
        self._wanted = HEADER_NBYTES
        self._descriptors: list[int] = []
        self._open: dict[int, IncomingMessage] = {}
        self._chunk: IncomingMessage | None = None
        """The message of the chunk whose body has arrived in part."""
        self.room: list[memoryview] = []
        self._chunk_left = 0
        self._staged: StagedParts | None = None
        self._slots = bytearray()
        self.is_closed = False
        self.heard = True
        """Whether bytes have arrived, or the connection has begun, since the owner last reset this."""

    @property
    def open_messages(self) -> list[IncomingMessage]:
        left = list(self._open.values())
        if self._chunk is not None and self._chunk not in left:
            left.append(self._chunk)
        return left

    @property
    def awaits_part(self) -> bool:
        """Whether the next part of a long message may follow."""
        return bool(self._open)

    @property
    def is_between_messages(self) -> bool:
        """Whether no message has arrived in part."""
        return not (self._rest or self._open or self._chunk)

    # -- bytes -------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Handle bytes that have arrived. Raises ProtocolError; the connection must then end."""
        self.heard = True
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < self._wanted:
                return
            data = bytes(rest)
            rest.clear()
        at, filled, owner = 0, len(data), self._owner
        unpack = HEADER.unpack_from
        if self._chunk is not None:
            at = self._take_part(memoryview(data))
        while filled - at >= HEADER_NBYTES and not self.is_closed:
            nbytes, kind, num_descriptors, count = unpack(data, at)
            end = at + HEADER_NBYTES + nbytes
            if kind == SHORT and end <= filled and not count and not num_descriptors:
                head = data[at + HEADER_NBYTES : end]
                at = end
                owner.on_short(head, (), ())
                continue
            check_header(nbytes, kind)
            if kind == CHUNK:
                if filled - at < HEADER_NBYTES + NUMBER.size:
                    self._wanted = HEADER_NBYTES + NUMBER.size
                    break
                at = self._begin_chunk(data, at + HEADER_NBYTES, nbytes)
                continue
            if end > filled:
                self._wanted = end - at
                break
            body = data[at + HEADER_NBYTES : end]
            at = end
            self._dispatch(kind, body, num_descriptors, count)
        else:
            self._wanted = HEADER_NBYTES
        if at < filled and not self.is_closed:
            rest += data[at:] if at else data

    def filled(self, count: int) -> None:
        """Handle ``count`` bytes that the driver has read into `room`."""
        self.heard = True
        room, left = self.room, count
        while left:
            part = min(room[0].nbytes, left)
            left -= part
            if part == room[0].nbytes:
                del room[0]
            else:
                room[0] = room[0][part:]
        self._chunk_arrived(count)

    def add_descriptors(self, descriptors: Sequence[int]) -> None:
        """Take descriptors, which belong to the frames that follow. Raises ProtocolError if there are too many."""
        self._descriptors.extend(descriptors)
        if len(self._descriptors) > 2 * MOST_DESCRIPTORS:
            raise ProtocolError("descriptors that belong to no message")

    def return_slots(self) -> None:
        """Return the slots of shared memory that have been read to the sender."""
        if self._slots and not self.is_closed:
            slots, self._slots = bytes(self._slots), bytearray()
            self._owner.reply(SLOTS_FREE, slots)

    # -- frames ------------------------------------------------------------------------------------

    def _dispatch(self, kind: int, body: bytes, num_descriptors: int, count: int) -> None:
        if kind == PIECE:
            self._copy_piece(*PIECE_BODY.unpack(_exactly(body, PIECE_BODY)))
        elif kind == SHORT:
            head, buffers = unpack_short(body, count)
            self._owner.on_short(head, buffers, self._take(num_descriptors))
        elif kind == OPENING and not num_descriptors:
            self._begin(body)
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

    def _begin(self, body: bytes) -> None:
        number, head, sizes = unpack_opening(body, self.most_nbytes)
        if number in self._open or len(self._open) >= self._most_open:
            raise ProtocolError(f"message {number} is opened twice, or more than {self._most_open} are open")
        message = IncomingMessage(head, sizes)
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

    def _begin_chunk(self, data: bytes, at: int, nbytes: int) -> int:
        """Begin a chunk, whose body begins in ``data``; return the position behind what has arrived of it."""
        if nbytes <= NUMBER.size:
            raise ProtocolError("an empty chunk: the stream is damaged")
        (number,) = NUMBER.unpack_from(data, at)
        at, nbytes = at + NUMBER.size, nbytes - NUMBER.size
        message = self._chunk = self._message(number, nbytes)
        self.room, self._chunk_left = message.room(nbytes), nbytes
        return at + self._take_part(memoryview(data)[at:])

    def _take_part(self, data: memoryview) -> int:
        """Take the bytes of the present chunk from the beginning of ``data``; return how many."""
        part, message = data[: self._chunk_left], self._chunk
        assert message is not None
        if self.room:
            scatter(part, self.room)
            self.filled(part.nbytes)
            return part.nbytes
        if message.sink is not None and part:
            message.sink.write(part)
        self._chunk_arrived(part.nbytes)
        return part.nbytes

    def _chunk_arrived(self, nbytes: int) -> None:
        self._chunk_left -= nbytes
        if not self._chunk_left:
            message, self._chunk, self.room = self._chunk, None, []
            # None if a sink has closed the connection.
            if message is not None:
                self._complete_if_all(message)

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
        """Handle nothing more. Return the long messages that are open."""
        self.is_closed = True
        close_all(self._descriptors)
        self._descriptors = []
        if self._staged is not None:
            self._staged.close()
        left = self.open_messages
        self._open, self._chunk, self.room = {}, None, []
        return left

    def drop(self, message: IncomingMessage, error: Exception) -> None:
        """Write no further byte into the memory of a message. Its handler gets it with this error."""
        message.drop(error)
        if message is self._chunk:
            self.room = []


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
