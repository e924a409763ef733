"""The messages by which a reader gets a version from a process that has it. No I/O.

A message is the head of a message of a channel: msgpack, the kind first and then the number that the reader gave to its
request.

    reader                                              source
    ASK entry, selection, first block, maps, known,  →
        base
                                                     ←  BLOCKS first block, digests; the blocks are its buffers:
                                                        one that is shorter is a difference from that of the base
                                                     ←  MAPPED segment, bytes; with a descriptor unless it is known
                                                     ←  ALIVE: nothing is here yet
                                                     ←  REFUSED reason
    END                                              →  no more blocks; or: the mapped memory is not read any more
                                                     ←  CLOSED segment: it will not be used again; without a request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from asyncdist.errors import ProtocolError
from asyncdist.weights.content.layout import BLOCK_NBYTES

ASK, END, BLOCKS, MAPPED, ALIVE, REFUSED, CLOSED = range(1, 8)

_MOST_BLOCKS = 128
"""The most blocks of one message, so that its digests fit into a head."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a reader asks for.

    Attributes:
        number: The number of the request, which its messages carry.
        entry: The entry of the source for this version. A source that gives the version up and gets it again has another
            entry, and another place in the order by which readers never wait for each other.
        selection: The key of the selection; empty for all of the version.
        parts: The description of the selection, or None for all. It travels as a buffer, because it may be long.
        first: The first block that the reader lacks.
        maps: Whether the reader wants to map the memory, once it is complete.
        known: The segments that the reader has mapped before.
        base: The key of a version that the reader has, so that differences from its blocks will do; or empty. It is a
            second buffer, which a source that knows no differences does not read.
    """

    number: int
    entry: str
    selection: str
    parts: Any
    first: int
    maps: bool
    known: Sequence[str]
    base: str = ""

    def encode(self) -> tuple[bytes, list[memoryview]]:
        head = msgpack.packb([ASK, self.number, self.entry, self.selection, self.first, self.maps, list(self.known)])
        buffers = [] if self.parts is None and not self.base else [memoryview(msgpack.packb(self.parts))]
        return head, [*buffers, memoryview(self.base.encode())] if self.base else buffers

    @classmethod
    def decode(cls, fields: Sequence[Any], buffers: Sequence[memoryview]) -> Question:
        try:
            number, entry, selection, first, maps, known = fields
            parts = msgpack.unpackb(buffers[0]) if buffers else None
            base = bytes(buffers[1]).decode() if len(buffers) > 1 else ""
            if not (type(number) is int and type(first) is int and first >= 0 and isinstance(entry, str)):
                raise ProtocolError(f"a question with the fields {fields!r}")
            return cls(number, entry, str(selection), parts, first, bool(maps), [str(each) for each in known], base)
        except (TypeError, ValueError, msgpack.UnpackException) as cause:
            raise ProtocolError(f"a question for weights that cannot be read: {cause}") from cause


def encode(kind: int, *fields: Any) -> bytes:
    packed: bytes = msgpack.packb([kind, *fields])
    return packed


def decode(head: bytes) -> tuple[int, list[Any]]:
    """Return the kind and the fields of a message. Raises ProtocolError."""
    try:
        kind, *fields = msgpack.unpackb(head)
    except (TypeError, ValueError, msgpack.UnpackException) as cause:
        raise ProtocolError(f"a message about weights that cannot be read: {cause}") from cause
    if type(kind) is not int or not fields:
        raise ProtocolError(f"a message about weights of kind {kind!r}")
    return kind, fields


def group_end(sizes: Sequence[int], first: int, limit: int, most_nbytes: int = BLOCK_NBYTES) -> int:
    """Return the end of the blocks from ``first`` on that travel in one message. Those before ``limit`` are here."""
    nbytes, at = 0, first
    while at < limit and at - first < _MOST_BLOCKS and (at == first or nbytes + sizes[at] <= most_nbytes):
        nbytes += sizes[at]
        at += 1
    return at
