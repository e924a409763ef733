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


def digest(data: Bytes) -> int:
    """Return the digest of a block, a number below 2^64."""
    global _of_rows
    num_rows, rest = divmod(len(data), _ROW_NBYTES)
    hashed = hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=DIGEST_NBYTES)
    if rest:
        hashed.update(data[-rest:].data)
    total = int.from_bytes(hashed.digest(), "little")
    if num_rows:
        rows = data[: num_rows * _ROW_NBYTES].view("<u8").reshape(num_rows, _COLUMNS)
        of_rows = _of_rows
        if num_rows > len(of_rows):
            of_rows = _of_rows = _factors(num_rows, 1 << 32) | np.uint64(1)
        total += int(np.dot(np.add.reduce(rows, axis=0), _OF_COLUMNS))
        total += int(np.dot(np.add.reduce(rows, axis=1), of_rows[:num_rows]))
    return total % _MODULUS
