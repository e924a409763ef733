"""The memory of one bucket: the gradients of several parameters in one flat tensor. Used by `reducer`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import accumulate

import torch

from asyncdist.errors import SharedMemoryError
from asyncdist.kernel import empty

LINE_NBYTES = 64
"""Alignment of gradients: a matrix product that is written across cache lines takes half as long again."""


class Bucket:
    """Gradients of one dtype and device that are averaged together, as views of one flat tensor.

    Args:
        index: Place of the bucket in the order of the all-reduces.
        members: Numbers of its parameters, in the order of their gradients in `flat`.
        parameters: All parameters, by number.
        alignment: Bytes at whose multiples gradients begin; 1 leaves no gaps.
        flags: Elements of `flat` after the gradients.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[int],
        parameters: Sequence[torch.Tensor],
        *,
        alignment: int = LINE_NBYTES,
        flags: int = 0,
    ) -> None:
        self.index = index
        self.members = members
        self.pending = len(members)
        self.unfilled: list[int] = []
        """Members whose gradients have arrived, but are not in `flat` yet."""
        self.flat: torch.Tensor | None = None
        self.views: dict[int, torch.Tensor] = {}
        self.nbytes = sum(parameters[member].nbytes for member in members)
        room = [-(-parameters[member].nbytes // alignment) * alignment for member in members]
        ends = [end // parameters[members[0]].itemsize for end in accumulate(room)]
        # In elements. The flags fill whole lines, so that the parts that ranks reduce stay aligned.
        line = LINE_NBYTES // parameters[members[0]].itemsize
        self._offsets, self._end, self._flags = [0, *ends[:-1]], ends[-1], flags
        self._count = self._end + -(-flags // line) * line
        # Those of now: a parameter that is resized later must not get the memory of the next one.
        self._forms = [_form_of(parameters[member]) for member in members]

    def allocate(self, parameters: Sequence[torch.Tensor], *, shared: bool) -> None:
        """Allocate the memory; called late, so that buckets of an earlier layout are freed first.

        With ``shared``, memory on the CPU is registered unless registered memory is full.
        """
        like = parameters[self.members[0]]
        if shared and like.is_cpu:
            with contextlib.suppress(SharedMemoryError):
                self.flat = empty(self._count, dtype=like.dtype).zero_()
        if self.flat is None:
            self.flat = self.zeros(parameters)
        self.views = dict(zip(self.members, self.gradients_in(self.flat), strict=True))

    def release(self) -> None:
        """Free the memory until the next backward."""
        self.flat = None
        self.views.clear()

    @property
    def flags(self) -> torch.Tensor:
        """The elements after the gradients. The memory must be allocated."""
        assert self.flat is not None
        return self.flags_of(self.flat)

    def flags_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements after the gradients of a tensor like `flat`."""
        return flat[self._end : self._end + self._flags]

    def zeros(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return as many zeros as the bucket has elements, in memory of their own."""
        like = parameters[self.members[0]]
        return torch.zeros(self._count, dtype=like.dtype, device=like.device)

    def gradients_in(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients, in the order of `members`, as views of a tensor like `flat`."""
        return [_view_of(flat, *at) for at in zip(self._offsets, self._forms, strict=True)]


def _form_of(parameter: torch.Tensor) -> tuple[torch.Size, tuple[int, ...] | None]:
    """Return the shape of a gradient, and its strides if they are those of its parameter; None if it is contiguous."""
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()
    follows = dense == parameter.stride() and not parameter.is_contiguous()
    return parameter.shape, dense if follows else None


def _view_of(flat: torch.Tensor, offset: int, form: tuple[torch.Size, tuple[int, ...] | None]) -> torch.Tensor:
    shape, strides = form
    part = flat[offset : offset + shape.numel()]
    return part.view(shape) if strides is None else part.as_strided(shape, strides)
