"""How a block differs from the same block of another version: the positions of the changed elements and their changed bits.

A step of training changes few elements of bfloat16 weights, and most of these by few units in the last place. The
difference of two blocks has

- the distance of each changed element from the one before it: ``u32`` number of bytes, then bytes, of which each 255 skips
  255 elements and each smaller one leads to a changed element;
- for each byte of an element, from the lowest: ``u32`` number of bytes, then the changed bits of this byte of each changed
  element. No bytes are zeros, as most high bytes are, and fewer than changed elements are a zlib stream.

Elements are integers of the element's size here (at most 8 bytes), so that every dtype is restored bit by bit. An empty
difference is that of equal blocks. No I/O.
"""

from __future__ import annotations

import struct
import threading
import zlib

import numpy as np
from numpy.typing import NDArray

from asyncdist.errors import ProtocolError
from asyncdist.weights.content.digest import Bytes, digest

_SIZE = struct.Struct("<I")
_SKIP = 255
_GROUP = 8
"""Elements that are first looked at together: numpy finds few true values in many more slowly than many in few."""
_MOST_CHANGED = 1 / 4
"""The part of changed elements above which a block is sent whole: finding them takes longer than a link of 1 Gbit/s."""
_MOST_GROUPS = 0.9
"""The part of groups that have changed where as many elements have at random."""
_MOST_NONZERO = 1 / 8
"""The part of nonzero bytes up to which zlib pays: it compresses such bytes ten times faster than others, and further."""


class _Scratch(threading.local):
    """Memory of a thread, because new memory for each block takes a fifth of the time of a difference."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        if len(self._memory) < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]


_scratch = _Scratch()


def difference(old: Bytes, new: Bytes, itemsize: int) -> bytes | None:
    """Return how a block has changed, for `restore`; None if the new block itself is the better way to send it.

    Both have the same number of bytes, a multiple of ``itemsize``.
    """
    itemsize = min(itemsize, 8)
    count = len(new) // itemsize
    padded = -(-count // _GROUP) * _GROUP
    memory = _scratch.take(padded * (itemsize + 1))
    bits = memory[padded : padded + len(new)].view(f"<u{itemsize}")
    np.bitwise_xor(old.view(bits.dtype), new.view(bits.dtype), out=bits)
    changed = memory[:padded].view(bool)
    changed[count:] = False
    np.not_equal(bits, 0, out=changed[:count])
    groups = changed.view("<u8")
    numbers = np.flatnonzero(groups != 0)
    if not len(numbers):
        return b""
    if len(numbers) > _MOST_GROUPS * len(groups):
        return None
    inner = np.flatnonzero(groups.take(numbers).view(bool))
    if len(inner) > _MOST_CHANGED * count:
        return None
    positions = (numbers * _GROUP).take(inner >> 3) + (inner & 7)
    planes = np.ascontiguousarray(bits.take(positions).view(np.uint8).reshape(-1, itemsize).T)
    parts = [_distances(positions), *map(_packed, planes)]
    encoded = b"".join(each for part in parts for each in (_SIZE.pack(len(part)), part))
    return encoded if len(encoded) < len(new) else None


def _distances(positions: NDArray[np.intp]) -> bytes:
    distances = positions.copy()
    distances[0] += 1
    distances[1:] -= positions[:-1]
    long = np.flatnonzero(distances >= _SKIP)
    skips = distances.take(long) // _SKIP
    distances[long] -= _SKIP * skips
    encoded = distances.astype(np.uint8)
    return np.insert(encoded, np.repeat(long, skips), _SKIP).tobytes() if len(long) else encoded.tobytes()


def _packed(plane: Bytes) -> bytes:
    plain, nonzero = plane.tobytes(), np.count_nonzero(plane)
    if not nonzero or nonzero > _MOST_NONZERO * len(plane):
        return plain if nonzero else b""
    compressed = zlib.compress(plain, 1)
    return compressed if len(compressed) < len(plain) else plain


def restore(old: Bytes, changes: bytes | bytearray | memoryview, itemsize: int, new: Bytes) -> int:
    """Write the block that `difference` has compared with ``old`` to ``new``, and return the digest of what was written.

    Raises:
        ProtocolError: The difference is damaged, as far as its form shows; ``new`` is as before then.
    """
    itemsize = min(itemsize, 8)
    elements = new.view(f"<u{itemsize}")
    positions, bits = np.empty(0, np.intp), np.empty(0, elements.dtype)
    try:
        if changes:
            encoded: bytes | memoryview
            encoded, at = _part(changes, 0)
            distances = np.frombuffer(encoded, np.uint8)
            positions = np.cumsum(distances, dtype=np.intp)[distances != _SKIP] - 1
            count = len(positions)
            planes = np.empty((itemsize, count), dtype=np.uint8)
            for plane in planes:
                encoded, at = _part(changes, at)
                if 0 < len(encoded) < count:
                    encoded = zlib.decompressobj().decompress(encoded, count)
                plane[:] = np.frombuffer(encoded, np.uint8) if encoded else 0
            if at != len(changes):
                raise ValueError(f"{len(changes) - at} bytes are left")
            if count and not 0 <= positions[0] <= positions[-1] < len(elements):
                raise ValueError("a changed element is outside of the block")
            bits = np.ascontiguousarray(planes.T).view(elements.dtype).reshape(count)
    except (ValueError, struct.error, zlib.error) as cause:
        raise ProtocolError(f"a difference of weights that cannot be read: {cause}") from cause

    def fill(start: int, stop: int) -> None:
        np.copyto(new[start:stop], old[start:stop])
        first, end = np.searchsorted(positions, (start // itemsize, stop // itemsize))
        elements[positions[first:end]] ^= bits[first:end]

    return digest(new, fill)


def _part(changes: bytes | bytearray | memoryview, at: int) -> tuple[memoryview, int]:
    """Return the part at a position, and the position behind it."""
    start = at + _SIZE.size
    end = start + _SIZE.unpack_from(changes, at)[0]
    if end > len(changes):
        raise ValueError("it ends too early")
    return memoryview(changes)[start:end], end
