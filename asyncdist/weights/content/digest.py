"""Digests of blocks of weights: 64 bits that change with the bytes, at twice the speed of a copy.

The whole rows of 4096 bytes of a block, as words w of 64 bits, enter by the multilinear hash ::

    sum of w[r, c] * (a[r] + b[c]), modulo 2^64

with fixed odd a and even b, and the rest of the block by BLAKE2b. Every change of one word changes the digest, because
a[r] + b[c] is odd; any other accident goes unnoticed with a probability of about 2^-63. The sum is that of two passes of
additions, along the rows and along the columns; a cryptographic hash takes ten times as long as the copy of the bytes. The
digest detects memory and transfers that went wrong, and no forger: only holders of the job's token can connect, and TLS
protects connections whose network is not trusted.

D. Lemire and O. Kaser, "Strongly universal string hashing is fast", The Computer Journal 57 (2014), analyse multilinear
hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
"""Contiguous memory as bytes."""

DIGEST_NBYTES = 8
_COLUMNS = 512
_ROW_NBYTES = 8 * _COLUMNS
_MODULUS = 1 << 64


def _factors(count: int, seed: int) -> NDArray[np.uint64]:
    """Return the numbers of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) from a seed on."""
    z = np.arange(seed, seed + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_OF_COLUMNS = _factors(_COLUMNS, 1) & ~np.uint64(1)
_of_rows = _factors(256, 1 << 32) | np.uint64(1)
"""As many as the largest block so far has rows."""

_PIECE_NBYTES = 64 * _ROW_NBYTES
"""What is filled and digested at a time, so that it is in the cache of the core."""


def digest(data: Bytes, fill: Callable[[int, int], object] | None = None) -> int:
    """Return the digest of a block, a number below 2^64.

    ``fill`` writes the bytes from a position to another one, just before they are digested.
    """
    global _of_rows
    num_rows, rest = divmod(len(data), _ROW_NBYTES)
    if num_rows > len(_of_rows):
        _of_rows = _factors(num_rows, 1 << 32) | np.uint64(1)
    total, step = 0, len(data) if fill is None else _PIECE_NBYTES
    for start in range(0, len(data), step or 1):
        stop = min(start + step, len(data))
        if fill is not None:
            fill(start, stop)
        first, end = start // _ROW_NBYTES, stop // _ROW_NBYTES
        if first < end:
            rows = data[start : end * _ROW_NBYTES].view("<u8").reshape(end - first, _COLUMNS)
            total += int(np.dot(np.add.reduce(rows, axis=0), _OF_COLUMNS))
            total += int(np.dot(np.add.reduce(rows, axis=1), _of_rows[first:end]))
    hashed = hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=DIGEST_NBYTES)
    if rest:
        hashed.update(data[-rest:].data)
    return (int.from_bytes(hashed.digest(), "little") + total) % _MODULUS
