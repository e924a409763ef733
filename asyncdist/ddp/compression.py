"""Lossy compression of values that ranks average: bfloat16, integers of 8 and 4 bits by blocks, and error feedback.

A codec turns a vector into bytes and back. Both directions use torch operators only, on the device of the values.
`ErrorFeedback` adds what a codec has lost to the values of the next call, so that no part of a sum is lost for good.

Source: error feedback, Seide et al., "1-Bit Stochastic Gradient Descent" (2014), and Karimireddy et al., "Error Feedback
Fixes SignSGD" (arXiv 1901.09847); integers by blocks, Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
(arXiv 2110.02861), with equidistant levels instead of their dynamic type.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch

from asyncdist.errors import UsageError

_SCALE_NBYTES = 4
_LEAST_SCALED = 1e-30
"""A block whose largest magnitude is below this one is encoded as zeros: its scale would not be a normal float32."""


class VectorCodec(Protocol):
    """How a vector travels as bytes. Parts that begin at multiples of ``block`` are encoded as in the whole vector."""

    @property
    def name(self) -> str:
        """The name of the codec in messages."""

    @property
    def block(self) -> int:
        """The number of elements that are encoded together."""

    def encoded_nbytes(self, count: int) -> int:
        """Return the number of bytes of ``count`` encoded elements."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return a new tensor of bytes (uint8, one dimension) for ``values``: floats of any precision, one dimension."""

    def decode(self, code: torch.Tensor, count: int) -> torch.Tensor:
        """Return the ``count`` elements (float32, one dimension) of a code."""


class HalfCodec:
    """Two bytes for each element: float32 rounded to bfloat16, with a relative error of at most 1 / 256."""

    name = "bf16"
    block = 1

    def encoded_nbytes(self, count: int) -> int:
        """Return the number of bytes of ``count`` encoded elements."""
        return 2 * count

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bytes of the rounded values."""
        return values.detach().to(torch.bfloat16, copy=True).view(torch.uint8)

    def decode(self, code: torch.Tensor, count: int) -> torch.Tensor:
        """Return the values in float32."""
        return _aligned(code).view(torch.bfloat16)[:count].float()


class IntegerCodec:
    """Signed integers of a few bits, with one scale for each block of elements.

    The largest magnitude ``m`` of a block of ``block`` elements maps to the largest integer (127 or 7), and the others are
    rounded to the nearest level. An element's error is at most half a level: ``m / 254`` with 8 bits, ``m / 14`` with 4,
    above the rounding of float32. A block with a value that is not finite decodes to NaN. A code holds the scales of all
    blocks as float32, then the integers; with 4 bits, the first half of the elements in the low halves of the bytes.

    Args:
        bits: 8 or 4.
        block: Elements with one scale, even; by default 256 with 8 bits and 64 with 4, which makes 1.016 and 0.563 bytes
            for each element.

    Raises:
        UsageError: Another number of bits, or a block that is not even and positive.

    Example:
        >>> codec = IntegerCodec(8)
        >>> code = codec.encode(torch.tensor([1.0, -0.5, 0.25]))
        >>> codec.decode(code, 3)
        tensor([ 1.0000, -0.5039,  0.2520])
    """

    def __init__(self, bits: int = 8, block: int | None = None) -> None:
        if bits not in (8, 4):
            raise UsageError(f"an integer codec has 8 or 4 bits, not {bits!r}")
        self.bits, self.name = bits, f"int{bits}"
        self.block = (256 if bits == 8 else 64) if block is None else block
        if self.block < 2 or self.block % 2:
            raise UsageError(f"a block of {block!r} elements: pass an even number of at least 2")
        self._largest = (1 << (bits - 1)) - 1

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def encoded_nbytes(self, count: int) -> int:
        """Return the number of bytes of ``count`` encoded elements."""
        return _SCALE_NBYTES * self._blocks(count) + -(-count * self.bits // 8)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the scales and integers of the values."""
        values = values.detach().float()
        count, blocks = values.numel(), self._blocks(values.numel())
        code = torch.empty(self.encoded_nbytes(count), dtype=torch.uint8, device=values.device)
        scales = code[: _SCALE_NBYTES * blocks].view(torch.float32)
        packed = code[_SCALE_NBYTES * blocks :]
        # The integers of 8 bits are the code; those of 4 bits are packed into half as many bytes.
        integers = (
            packed.view(torch.int8) if self.bits == 8 else torch.empty(count, dtype=torch.int8, device=code.device)
        )
        for part, part_scales, out in self._parts(values, scales, integers):
            # Many times faster than the infinity norm.
            largest = torch.maximum(part.amax(dim=1), part.amin(dim=1).neg_())
            finite = largest.isfinite()
            factors = torch.where(finite & (largest > _LEAST_SCALED), self._largest / largest, 0.0)
            part_scales.copy_(torch.where(finite, largest / self._largest, float("nan")))
            # 7 * (1 / 7) may exceed the largest integer by a rounding error, which round() removes.
            out.copy_(part.mul(factors.unsqueeze(1)).round_())
        if self.bits == 4:
            half = packed.numel()
            low, high = integers[:half].view(torch.uint8), integers[half:].view(torch.uint8)
            packed.copy_(low & 15)
            packed[: high.numel()] |= high << 4
        return code

    def decode(self, code: torch.Tensor, count: int) -> torch.Tensor:
        """Return the values that the scales and integers stand for."""
        blocks = self._blocks(count)
        code = _aligned(code)
        scales = code[: _SCALE_NBYTES * blocks].view(torch.float32)
        packed = code[_SCALE_NBYTES * blocks : self.encoded_nbytes(count)]
        if self.bits == 8:
            integers = packed.view(torch.int8)
        else:
            # An arithmetic shift of the upper half, and of the lower half after it has been moved up, extends the sign.
            low, high = (packed << 4).view(torch.int8) >> 4, packed.view(torch.int8) >> 4
            integers = torch.cat([low, high])[:count]
        values = torch.empty(count, dtype=torch.float32, device=code.device)
        for part, part_scales, own in self._parts(values, scales, integers):
            part.copy_(own).mul_(part_scales.unsqueeze(1))
        return values

    def _parts(
        self, values: torch.Tensor, scales: torch.Tensor, integers: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return values, scales and integers by blocks: all whole blocks, and the shorter last block."""
        count = values.numel()
        whole = count // self.block
        end = whole * self.block
        parts = []
        if whole:
            shape = (whole, self.block)
            parts.append((values[:end].view(shape), scales[:whole], integers[:end].view(shape)))
        if end < count:
            parts.append((values[end:].view(1, -1), scales[whole:], integers[end:].view(1, -1)))
        return parts


def _aligned(code: torch.Tensor) -> torch.Tensor:
    """Return the code, copied if its memory is not aligned for float32."""
    return code if code.storage_offset() % _SCALE_NBYTES == 0 else code.clone()


Compress: TypeAlias = VectorCodec | str | None
"""A codec or its name: ``"bf16"``, ``"int8"``, ``"int4"``; None sends the values as they are."""

_CODECS: dict[str, VectorCodec] = {"bf16": HalfCodec(), "int8": IntegerCodec(8), "int4": IntegerCodec(4)}


def codec_of(compress: Compress) -> VectorCodec | None:
    """Return the codec for the argument ``compress`` of a public function.

    Raises:
        UsageError: No codec has this name.
    """
    codec = _CODECS.get(compress) if isinstance(compress, str) else compress
    if compress is not None and not callable(getattr(codec, "encode", None)):
        raise UsageError(f"compress={compress!r}: pass {', '.join(map(repr, _CODECS))}, a codec or None")
    return codec


def drop_infinite(loss: torch.Tensor) -> None:
    """Replace values that are not finite by zeros, in place: one overflow must not spoil all later vectors."""
    loss.nan_to_num_(0.0, 0.0, 0.0)


class ErrorFeedback:
    """The loss of encoding a vector, for the next vector in its place.

    Call `add_to` before the vector is encoded, and `keep` after its transfer has succeeded. Without `keep`, as after a
    failed transfer, the next `add_to` adds the same loss again, so a repeated transfer sends the same values.

    Attributes:
        residual: The loss: float32, as many elements as the vector; None before the first `keep`.

    Example:
        >>> codec, feedback = IntegerCodec(8), ErrorFeedback()
        >>> for gradient in [torch.tensor([1.0, 0.001])] * 10:
        ...     feedback.add_to(gradient := gradient.clone())
        ...     feedback.keep(gradient, codec.decode(codec.encode(gradient), 2))
    """

    def __init__(self) -> None:
        self.residual: torch.Tensor | None = None

    def add_to(self, values: torch.Tensor) -> None:
        """Add the loss to ``values`` in place.

        Raises:
            UsageError: The vector has another size than the one before.
        """
        if self.residual is None:
            return
        if self.residual.numel() != values.numel():
            raise UsageError(
                f"error feedback holds {self.residual.numel()} elements and got a vector of {values.numel()}: "
                "keep one ErrorFeedback for each vector"
            )
        values += self.residual

    def keep(self, values: torch.Tensor, decoded: torch.Tensor) -> None:
        """Store the difference between the ``values`` that were encoded and the ``decoded`` ones.

        Values that are not finite count as transferred without loss.
        """
        if self.residual is None:
            self.residual = torch.empty_like(values, dtype=torch.float32)
        torch.sub(values, decoded, out=self.residual)
        drop_infinite(self.residual)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss for a checkpoint."""
        return {"residual": self.residual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loss from a checkpoint."""
        residual = state["residual"]
        self.residual = None if residual is None else residual.detach().clone().float()
