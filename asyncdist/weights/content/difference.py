"""How a block differs from the same block of another version: the positions of the changed elements and their differences.

A step of training changes few elements of bfloat16 weights, and most of these by few units in the last place. The
difference of two blocks has

- the distance of each changed element from the one before it: ``u32`` number of bytes, then bytes, of which each 255 skips
  255 elements and each smaller one leads to a changed element;
- for each byte of an element, from the lowest: ``u32`` number of bytes, then this byte of the difference of each changed
  element. The difference d of the bits as signed integers is written as 2d, or -2d - 1 if d is negative, so that the high
  bytes of small differences are zero. Fewer bytes than changed elements are a zlib stream.

Elements are integers of the element's size here (at most 8 bytes), so that every dtype is restored bit by bit. An empty
difference is that of equal blocks. No I/O.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from asyncdist.errors import ProtocolError
from asyncdist.weights.content.digest import Bytes

_SIZE = struct.Struct("<I")
_SKIP = 255
_GROUP = 8
"""Elements that are first looked at together: numpy finds few true values in many more slowly than many in few."""
_MOST_CHANGED = 1 / 4
"""The part of changed elements above which a block is sent whole: finding them takes longer than a link of 1 Gbit/s."""
_MOST_NONZERO = 1 / 8
"""The part of nonzero bytes up to which zlib pays: it compresses such bytes ten times faster than others, and further."""


def difference(old: Bytes, new: Bytes, itemsize: int) -> bytes | None:
    """Return how a block has changed, for `restore`; None if the new block itself is the better way to send it.

    Both have the same number of bytes, a multiple of ``itemsize``.
    """
    itemsize = min(itemsize, 8)
    before, after = old.view(f"<u{itemsize}"), new.view(f"<u{itemsize}")
    changed = np.empty(-(-len(after) // _GROUP) * _GROUP, dtype=bool)
    changed[-_GROUP:] = False
    np.not_equal(before, after, out=changed[: len(after)])
    count = np.count_nonzero(changed)
    if count == 0:
        return b""
    if count > _MOST_CHANGED * len(after):
        return None
    groups = changed.view("<u8")
    numbers = np.flatnonzero(groups != 0)
    inner = np.flatnonzero(groups.take(numbers).view(bool))
    positions = (numbers * _GROUP).take(inner >> 3) + (inner & 7)
    parts = [_distances(positions)]
    signed = (after.take(positions) - before.take(positions)).view(f"<i{itemsize}")
    folded = (signed << 1) ^ (signed >> (8 * itemsize - 1))
    parts += [_packed(plane) for plane in np.ascontiguousarray(folded.view(np.uint8).reshape(count, itemsize).T)]
    encoded = b"".join(each for part in parts for each in (_SIZE.pack(len(part)), part))
    return encoded if len(encoded) < len(new) else None


def _distances(positions: NDArray[np.intp]) -> bytes:
    distances = np.diff(positions, prepend=-1)
    if distances.max() < _SKIP:
        return distances.astype(np.uint8).tobytes()
    skips = distances // _SKIP
    encoded = np.full(len(distances) + int(skips.sum()), _SKIP, dtype=np.uint8)
    encoded[np.cumsum(skips + 1) - 1] = distances - _SKIP * skips
    return encoded.tobytes()


def _packed(plane: Bytes) -> bytes:
    plain = plane.tobytes()
    if np.count_nonzero(plane) > _MOST_NONZERO * len(plane):
        return plain
    compressed = zlib.compress(plain, 1)
    return compressed if len(compressed) < len(plain) else plain


def restore(old: Bytes, changes: bytes | bytearray | memoryview, itemsize: int, new: Bytes) -> None:
    """Write the block that `difference` has compared with ``old`` to ``new``.

    Raises:
        ProtocolError: The difference is damaged, as far as its form shows; ``new`` has undefined bytes then.
    """
    itemsize = min(itemsize, 8)
    np.copyto(new, old)
    if not changes:
        return
    try:
        encoded: bytes | memoryview
        encoded, at = _part(changes, 0)
        distances = np.frombuffer(encoded, np.uint8)
        positions = np.cumsum(distances, dtype=np.int64)[distances != _SKIP] - 1
        count = len(positions)
        planes = np.empty((itemsize, count), dtype=np.uint8)
        for plane in planes:
            encoded, at = _part(changes, at)
            if len(encoded) < count:
                encoded = zlib.decompressobj().decompress(encoded, count)
            plane[:] = np.frombuffer(encoded, np.uint8)
        if at != len(changes):
            raise ValueError(f"{len(changes) - at} bytes are left")
        folded = np.ascontiguousarray(planes.T).view(f"<u{itemsize}").reshape(count)
        elements = new.view(f"<u{itemsize}")
        # A position that does not exist is an IndexError, and -1 would be the last element.
        if count and positions[0] < 0:
            raise ValueError("the first changed element is before the block")
        elements[positions] = elements.take(positions) + ((folded >> 1) ^ -(folded & 1))
    except (ValueError, IndexError, struct.error, zlib.error) as cause:
        raise ProtocolError(f"a difference of weights that cannot be read: {cause}") from cause


def _part(changes: bytes | bytearray | memoryview, at: int) -> tuple[memoryview, int]:
    """Return the part at a position, and the position behind it."""
    start = at + _SIZE.size
    end = start + _SIZE.unpack_from(changes, at)[0]
    if end > len(changes):
        raise ValueError("it ends too early")
    return memoryview(changes)[start:end], end
