"""The header of every message between two ranks: fixed size, little-endian.

    bytes   field        meaning
    0-5     channel      the group, and whether this is point-to-point traffic
    6-7     generation   how often the group's members have regrouped: frames of earlier generations are dropped
    8-11    sequence     the operation of the group; the tag in point-to-point traffic; the number of an agreement
    12-15   part         the generator of that operation (a segment, one tensor of a list)
    16-23   fingerprint  the sender's call (see `Fingerprint`)
    24-31   nbytes       length of the body
    32      kind         DATA, or a control message: ABORT, GOODBYE, CALLED, PROBE, WAITING, BEAT, SUSPECT, HEARD, AGREE,
                         PAGE
    33-35   zero

Bytes 0-15 are the *key*. A receiver matches a message with the oldest posted receive that has the same key, and never
unpacks the key. A message is sent on lane ``part % lanes``; messages of one lane stay in order.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncdist.base.ops import PREPARES, Collective, ReduceOp
from asyncdist.kernel.memory.buffers import DTYPES

KEY = struct.Struct("<QII")
_TAIL = struct.Struct("<QQBxxx")
KEY_NBYTES = KEY.size
HEADER_NBYTES = KEY_NBYTES + _TAIL.size
_NAME_NBYTES = 6
_GENERATIONS = 0xFFFF

DATA, ABORT, GOODBYE, CALLED, PROBE, WAITING, BEAT, SUSPECT, HEARD, AGREE, PAGE = range(1, 12)
KINDS = frozenset((DATA, ABORT, GOODBYE, CALLED, PROBE, WAITING, BEAT, SUSPECT, HEARD, AGREE, PAGE))


def pack_key(channel: int, sequence: int, part: int) -> bytes:
    """Return the 16 bytes by which a message is matched with its receive."""
    return KEY.pack(channel, sequence & 0xFFFFFFFF, part)


def pack_header(key: bytes, fingerprint: int, nbytes: int, kind: int = DATA) -> bytes:
    """Return the header of a message of ``nbytes`` bytes under ``key``."""
    return key + pack_tail(fingerprint, nbytes, kind)


pack_tail: Callable[[int, int, int], bytes] = _TAIL.pack
"""``pack_tail(fingerprint, nbytes, kind)`` returns the part of a header after the key."""


unpack_tail: Callable[..., tuple[int, int, int]] = functools.partial(_TAIL.unpack_from, offset=KEY_NBYTES)
"""``unpack_tail(header)`` returns the fields of a whole header after the key: (fingerprint, nbytes, kind)."""


def channel_of(*names: object) -> int:
    """Return the 64-bit channel number of a name, equal in every process, in generation 0."""
    text = "\0".join(map(str, names)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=_NAME_NBYTES).digest(), "little")


def in_generation(number: int, generation: int) -> int:
    """Return the channel number of generation 0 in another one, which its upper bits are."""
    return (generation & _GENERATIONS) << 8 * _NAME_NBYTES | number


def name_of(key: bytes) -> bytes:
    """Return the part of a key that the generations of a group have in common."""
    return key[:_NAME_NBYTES]


def generation_of(key: bytes) -> int:
    """Return the generation of a key, modulo 2^16."""
    return int.from_bytes(key[_NAME_NBYTES:8], "little")


def is_earlier(generation: int, other: int) -> bool:
    """Return whether a generation is before another one. Both are modulo 2^16."""
    return 0 < other - generation & _GENERATIONS <= _GENERATIONS // 2


# -- fingerprints ---------------------------------------------------------------------------------

_FIELDS = (("collective", 6), ("dtype", 6), ("reduction", 4), ("root", 12), ("count", 24), ("shape", 12))


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A description of a call in 64 bits, which can be decoded for an error message.

    A field that an operation does not compare is zero on every rank.

    Attributes:
        collective: The number of the `Collective`, plus `PREPARES` if the ranks prepare it for many calls.
        dtype: The number of the dtype in `memory.buffers`.
        reduction: The number of the `ReduceOp`.
        root: 1 + the root's group rank; 0 without a root.
        count: The number of elements modulo 2^24.
        shape: A 12-bit checksum of the shape.
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


def prepared_fingerprint(word: int) -> int:
    """Return the fingerprint with which ranks prepare the call that has the fingerprint ``word``."""
    return word + (PREPARES << sum(width for _, width in _FIELDS[1:]))


_AFTER_DTYPE = sum(width for _, width in _FIELDS[2:])
_DTYPE_MASK = (1 << _FIELDS[1][1]) - 1


def dtype_number(word: int) -> int:
    """Return the field ``dtype`` of a packed fingerprint, faster than `Fingerprint.unpack`."""
    return word >> _AFTER_DTYPE & _DTYPE_MASK


RUNS = -1
"""Ends the layout of an all-gather whose messages carry several blocks: other ranks must not send each block alone."""


def shape_checksum(shape: Sequence[int]) -> int:
    """Return a 12-bit checksum of a shape."""
    return zlib.crc32(repr(tuple(shape)).encode()) & 0xFFF


# -- in words ---------------------------------------------------------------------------------------


def describe_call(call: Fingerprint, rank: int, other_call: Fingerprint, peer: int) -> str:
    """Return one clause: the calls of two ranks, and the fields in which they differ."""
    own, other, differences = call_in_words(call), call_in_words(other_call), call.differences(other_call)
    if not call.collective:
        return f"rank {peer} called {other} where rank {rank} called something else, long ago"
    if differences == ["shape"]:
        or_form = (
            ", or one with a list and the other with one tensor" if call.collective == Collective.all_gather else ""
        )
        return f"rank {rank} and rank {peer} called {own} on tensors of different shapes{or_form}"
    # Both ends of a message have the fingerprint of a send, and the receiver compares.
    if call.collective == other_call.collective == Collective.send:
        own = call_in_words(call, "recv")
    return f"rank {rank} called {own} while rank {peer} called {other} (different {', '.join(differences)})"


def call_in_words(call: Fingerprint, name: str = "") -> str:
    """Return a call in source form, under ``name`` if given: ``all_reduce(8 x float32, SUM)``."""
    if not name:
        prepares = call.collective > PREPARES
        name = _member(Collective, call.collective - PREPARES * prepares) + "_init" * prepares
    details = []
    if call.dtype:
        dtype = str(DTYPES.get(call.dtype, f"dtype {call.dtype}")).removeprefix("torch.")
        details.append(f"{call.count} x {dtype}")
    elif call.collective == Collective.send:
        details.append("objects")
    if call.reduction:
        details.append(_member(ReduceOp, call.reduction))
    if call.root:
        details.append(f"root {call.root - 1}")
    return f"{name}({', '.join(details)})"


def _member(kind: type[Collective] | type[ReduceOp], number: int) -> str:
    try:
        return kind(number).name
    except ValueError:
        return f"unknown ({number})"
