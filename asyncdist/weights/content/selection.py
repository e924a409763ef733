"""Which parts of a version a reader has: all, or slices of some tensors, as a tensor- or pipeline-parallel reader needs.

A selection is again a layout, in which each part is contiguous. Readers with equal selections copy from each other. No I/O.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgpack
import torch

from asyncdist.errors import ProtocolError, UsageError
from asyncdist.weights.content.layout import WeightsLayout

Index = slice | tuple[slice, ...]
"""Which part of a tensor: slices of its first dimensions, with a step of 1. Further dimensions are whole."""
Slices = Mapping[str, Index] | Callable[[str, tuple[int, ...]], Index | None]
"""The index by the name of a tensor, or a function of the name and the whole shape. A missing index, or None, means all."""
Range = tuple[int, int]
Ranges = tuple[Range, ...]
"""The first element and the end of a part, by dimension."""


@dataclass(frozen=True)
class Selection:
    """Parts of the tensors of a version.

    Attributes:
        parts: The ranges by name; None for a whole tensor.
        layout: The layout of the parts.
        key: Equal for equal selections of equal layouts; empty if it is all of the version.
    """

    parts: Mapping[str, Ranges | None]
    layout: WeightsLayout
    key: str

    @classmethod
    def of(cls, whole: WeightsLayout, parts: Mapping[str, Ranges | None]) -> Selection:
        """Return a selection of a layout. Raises ProtocolError for parts that the layout does not have."""
        if list(parts) == list(whole.places) and not any(parts.values()):
            return cls(parts, whole, "")
        tensors, ties = [], {}
        first: dict[tuple[str, Ranges | None], str] = {}
        for name, ranges in parts.items():
            place = whole.places.get(name)
            if place is None or (ranges is not None and not _is_within(ranges, place.shape)):
                raise ProtocolError(f"a reader asks for a part of {name!r} that the version does not have")
            shape = place.shape if ranges is None else tuple(stop - start for start, stop in ranges)
            tensors.append((name, place.dtype, shape))
            other = first.setdefault((place.shared_with or name, ranges), name)
            if other != name:
                ties[name] = other
        key = hashlib.blake2b(msgpack.packb((whole.key, list(parts.items()))), digest_size=12).hexdigest()
        return cls(parts, WeightsLayout(tensors, ties), key)

    def describe(self) -> list[list[object]]:
        return [[name, ranges] for name, ranges in self.parts.items()]

    @classmethod
    def of_description(cls, whole: WeightsLayout, description: object) -> Selection:
        """Return the selection that `describe` has described. Raises ProtocolError for anything else."""
        try:
            parts = {
                str(name): None if ranges is None else tuple((int(start), int(stop)) for start, stop in ranges)
                for name, ranges in description  # type: ignore[attr-defined]
            }
        except (TypeError, ValueError) as cause:
            raise ProtocolError(f"a selection that cannot be read: {cause}") from cause
        return cls.of(whole, parts)

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole tensor, as a view."""
        ranges = self.parts[name]
        return tensor if ranges is None else tensor[tuple(slice(start, stop) for start, stop in ranges)]


def whole_selection(layout: WeightsLayout) -> Selection:
    return Selection.of(layout, dict.fromkeys(layout.places))


def select(whole: WeightsLayout, wanted: Mapping[str, tuple[int, ...]] | None, slices: Slices | None) -> Selection:
    """Return the selection of a reader.

    ``wanted`` has the shape of each tensor that the reader has; None if it has a part of all, of any shape.

    Raises:
        UsageError: The version has no such tensor, or a part has another shape.
    """
    missing = [name for name in wanted or () if name not in whole.places]
    if missing:
        raise UsageError(
            f"the published weights have no {missing[0]!r}, which the reader's model has (and {len(missing) - 1} more): "
            "publish the state dict of the same model, or pass a dict of the tensors that the publisher has as like="
        )
    parts: dict[str, Ranges | None] = {}
    # In the publisher's order, so that a reader of all tensors has the layout of the version.
    for name, place in whole.places.items():
        if wanted is None or name in wanted:
            index = slices(name, place.shape) if callable(slices) else (slices or {}).get(name)
            ranges = None if index is None else _ranges_of(name, index, place.shape)
            shape = place.shape if ranges is None else tuple(stop - start for start, stop in ranges)
            if wanted is not None and shape != wanted[name]:
                published = f"tensor {list(shape)}" if ranges is None else f"part {list(shape)} of {list(place.shape)}"
                raise UsageError(
                    f"{name} has the shape {list(wanted[name])} at the reader, and the published {published}: "
                    "make like= of the same model, or pass slices= if the reader has a part of it"
                )
            parts[name] = None if shape == place.shape else ranges
    return Selection.of(whole, parts)


def _ranges_of(name: str, index: Index, shape: tuple[int, ...]) -> Ranges:
    slices = index if isinstance(index, tuple) else (index,)
    if len(slices) > len(shape) or not all(isinstance(each, slice) for each in slices):
        raise UsageError(f"the part of {name} is given as {index!r}: it takes at most {len(shape)} slices")
    ranges = []
    for size, each in zip(shape, slices + (slice(None),) * (len(shape) - len(slices)), strict=True):
        start, stop, step = each.indices(size)
        if step != 1:
            raise UsageError(f"the part of {name} is given as {index!r}: slices have a step of 1")
        ranges.append((start, max(start, stop)))
    return tuple(ranges)


def _is_within(ranges: Ranges, shape: tuple[int, ...]) -> bool:
    return len(ranges) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(ranges, shape, strict=True)
    )


def flat_range(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements of a tensor of any strides as a flat contiguous tensor: a view where there is one, else a copy.

    Elements are counted in the order of a contiguous tensor.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    per_row = math.prod(tensor.shape[1:])
    first, end = start // per_row, -(-stop // per_row)
    if end - first == 1 and tensor.dim() > 1:
        return flat_range(tensor[first], start - first * per_row, stop - first * per_row)
    return tensor[first:end].reshape(-1)[start - first * per_row : stop - first * per_row].contiguous()
