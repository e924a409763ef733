"""The form of a store's log on disk: a header, then frames, each with its checksums. Both kinds of log have it.

    header   MAGIC, 8 random bytes: the log's *salt*, u32 CRC of both
    frame    mark, u64 length, u32 CRC of the body, u32 CRC of all that seeded with the salt; then the body

A frame is what was written at once: it is there as a whole or not at all. The header has a checksum of its own, so that a
damaged length is not taken for a frame that never got its end; the salt keeps a log that somebody stored as a value from
being taken for frames of ours.

The file store's frames are the requests of its members (`Record`), those of the daemon the changes of its state
(`changes`).
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple
from zlib import crc32

import msgpack

from asyncdist.errors import ProtocolError, UsageError
from asyncdist.store.messages import decode_request, messages_in
from asyncdist.store.operations import Op

MAGIC = b"asyncdist store log 2\n"
SALT_NBYTES = 8
HEADER_NBYTES = len(MAGIC) + SALT_NBYTES + 4

_MARK = b"\xadfrm"
_HEAD = struct.Struct("<4sQI")
_SEAL = struct.Struct("<I")
FRAME_NBYTES = _HEAD.size + _SEAL.size
"""What a frame is longer than its body."""

Data = bytes | memoryview


class DamagedError(ProtocolError):
    """Bytes that are no frame, or not the one that was written. ``offset`` is where it begins."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(f"at offset {offset}: {why}")
        self.offset = offset
        self.why = why

    def after(self, nbytes: int) -> DamagedError:
        """Return the same, of a log of which ``nbytes`` lie before what was looked at."""
        return DamagedError(self.offset + nbytes, self.why)


def header(salt: bytes) -> bytes:
    """Return what a log begins with."""
    return MAGIC + salt + _SEAL.pack(crc32(MAGIC + salt))


def salt_of(data: Data) -> bytes:
    """Return the salt of a log that begins with ``data``; raises DamagedError if it is none."""
    if bytes(data[: len(MAGIC)]) != MAGIC or len(data) < HEADER_NBYTES:
        raise DamagedError(0, "it does not begin like a store's log")
    salt = bytes(data[len(MAGIC) :][:SALT_NBYTES])
    if data[:HEADER_NBYTES] != header(salt):
        raise DamagedError(0, "the checksum of its header is wrong")
    return salt


def frame_head(salt: bytes, *body: Data) -> bytes:
    """Return what goes in front of a body, which may come in pieces."""
    checksum = 0
    for piece in body:
        checksum = crc32(piece, checksum)
    head = _HEAD.pack(_MARK, sum(map(len, body)), checksum)
    return head + _SEAL.pack(_sealed(salt, head))


def next_frame(data: Data, start: int, salt: bytes) -> tuple[int, int] | None:
    """Return where the body of the frame at ``start`` begins and ends; None if its end is not there yet.

    Raises DamagedError where a checksum is wrong.
    """
    begin = start + FRAME_NBYTES
    if begin > len(data):
        return None
    nbytes, checksum = read_head(data[start:begin], start, salt)
    end = begin + nbytes
    if end > len(data):
        return None
    check_body(data[begin:end], checksum, start)
    return begin, end


def read_head(head: Data, offset: int, salt: bytes) -> tuple[int, int]:
    """Return the length and the checksum of the body that follows a frame's head; raises DamagedError."""
    mark, nbytes, checksum = _HEAD.unpack_from(head)
    (seal,) = _SEAL.unpack_from(head, _HEAD.size)
    if mark != _MARK or seal != _sealed(salt, head[: _HEAD.size]):
        raise DamagedError(offset, "no frame begins here, or its length is damaged")
    return int(nbytes), int(checksum)


def check_body(body: Data, checksum: int, offset: int) -> None:
    """Raise DamagedError for a body that is not what was written into the frame at ``offset``."""
    if crc32(body) != checksum:
        raise DamagedError(offset, f"the checksum of a frame of {len(body)} bytes is wrong")


def has_frame_after(data: bytes, start: int, salt: bytes) -> bool:
    """Say whether any frame begins beyond ``start``: then what is damaged at ``start`` is not what was written last."""
    while (start := data.find(_MARK, start + 1)) >= 0:
        head = data[start : start + _HEAD.size]
        seal = data[start + _HEAD.size : start + FRAME_NBYTES]
        if len(seal) == _SEAL.size and _SEAL.unpack(seal)[0] == _sealed(salt, head):
            return True
    return False


def _sealed(salt: bytes, head: Data) -> int:
    return crc32(head, crc32(salt))


# -- the frames of a file store ----------------------------------------------------------------------


class Record(NamedTuple):
    """One request of one member: what `StoreState.execute` takes."""

    member: tuple[str, ...]
    request: int
    op: Op
    args: tuple[Any, ...]


def encode_record(record: Record) -> bytes:
    """Return the body of a record's frame. Raises UsageError for what cannot be written."""
    try:
        packed: bytes = msgpack.packb((record.member, record.request, record.op, *record.args), use_bin_type=True)
        return packed
    except ValueError as error:
        raise UsageError(f"store {record.op.name.lower()}: {error}") from None


def decode_record(body: bytes) -> Record:
    """Return the record in a frame's body; raises ProtocolError."""
    messages = list(messages_in(body))
    member, *request = messages[0] if len(messages) == 1 and type(messages[0]) is list and messages[0] else [None]
    if type(member) is not list or not all(type(part) is str for part in member):
        raise ProtocolError("a record that names no member")
    return Record(tuple(member), *decode_request(request))
