"""Call plans: how all calls with tensors of the same dtypes and shapes run. The work of making one is done once.

`reductions` and `data_movement` make the plans; `Group` and `DeviceGroup` cache and run them. A plan takes contiguous
tensors; `converted` makes them from the users' arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from asyncdist.errors import UsageError
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.engine.direct_calls import LINK_POLLS, MAX_DIRECT_NBYTES, MAX_WAITING_NBYTES, DirectCalls
from asyncdist.kernel.engine.drivers.waiting import MOST_POLLS
from asyncdist.kernel.engine.operation import Channel
from asyncdist.kernel.memory.buffers import OutputTensor, input_memory
from asyncdist.kernel.memory.reduce_kernels import Fold
from asyncdist.kernel.torch_private import increment_version
from asyncdist.kernel.tracing.hooks import ObservedEntry
from asyncdist.kernel.transport.native import Native, PreparedCall, preceded

_Tensor = torch.Tensor

Observed = ObservedEntry | None
Start = tuple[PreparedCall | None, Iterable[Schedule]]
OverLinks = Callable[..., Iterable[Schedule]]
"""``schedules(*tensors)`` returns the schedules over links of the parts of a call."""
Arrange = Callable[..., Sequence[Any]]
"""``arrange(*tensors)`` returns the tensors that the schedules take instead of those of a call."""


class CallPlan(ABC):
    """How all calls with tensors of the same dtypes and shapes run: in memory that all members reach, or over links.

    A plan may begin many calls, with the same tensors or with others, also while earlier ones run. It keeps no tensor.

    Attributes:
        call: Begins a call without hooks in memory that all members reach; None if the group asks `prepare` for each call.
        fingerprint: Fingerprint of the call.
        nbytes: Number of bytes that the call moves.
        polls: Polls of the schedule after which a waiting thread looks at the clock and offers its core, at most.
        fold: Arithmetic of the actions Reduce and Combine.
        window: Largest number of schedules that run at once.
    """

    polls: ClassVar[int]
    call: PreparedCall | None = None
    fingerprint: int
    nbytes: int
    fold: Fold | None = None
    window = 4

    def kept(self, native: Native | None, tensors: Sequence[Any]) -> CallPlan:
        """Return the plan for these tensors alone, whose memory stays where it is."""
        return self

    @abstractmethod
    def prepare(
        self, tensors: Sequence[Any], number: int, channel: Channel, calls: DirectCalls, observed: Observed, wait: bool
    ) -> Start:
        """Return how the n-th collective of a group moves the contiguous tensors of one call.

        Args:
            tensors: The arguments of the call, in the order of the group's method.
            number: The number of the collective.
            channel: The channel of the group.
            calls: Runs schedules over links without an operation.
            observed: Measures for which ranks the call waits; None unless there are hooks.
            wait: Whether the calling thread waits for its peers.

        Returns:
            What the calling thread tries to complete; or None, if the call is worth no attempt, and the schedules of the
            operation.
        """


Prepare = Callable[..., CallPlan]
"""``prepare(context, *tensors, *arguments)`` plans a collective."""


class MemoryPlan(CallPlan):
    """Moves data in memory that all members reach, or on a device: ``call(number, *tensors)`` is the only schedule."""

    polls = MOST_POLLS
    call: PreparedCall

    def __init__(self, fingerprint: int, nbytes: int, call: PreparedCall) -> None:
        self.fingerprint, self.nbytes, self.call = fingerprint, nbytes, call

    def kept(self, native: Native | None, tensors: Sequence[Any]) -> CallPlan:
        call = self.call if native is None else native.kept(self.call, tensors)
        return self if call is self.call else MemoryPlan(self.fingerprint, self.nbytes, call)

    def prepare(
        self, tensors: Sequence[Any], number: int, channel: Channel, calls: DirectCalls, observed: Observed, wait: bool
    ) -> Start:
        return self.call if observed is None else observed.watching(self.call), ()


class LinkPlan(CallPlan):
    """Sends messages.

    Args:
        schedules: ``schedules(*tensors)`` returns the schedules of a call's parts.
        native: The other collectives of the group, if its members have memory in common: they learn of each call.
        begin: Begins a call as `RecordedCall.begin` does; None if the call has several parts, or something before them.
    """

    polls = LINK_POLLS

    def __init__(
        self,
        fingerprint: int,
        nbytes: int,
        schedules: OverLinks,
        fold: Fold | None,
        window: int,
        native: Native | None,
        begin: PreparedCall | None = None,
    ) -> None:
        self.fingerprint, self.nbytes, self.fold, self.window = fingerprint, nbytes, fold, window
        self._schedules, self._native, self._begin = schedules, native, begin
        self._calls: dict[bool, PreparedCall] = {}

    def prepare(
        self, tensors: Sequence[Any], number: int, channel: Channel, calls: DirectCalls, observed: Observed, wait: bool
    ) -> Start:
        spins = wait and calls.waiting.spin > 0
        if spins in self._calls and observed is None:
            return self._calls[spins], ()
        is_short = self.nbytes <= (MAX_WAITING_NBYTES if spins else MAX_DIRECT_NBYTES)
        if is_short and self._begin is not None and observed is None:
            planned = calls.planned(channel, self.fingerprint, self.fold, spins=spins)
            self._calls[spins] = partial(self._begin, planned)
            return self._calls[spins], ()
        schedules = self._schedules(*tensors)
        if self._native is not None:
            schedules = preceded(self._native.publish(number, self.fingerprint), schedules)
        if observed is not None:
            schedules = observed.watch_all(schedules)
        if not is_short:
            return None, schedules
        schedules = listed = schedules if type(schedules) is list else list(schedules)
        if len(listed) != 1:
            return None, schedules
        planned = calls.planned(channel, self.fingerprint, self.fold, spins=spins)
        return lambda number, *tensors: planned.run(listed[0], number), ()


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
        RuntimeError: A tensor has no storage, or is an inference tensor.
    """
    for value in values:
        kind = type(value)
        if kind is _Tensor:
            dtype = value.dtype
            if not contiguous and not (
                (value.is_cpu if device is None else value.device == device)
                and value.is_contiguous()
                and not (value.requires_grad or value.is_neg())
                and not (dtype.is_complex and value.is_conj())
                # Raises for other layouts than strided.
                and value.data_ptr()
                # Raises for an inference tensor, in half the time of `is_inference`.
                and value._version >= 0
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
        increment_version(value if type(value) is list else (value,))
    return value
