"""The format of a store's log on disk: a header, then frames, each with its checksums.

    header   MAGIC, the log's salt (8 random bytes), u64 number of the first frame; u32 CRC of these
    frame    mark, u64 length, u64 number, u32 CRC of the body; u32 CRC of these, seeded with the salt; then the body

A reader ignores an incomplete frame. The head of a frame has a checksum of its own, so that a reader does not mistake a
damaged length for a torn frame. Because of the salt, a reader does not mistake a log that is stored as a value for frames
of this log. Frames are numbered without a gap, so that a reader detects a frame that was removed, repeated or moved. It
cannot detect that the last frames were removed.

The body of a frame is a request in a file store's log (`store.client.file`), and the changes of one commit in a daemon's
log (`change_log`).
"""

from __future__ import annotations

import struct
from typing import BinaryIO
from zlib import crc32

from asyncdist.errors import ProtocolError

MAGIC = b"asyncdist store log 4\n"
SALT_NBYTES = 8

_FIRST = struct.Struct("<Q")
_MARK = b"\xadfrm"
_HEAD = struct.Struct("<4sQQI")
_SEAL = struct.Struct("<I")
HEADER_NBYTES = len(MAGIC) + SALT_NBYTES + _FIRST.size + _SEAL.size
FRAME_NBYTES = _HEAD.size + _SEAL.size
"""Bytes of a frame besides its body."""

Data = bytes | memoryview


class DamagedError(ProtocolError):
    """A frame is damaged. ``offset`` is where it begins."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(f"at offset {offset}: {why}")
        self.offset = offset
        self.why = why


class MisplacedError(DamagedError):
    """An intact frame has the wrong number. No crash of a writer causes this."""


def header(salt: bytes, first: int = 0) -> bytes:
    start = MAGIC + salt + _FIRST.pack(first)
    return start + _SEAL.pack(crc32(start))


def read_header(data: Data) -> tuple[bytes, int]:
    """Return the salt and the number of the first frame of a log that begins with ``data``.

    Raises:
        DamagedError: ``data`` does not begin with a header, or the header's checksum is wrong.
    """
    if bytes(data[: len(MAGIC)]) != MAGIC or len(data) < HEADER_NBYTES:
        raise DamagedError(0, "it does not begin like a store's log")
    salt = bytes(data[len(MAGIC) :][:SALT_NBYTES])
    (first,) = _FIRST.unpack_from(data, len(MAGIC) + SALT_NBYTES)
    if data[:HEADER_NBYTES] != header(salt, first):
        raise DamagedError(0, "the checksum of its header is wrong")
    return salt, int(first)


def frame_head(salt: bytes, number: int, *body: Data) -> bytes:
    checksum = 0
    for piece in body:
        checksum = crc32(piece, checksum)
    head = _HEAD.pack(_MARK, sum(map(len, body)), number, checksum)
    return head + _SEAL.pack(_sealed(salt, head))


def read_frame(file: BinaryIO, left: int, offset: int, salt: bytes, number: int) -> bytes | None:
    """Read frame ``number`` at ``offset`` of a log; return its body, or None if the frame is incomplete.

    Args:
        file: Stands at the frame.
        left: How many bytes follow in the log.

    Raises:
        MisplacedError: It is another frame of this log.
        DamagedError: A checksum is wrong.
    """
    if left < FRAME_NBYTES:
        return None
    head = file.read(FRAME_NBYTES)
    mark, nbytes, found, checksum = _HEAD.unpack_from(head)
    (seal,) = _SEAL.unpack_from(head, _HEAD.size)
    if mark != _MARK or seal != _sealed(salt, head[: _HEAD.size]):
        raise DamagedError(offset, "no frame begins here, or its head is damaged")
    if found != number:
        raise MisplacedError(
            offset, f"frame {found} stands where frame {number} belongs: a frame was removed, repeated or moved"
        )
    if nbytes > left - FRAME_NBYTES:
        return None
    body = file.read(nbytes)
    if crc32(body) != checksum:
        raise DamagedError(offset, f"the checksum of a frame of {nbytes} bytes is wrong")
    return body


def has_frame_after(data: bytes, start: int, salt: bytes) -> bool:
    """Return whether a frame begins beyond ``start``. If so, the damage at ``start`` is not in the last frame."""
    while (start := data.find(_MARK, start + 1)) >= 0:
        head = data[start : start + _HEAD.size]
        seal = data[start + _HEAD.size : start + FRAME_NBYTES]
        if len(seal) == _SEAL.size and _SEAL.unpack(seal)[0] == _sealed(salt, head):
            return True
    return False


def _sealed(salt: bytes, head: Data) -> int:
    return crc32(head, crc32(salt))
