"""The buckets of all parameters of a model, and how a reducer treats their gradients. Used by `reducer`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

import torch

from asyncdist.ddp import buckets
from asyncdist.ddp.backward.faults import Fault, Faults
from asyncdist.errors import SharedMemoryError
from asyncdist.kernel import empty, torch_private

_dtype_of: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")
_is_cpu: Callable[[torch.Tensor], bool] = attrgetter("is_cpu")
_device_of: Callable[[torch.Tensor], torch.device] = attrgetter("device")
_layout_of_gradient: Callable[[torch.Tensor], torch.layout] = attrgetter("grad.layout")

LINE_NBYTES = 64
"""Alignment of gradients: a matrix product that is written across cache lines takes half as long again."""
_LARGE_NBYTES = 64 << 10
"""From this size on, copying a gradient that has left the cache costs more than a call for each."""


@dataclass
class ReducerOptions:
    """How a `Reducer` treats gradients; the arguments of `DistributedDataParallel` of the same names.

    Attributes:
        limits: Caps of the buckets in bytes, as `buckets.assign` takes them.
        tunes_buckets: Whether the first steps find the best cap.
        delayed: Names of the parameters of ``delay_all_reduce_named_params``.
    """

    limits: Sequence[int]
    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False
    lazy_bucket_allocation: bool = False
    delayed: frozenset[str] = frozenset()
    tunes_buckets: bool = False

    @property
    def common(self) -> dict[str, object]:
        """The arguments that must be equal on all ranks, by name."""
        return {
            "bucket_cap_mb": "auto" if self.tunes_buckets else [each / (1 << 20) for each in self.limits],
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "delay_all_reduce_named_params": sorted(self.delayed),
        }

    @property
    def allows_unused(self) -> bool:
        """Whether a parameter may get no gradient in a backward."""
        return self.find_unused_parameters or self.static_graph or self.skip_all_reduce_unused_params


class Bucket:
    """Gradients of one dtype and device that are averaged together, as views of one flat tensor.

    The ``members`` are numbers of ``parameters``. Gradients begin at multiples of ``alignment`` bytes; 1 leaves no gaps.
    ``flags`` elements follow them.
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
        self.shapes = {member: shape for member, (shape, _) in zip(members, self._forms, strict=True)}

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


def are_dense(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether all parameters have gradients that could be averaged."""
    try:
        return set(map(_layout_of_gradient, parameters)) <= {torch.strided}
    # None has no layout.
    except AttributeError:
        return False


def _form_of(parameter: torch.Tensor) -> tuple[torch.Size, tuple[int, ...] | None]:
    """Return the shape of a gradient, and its strides if they are those of its parameter; None if it is contiguous."""
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()
    follows = dense == parameter.stride() and not parameter.is_contiguous()
    return parameter.shape, dense if follows else None


def _view_of(flat: torch.Tensor, offset: int, form: tuple[torch.Size, tuple[int, ...] | None]) -> torch.Tensor:
    shape, strides = form
    part = flat[offset : offset + shape.numel()]
    return part.view(shape) if strides is None else part.as_strided(shape, strides)


class BucketSet:
    """The buckets, in the order of their all-reduces, and the *flags*: elements with which ranks tell one another more.

    Attributes:
        buckets: The buckets.
        bucket_of: The bucket of each parameter, by the parameter's number.
        allows_unused: Whether a parameter may get no gradient in a backward.
        large: Numbers of parameters whose gradients are copied as soon as they arrive.
        skipped: Numbers of parameters without a bucket, which no rank uses.
        is_alone: Whether no other rank and no hook gets the buckets: gradients stay where they are.
        has_hook: Whether a communication hook sees the buckets.
        is_special: Whether not every parameter gets exactly one gradient.
        flags_apart: Whether the flags travel in a tensor of their own instead of the last bucket.
        flags_count: The number of flags: one for faults, and one for each parameter where some may be unused.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        options: ReducerOptions,
        *,
        shares_memory: bool,
        is_alone: bool,
    ) -> None:
        self.skipped: frozenset[int] = frozenset()
        self.has_hook = False
        self.is_alone = is_alone
        self._parameters = [parameter for _, parameter in named]
        self._options, self._shares_memory = options, shares_memory
        self._delayed = {number for number, (name, _) in enumerate(named) if name in options.delayed}
        self._order: Sequence[int] = buckets.definition_order(len(named))
        self.assign()

    def assign(self, order: Sequence[int] | None = None) -> None:
        """Assign the parameters to new buckets, in the order in which gradients are expected; None keeps the order."""
        self._order = self._order if order is None else order
        self._kinds = self._kinds_now()
        self.allows_unused = self._options.allows_unused
        self.is_special = self._options.static_graph or bool(self.skipped)
        sent = [index for index in self._order if index not in self.skipped]
        layout = [
            *self._layout([index for index in sent if index not in self._delayed], self._options.limits),
            *self._layout([index for index in sent if index in self._delayed], [1 << 62]),
        ]
        # A hook sees no gaps, and the flags of a device's gradients would be read from the device in each step.
        self.flags_apart = self.has_hook or not layout or not all(map(_is_cpu, self._parameters))
        self.flags_count = 1 + (len(self._parameters) if self.allows_unused else 0)
        self._flags_alone = torch.zeros(self.flags_count, dtype=torch.float32, device="cpu")
        last = 0 if self.flags_apart else self.flags_count
        alignment = 1 if self.has_hook else LINE_NBYTES
        self.buckets = [
            Bucket(index, members, self._parameters, alignment=alignment, flags=last if index == len(layout) - 1 else 0)
            for index, members in enumerate(layout)
        ]
        self.bucket_of = {member: bucket for bucket in self.buckets for member in bucket.members}
        self.large = {index for index, each in enumerate(self._parameters) if each.nbytes >= _LARGE_NBYTES}

    def _layout(self, order: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        dtypes, devices = self._kinds
        nbytes = [self._parameters[index].nbytes for index in order]
        kinds = [(dtypes[index], devices[index] if devices else None) for index in order]
        layout = buckets.assign(nbytes, kinds, range(len(order)), limits)
        return [[order[position] for position in members] for members in layout]

    def are_cast(self) -> bool:
        """Return whether parameters have been cast or moved, and need other buckets."""
        # Gradients that stay where they are need no bucket.
        return not self.is_alone and self._kinds != self._kinds_now()

    def _kinds_now(self) -> tuple[list[torch.dtype], list[torch.device]]:
        """Return the dtypes and the devices of the parameters; no devices if all are the host, which torch tells sooner."""
        parameters = self._parameters
        devices = [] if all(map(_is_cpu, parameters)) else list(map(_device_of, parameters))
        return list(map(_dtype_of, parameters)), devices

    def flat(self, bucket: Bucket) -> torch.Tensor:
        """Return the memory of a bucket, which the first call allocates."""
        if bucket.flat is None:
            # Hooks may resize the memory, as torch's batched PowerSGD does.
            bucket.allocate(self._parameters, shared=self._shares_memory and not self.has_hook)
        assert bucket.flat is not None
        return bucket.flat

    def view(self, index: int) -> torch.Tensor:
        """Return the part of its bucket that holds a parameter's gradient."""
        bucket = self.bucket_of[index]
        self.flat(bucket)
        return bucket.views[index]

    def flags(self) -> torch.Tensor:
        """Return the flags, which follow the gradients of the last bucket if other ranks get it."""
        last = self.buckets[-1]
        return self._flags_alone if self.is_alone else last.flags_of(self.flat(last))

    def fill(self, bucket: Bucket, faults: Faults) -> None:
        """Copy the gradients that have arrived since the last call into ``bucket``, all at once."""
        if not bucket.unfilled or (self.is_alone and are_dense([self._parameters[index] for index in bucket.unfilled])):
            bucket.unfilled.clear()
            return
        if not self.is_alone:
            self.flat(bucket)
        gradients, views = [], []
        parameters, view_of, shapes, strided = self._parameters, bucket.views.get, bucket.shapes, torch.strided
        as_view = self._options.gradient_as_bucket_view
        for index in bucket.unfilled:
            parameter, view = parameters[index], view_of(index)
            gradient = parameter.grad
            if gradient is None or gradient.layout is not strided:
                faults.add(index, Fault.cleared if gradient is None else Fault.sparse)
                if view is not None:
                    view.zero_()
            elif view is None or gradient is view:
                continue
            elif gradient.shape != shapes[index]:
                faults.add(index, Fault.resized)
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr():
                gradients.append(gradient)
                views.append(view)
                if as_view:
                    parameter.grad = view
        bucket.unfilled.clear()
        if len(gradients) == 1:
            views[0].copy_(gradients[0].detach())
        elif gradients:
            with torch.no_grad():
                torch_private.foreach_copy(views, gradients)

    def fill_unused(self, index: int) -> None:
        """Put what a parameter without a new gradient has accumulated, or zeros, into its bucket."""
        gradient, view = self._parameters[index].grad, self.view(index)
        if gradient is None or not self.allows_unused:
            view.zero_()
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.detach())

    def write_back(self, used: frozenset[int] | None) -> None:
        """Put the averages into ``grad``; parameters that no rank has used keep their gradients."""
        if self.is_alone or (self._options.gradient_as_bucket_view and used is None):
            return
        for bucket in self.buckets:
            for member, view in bucket.views.items():
                parameter = self._parameters[member]
                if used is not None and member not in used:
                    continue
                as_view, gradient = self._options.gradient_as_bucket_view, parameter.grad
                if gradient is None:
                    if used is not None:
                        parameter.grad = view if as_view else view.clone()
                # Another shape is a fault, which all ranks raise afterwards.
                elif gradient.shape == view.shape and not as_view:
                    gradient.detach().copy_(view)
                elif gradient.shape == view.shape and used is not None:
                    parameter.grad = view
