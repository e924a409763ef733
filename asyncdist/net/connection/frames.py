"""The frames of a connection, without I/O: a header of `HEADER_NBYTES` bytes and a body. Channels and the store use them.

A short message is one frame. A long one is an OPENING, which has its head and the sizes of its buffers, and any number of
parts, between which other frames may stand. The body of a CHUNK is a part. A PIECE names the slot of shared memory in which
a part lies (see `asyncdist.net.connection.staging`), and SLOTS_FREE returns slots to the sender.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from asyncdist.errors import ProtocolError

HEADER = struct.Struct("<IBBH")
"""Bytes of the body, kind, number of descriptors that came with the frame, number of buffers of a short message."""
HEADER_NBYTES = HEADER.size
NUMBER = struct.Struct("<I")
"""The number of a long message, unique among the open messages of its sender."""
PIECE_BODY = struct.Struct("<IHI")
"""Number of the message, slot, bytes."""
STAGING_BODY = struct.Struct("<HI")
"""Number of slots, bytes of a slot."""

HELLO, SHORT, OPENING, CHUNK, PIECE, SLOTS_FREE, STAGING, STAGING_READY, WITHDRAWN, BEAT, GOODBYE = range(11)
"""HELLO begins a connection to a store: all versions of its protocol can read it (`asyncdist.store.protocol.codec`)."""

SHORT_NBYTES = 32 << 10
"""The most bytes of the head and the buffers of a message that is sent as one frame, and of the head of a long one."""
MOST_BUFFERS = 1 << 16
"""The most buffers of one message."""
MOST_DESCRIPTORS = 16
"""The most descriptors that come with one message."""
CHUNK_NBYTES = 256 << 10
"""The most bytes of a chunk. A short message waits for at most one."""
_MOST_FRAME_NBYTES = SHORT_NBYTES + 8 * MOST_BUFFERS + 64
"""The most bytes of the body of any other frame."""

BEAT_FRAME = HEADER.pack(0, BEAT, 0, 0)


def check_header(nbytes: int, kind: int) -> None:
    """Raise ProtocolError for the header of a frame that no sender makes."""
    most = CHUNK_NBYTES + NUMBER.size if kind == CHUNK else _MOST_FRAME_NBYTES
    if kind > GOODBYE or nbytes > most:
        raise ProtocolError(f"a frame of kind {kind} that claims {nbytes} bytes: the stream is damaged")


def pack_short(head: bytes, buffers: Sequence[memoryview], num_descriptors: int) -> bytes:
    sizes = [buffer.nbytes for buffer in buffers]
    nbytes = 4 * len(sizes) + len(head) + sum(sizes)
    header = HEADER.pack(nbytes, SHORT, num_descriptors, len(sizes))
    return b"".join((header, struct.pack(f"<{len(sizes)}I", *sizes), head, *buffers))


def unpack_short(body: bytes, count: int) -> tuple[bytes, list[memoryview]]:
    """Return the head and the buffers of a short message. Raises ProtocolError."""
    try:
        sizes = struct.unpack_from(f"<{count}I", body)
    except struct.error as cause:
        raise ProtocolError(f"a truncated message: {cause}") from cause
    at = len(body) - sum(sizes)
    if at < 4 * count:
        raise ProtocolError(f"a message of {len(body)} bytes that claims {sum(sizes)}: the stream is damaged")
    whole, head = memoryview(body), body[4 * count : at]
    return head, [whole[start:end] for start, end in _ranges(sizes, at)]


def pack_opening(number: int, head: bytes, sizes: Sequence[int]) -> bytes:
    body = struct.pack(f"<II{len(sizes)}Q", number, len(sizes), *sizes) + head
    return HEADER.pack(len(body), OPENING, 0, 0) + body


def unpack_opening(body: bytes, most: int) -> tuple[int, bytes, tuple[int, ...]]:
    """Return the number, the head and the sizes of a long message. Raises ProtocolError if it claims more than ``most``."""
    try:
        number, count = struct.unpack_from("<II", body)
        sizes = struct.unpack_from(f"<{count}Q", body, 8)
    except struct.error as cause:
        raise ProtocolError(f"a truncated opening: {cause}") from cause
    if sum(sizes) > most:
        raise ProtocolError(
            f"a message that claims {sum(sizes)} bytes, of at most {most} (ASYNCDIST_MAX_MESSAGE_NBYTES; in the store "
            "ASYNCDIST_STORE_MAX_VALUE_NBYTES)"
        )
    return number, body[8 + 8 * count :], sizes


def frame(kind: int, body: bytes = b"", num_descriptors: int = 0) -> bytes:
    return HEADER.pack(len(body), kind, num_descriptors, 0) + body


def _ranges(sizes: Sequence[int], at: int) -> Iterator[tuple[int, int]]:
    for size in sizes:
        yield at, at + size
        at += size


class BufferCursor:
    """A position in the bytes of several buffers in a row, each a contiguous memory."""

    __slots__ = ("_buffers", "_index", "_offset", "left")

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._index = self._offset = 0
        self.left = sum(buffer.nbytes for buffer in buffers)
        """The bytes behind the position."""

    def take(self, most: int, most_views: int = 64) -> list[memoryview]:
        """Return the next bytes, and advance: at most ``most`` bytes in at most ``most_views`` views."""
        views: list[memoryview] = []
        while most > 0 and self._index < len(self._buffers) and len(views) < most_views:
            buffer = self._buffers[self._index]
            view = buffer[self._offset : self._offset + most]
            if view.nbytes:
                views.append(view)
                most -= view.nbytes
                self.left -= view.nbytes
                self._offset += view.nbytes
            if self._offset == buffer.nbytes:
                self._index, self._offset = self._index + 1, 0
        return views
