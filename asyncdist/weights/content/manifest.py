"""The manifest of a version: its tensors and the digests of their blocks. The publisher puts it into the store. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack
import numpy as np
from numpy.typing import NDArray

from asyncdist.errors import ProtocolError
from asyncdist.weights.content.digest import DIGEST_NBYTES
from asyncdist.weights.content.layout import WeightsLayout

_FORMAT = 1
"""Changes with the encoding, the layout rules and the digest."""


@dataclass(frozen=True)
class Manifest:
    """What a reader must know of a version before it copies the bytes.

    Attributes:
        layout: The places of its tensors.
        digests: The digest of each block.
    """

    layout: WeightsLayout
    digests: NDArray[np.uint64]

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb((_FORMAT, self.layout.describe(), self.digests.astype("<u8").tobytes()))
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Return the manifest that `encode` has written.

        Raises:
            ProtocolError: The bytes are damaged, or a publisher of another version of asyncdist wrote them.
        """
        try:
            number, description, digests = msgpack.unpackb(data)
        except (ValueError, TypeError, msgpack.UnpackException) as cause:
            raise ProtocolError(f"a manifest that cannot be read: {cause}") from cause
        if number != _FORMAT:
            raise ProtocolError(f"a manifest of format {number!r}: run the same asyncdist in all processes of the job")
        layout = WeightsLayout.of_description(description)
        # Before the blocks are counted, because a damaged shape may claim 2^50 bytes.
        if type(digests) is not bytes or len(digests) % DIGEST_NBYTES:
            raise ProtocolError("a manifest whose digests cannot be read")
        if layout.count_blocks() * DIGEST_NBYTES != len(digests):
            raise ProtocolError(
                f"a manifest of {layout.count_blocks()} blocks with {len(digests) // DIGEST_NBYTES} digests"
            )
        return cls(layout, np.frombuffer(digests, dtype="<u8"))
