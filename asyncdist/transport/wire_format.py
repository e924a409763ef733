"""The header in front of every message between two ranks: fixed size, little-endian, readable at a glance.

    bytes   field        meaning
    0-7     channel      which group (and whether it is point-to-point traffic)
    8-11    sequence     which operation of the group; the tag in point-to-point traffic
    12-15   part         which generator of that operation (a segment, one tensor of a list)
    16-23   fingerprint  what operation the sender believes this to be (see `Fingerprint`)
    24-31   nbytes       length of what follows
    32      kind         DATA, or a control message: ABORT, GOODBYE, CALLED, PROBE, WAITING
    33-35   zero

Bytes 0-15 are the *key*: a receiver matches a message to what it has posted by that key alone, first come first served,
so that it never has to unpack them. Parts are spread over lanes by ``part % lanes``; order holds inside a lane.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HEADER = struct.Struct("<QIIQQBxxx")
HEADER_NBYTES = HEADER.size
KEY = struct.Struct("<QII")
KEY_NBYTES = KEY.size
_TAIL = struct.Struct("<QQBxxx")

DATA, ABORT, GOODBYE, CALLED, PROBE, WAITING = 1, 2, 3, 4, 5, 6
KINDS = frozenset((DATA, ABORT, GOODBYE, CALLED, PROBE, WAITING))


def pack_key(channel: int, sequence: int, part: int) -> bytes:
    """Return the 16 bytes by which a message finds its receiver."""
    return KEY.pack(channel, sequence & 0xFFFFFFFF, part)


def pack_header(key: bytes, fingerprint: int, nbytes: int, kind: int = DATA) -> bytes:
    """Return the header of a message of ``nbytes`` bytes under ``key``."""
    return key + pack_tail(fingerprint, nbytes, kind)


pack_tail: Callable[[int, int, int], bytes] = _TAIL.pack
"""``pack_tail(fingerprint, nbytes, kind)`` returns what follows the key in a header."""


unpack_tail: Callable[..., tuple[int, int, int]] = functools.partial(_TAIL.unpack_from, offset=KEY_NBYTES)
"""``unpack_tail(header)`` returns what follows the key in a whole header: (fingerprint, nbytes, kind)."""


def channel_of(*names: object) -> int:
    """Return the 64-bit channel number of a name; equal names give equal numbers in every process."""
    import hashlib

    text = "\0".join(map(str, names)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


# -- fingerprints ---------------------------------------------------------------------------------

_FIELDS = (("collective", 6), ("dtype", 6), ("reduction", 4), ("root", 12), ("count", 24), ("shape", 12))


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A rank's description of a call in 64 bits, which can be decoded for an error message.

    ``root`` is 1 + the root's group rank (0: no root), ``count`` the number of elements modulo 2^24 and
    ``shape`` a 12-bit checksum of the shape; dtype and reduction are numbers of `buffers` and `ops`. A field that an
    operation does not compare is zero on every rank.
    """

    collective: int
    dtype: int = 0
    reduction: int = 0
    root: int = 0
    count: int = 0
    shape: int = 0

    def pack(self) -> int:
        word = 0
        for name, width in _FIELDS:
            word = word << width | (getattr(self, name) & ((1 << width) - 1))
        return word

    @classmethod
    def unpack(cls, word: int) -> Fingerprint:
        values = {}
        for name, width in reversed(_FIELDS):
            values[name] = word & ((1 << width) - 1)
            word >>= width
        return cls(**values)

    def differences(self, other: Fingerprint) -> list[str]:
        """Return the names of the fields in which two fingerprints differ."""
        return [name for name, _ in _FIELDS if getattr(self, name) != getattr(other, name)]


def shape_checksum(shape: Sequence[int]) -> int:
    """Return a 12-bit checksum of a shape."""
    return zlib.crc32(repr(tuple(shape)).encode()) & 0xFFF
