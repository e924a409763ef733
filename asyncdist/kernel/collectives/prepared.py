"""Prepared collectives: the work that is done once for all calls with tensors of the same dtypes and shapes.

`reductions` and `data_movement` prepare the calls; `Group` and `DeviceGroup` cache and run them. A prepared call takes
contiguous tensors; `converted` makes them from the users' arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from asyncdist.errors import UsageError
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.memory.buffers import OutputTensor, increment_versions, input_memory
from asyncdist.kernel.memory.reduce_kernels import Fold
from asyncdist.kernel.transport.native import Native, PreparedCall, preceded

_Tensor = torch.Tensor


class PreparedCollective(NamedTuple):
    """The common part of all calls with tensors of the same dtypes and shapes.

    Attributes:
        fingerprint: Fingerprint of the call.
        nbytes: Number of bytes that the call moves.
        native: Makes the schedule of a native collective; None if the call uses links.
        recorded: ``recorded(*tensors)`` is the only schedule of a small call over links; None for any other call.
        parts: ``parts(*tensors)`` are the schedules of any other call over links.
        fold: Arithmetic of the actions Reduce and Combine.
        window: Largest number of parts that run at once.
    """

    fingerprint: int
    nbytes: int
    native: PreparedCall | None = None
    recorded: Callable[..., Schedule] | None = None
    parts: Callable[..., Iterable[Schedule]] | None = None
    fold: Fold | None = None
    window: int = 4


def schedules_over_links(
    prepared: PreparedCollective, tensors: Sequence[Any], number: int, native: Native | None
) -> Iterable[Schedule]:
    """Return the schedules of a call over links; the first also publishes the call to a group that has a ``native``."""
    recorded, parts = prepared.recorded, prepared.parts
    schedules = parts(*tensors) if parts else () if recorded is None else (recorded(*tensors),)
    return schedules if native is None else preceded(native.publish(number, prepared.fingerprint), schedules)


def cache_key(
    key: tuple[Hashable, ...], values: Sequence[Any], device: torch.device | None = None, *, contiguous: bool = False
) -> Any:
    """Return ``key`` extended by the dtypes and shapes of the values: tensors, lists of tensors, and None.

    Args:
        key: What else distinguishes calls.
        values: The arguments of the call.
        device: The device of tensors that need no conversion; None is the host.
        contiguous: Whether all tensors have been converted.

    Returns:
        The key; None if a value needs conversion.

    Raises:
        RuntimeError: A tensor has no storage.
    """
    for value in values:
        kind = type(value)
        if kind is _Tensor:
            dtype = value.dtype
            if not contiguous and not (
                (value.is_cpu if device is None else value.device == device)
                and value.is_contiguous()
                and not (value.requires_grad or value.is_inference() or value.is_neg())
                and not (dtype.is_complex and value.is_conj())
                # Raises for other layouts than strided.
                and value.data_ptr()
            ):
                return None
            key += (dtype, value.shape)
        # `finish_call` takes no nested lists.
        elif kind is list and not (value and type(value[0]) is list):
            within = cache_key((), value, device, contiguous=contiguous)
            if within is None:
                return None
            key += (within,)
        elif value is None:
            key += (None,)
        else:
            return None
    return key


def device_of(value: Any) -> torch.device | None:
    """Return the device of the first tensor in nested sequences; None if there is no tensor."""
    if isinstance(value, (list, tuple)):
        return next((device for each in value if (device := device_of(each)) is not None), None)
    return value.device if isinstance(value, torch.Tensor) else None


def converted(values: Sequence[Any], device: torch.device, *, writes: bool) -> tuple[list[Any], list[OutputTensor]]:
    """Return contiguous tensors for a call's arguments, and the outputs: the first argument's if the call ``writes`` it.

    Lists of tensors stay lists, at any depth. `finish_call` stores the outputs after the call.

    Raises:
        UsageError: A value is not a tensor, is on another device, or cannot be written.
        UnsupportedError: A tensor cannot be communicated.
    """
    outputs: list[OutputTensor] = []

    def output(value: Any) -> torch.Tensor:
        outputs.append(OutputTensor(value))
        return outputs[-1].memory.tensor.view(outputs[-1].tensor.shape)

    def each(value: Any, convert: Callable[[Any], torch.Tensor]) -> Any:
        if isinstance(value, (list, tuple)):
            return [each(one, convert) for one in value]
        tensor = convert(value)
        if tensor.device != device:
            raise UsageError(
                f"a tensor is on {tensor.device}, but the call's first tensor is on {device}: use one device per call"
            )
        return tensor

    arguments = [
        None if value is None else each(value, output if writes and not place else _input)
        for place, value in enumerate(values)
    ]
    return arguments, outputs


def _input(value: Any) -> torch.Tensor:
    tensor = input_memory(value).tensor
    return tensor.view(tuple(value.shape))


Result = tuple[Any, Sequence[OutputTensor], bool]
"""The arguments of `finish_call` for one call."""


def finish_call(value: Any, outputs: Sequence[OutputTensor], writes: bool) -> Any:
    """Store the outputs of a call, tell autograd which tensors have changed, and return the call's value.

    Args:
        value: The first argument of the call: a tensor, a list of tensors, or None.
        outputs: The converted tensors that the call has written; empty if it has written ``value`` itself.
        writes: Whether this rank writes ``value``.
    """
    if outputs:
        for output in outputs:
            output.store()
    elif writes:
        increment_versions(value if type(value) is list else (value,))
    return value
