"""Where the tensors of a version lie in its memory, and the blocks in which the memory is copied and verified. No I/O.

The tensors follow each other, each contiguous and aligned to a cache line. A block is a part of one tensor, so that an
error in a block names its tensor. The publisher puts the manifest into the store: the layout and the digests of the blocks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray

from asyncdist.errors import ProtocolError, UnsupportedError
from asyncdist.kernel import ALIGNMENT, DTYPE_NUMBERS, DTYPES
from asyncdist.weights.content.digest import DIGEST_NBYTES

BLOCK_NBYTES = 1 << 20
"""The most bytes of a block. A host passes a block on as soon as it has it."""
_FORMAT = 1
"""Of a manifest. Changes with the encoding, the layout rules and the digest."""
_MOST_NBYTES = 1 << 50
"""More than any version has; a larger one is damage."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor of a version.

    Attributes:
        name: Its name in the state dict.
        offset: Its first byte in the memory of the version.
        shared_with: The tensor whose memory it is, with another name: parameters may be tied. None for one with its own.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    shared_with: str | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Block:
    """At most `BLOCK_NBYTES` bytes of a tensor, copied and verified together; `offset` is in the version's memory."""

    place: TensorPlace
    offset: int
    nbytes: int


class WeightsLayout:
    """The places of the tensors of a version.

    ``ties`` has the name of a tensor with memory of its own, by the name of another one that shares this memory.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
        ties: Mapping[str, str] | None = None,
    ) -> None:
        ties = ties or {}
        self.places: dict[str, TensorPlace] = {}
        end = 0
        for name, dtype, shape in tensors:
            if name not in ties:
                place = self.places[name] = TensorPlace(name, dtype, shape, end)
                end += -(-place.nbytes // ALIGNMENT) * ALIGNMENT
        for name, dtype, shape in tensors:
            if name in ties:
                self.places[name] = TensorPlace(name, dtype, shape, self.places[ties[name]].offset, ties[name])
        self.nbytes = end
        """Bytes of the memory of a version."""

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks, in the order of their offsets."""
        return [
            Block(place, place.offset + start, min(BLOCK_NBYTES, place.nbytes - start))
            for place in self.places.values()
            if place.shared_with is None
            for start in range(0, place.nbytes, BLOCK_NBYTES)
        ]

    def count_blocks(self) -> int:
        """Return the number of blocks, without making them."""
        return sum(-(-place.nbytes // BLOCK_NBYTES) for place in self.places.values() if place.shared_with is None)

    @cached_property
    def key(self) -> str:
        """A text that is equal for equal layouts."""
        return hashlib.blake2b(msgpack.packb(self.describe()), digest_size=12).hexdigest()

    def describe(self) -> list[list[object]]:
        return [
            [place.name, DTYPE_NUMBERS[place.dtype], list(place.shape), place.shared_with]
            for place in self.places.values()
        ]

    @classmethod
    def of_description(cls, description: Sequence[Sequence[Any]]) -> WeightsLayout:
        """Return the layout that `describe` has described. Raises ProtocolError for anything else."""
        try:
            tensors: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
            ties: dict[str, str] = {}
            for name, number, shape, shared_with in description:
                if type(name) is not str or not all(type(size) is int and size >= 0 for size in shape):
                    raise ProtocolError(f"a manifest with a tensor {name!r} of shape {shape!r}")
                tensors.append((name, DTYPES[number], tuple(shape)))
                if shared_with is not None:
                    ties[name] = str(shared_with)
            layout = cls(tensors, ties)
        except (KeyError, TypeError, ValueError) as cause:
            raise ProtocolError(f"a manifest that cannot be read: {type(cause).__name__}: {cause}") from cause
        if layout.nbytes > _MOST_NBYTES or len(layout.places) != len(tensors):
            raise ProtocolError(f"a manifest of {len(tensors)} tensors with {layout.nbytes} bytes")
        return layout


def layout_of(tensors: Mapping[str, torch.Tensor]) -> WeightsLayout:
    """Return the layout of a version of these tensors. Tensors that are the same memory share a place.

    Raises:
        UnsupportedError: A tensor is not dense, is distributed, or has no shape yet.
    """
    found: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors.items():
        _check_publishable(name, tensor)
        if tensor.numel() and not tensor.is_meta:
            memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
            first = found.setdefault(memory, name)
            if first != name:
                ties[name] = first
    return WeightsLayout([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()], ties)


def _check_publishable(name: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedError for a tensor that cannot be copied as plain memory."""
    if isinstance(tensor, (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)):
        raise UnsupportedError(f"{name} belongs to a lazy module and has no shape yet: run one forward first")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{name} is a {tensor.layout} tensor: only dense tensors can be published")
    if hasattr(tensor, "full_tensor"):
        raise UnsupportedError(
            f"{name} is a distributed tensor: publish a dict of whole tensors, which full_tensor() makes on all ranks"
        )
    if tensor.dtype not in DTYPE_NUMBERS:
        raise UnsupportedError(f"{name} has the dtype {tensor.dtype}, which asyncdist does not carry")


@dataclass(frozen=True)
class Manifest:
    """What a reader must know of a version before it copies the bytes: its layout, and the digest of each block."""

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
