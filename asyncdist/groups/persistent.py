"""Persistent collectives: calls that are prepared once and started again and again on the same memory.

`Group` has an ``_init`` form of each collective, and so have `asyncdist` and `asyncdist.sync`, as MPI 4 has
(``MPI_Allreduce_init``). It takes the arguments of the collective, and gives a `PersistentCollective`. The ranks meet when
it is made and compare their calls, so a mismatch is told then.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch

from asyncdist.base.deadline import Timeout
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.errors import UnsupportedError, UsageError
from asyncdist.kernel.collectives.call_plan import CallPlan, Prepare, Result, cache_key, converted
from asyncdist.kernel.collectives.collective_ops import CallOptions, CollectiveOps
from asyncdist.kernel.collectives.data_movement import meeting
from asyncdist.kernel.engine.work import DONE, Work, again, joined
from asyncdist.kernel.memory.torch_compile import excluded_from_compile
from asyncdist.kernel.memory.user_modes import leave_user_modes
from asyncdist.kernel.torch_private import count_dispatch_modes, forward_ad_level, innermost_transform

T = TypeVar("T")
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])

_BLOCKING: CallOptions = {"background": False}
_CHANGED = "a tensor has another memory or shape than when the call was prepared: prepare it again on all ranks"


@excluded_from_compile
class PersistentCollective(ProcessBound, Generic[T]):
    """A collective of a group on the same tensors, prepared for many calls. Made by `Group.all_reduce_init` and its like.

    Every member starts it equally often, in the same order with the group's other collectives. The tensors keep their
    memory as long as they are used here. Any thread may start it, one call at a time.

    Attributes:
        op: The name of the collective.

    Example:
        >>> gradients = torch.zeros(1000)
        >>> average = await dist.all_reduce_init(gradients, dist.ReduceOp.AVG)
        >>> for step in range(10):
        ...     gradients.normal_()
        ...     await average.start()
    """

    _elsewhere = "each process prepares its own"

    def __init__(
        self, owner: CollectiveOps, op: str, plan: CallPlan, tensors: Sequence[Any], values: Sequence[Any], writes: bool
    ) -> None:
        self.op = op
        self._owner, self._writes = owner, writes
        # The caller may change its lists, and the shapes of its tensors.
        self._tensors: Sequence[Any] | None = [list(each) if isinstance(each, list) else each for each in tensors]
        self._value: Any = self._tensors[0] if tensors else None
        self._result: Result = (self._value, (), writes)
        self._is_contiguous = values is tensors
        self._aliases = _each(torch.Tensor.detach, self._tensors) if self._is_contiguous else ()
        self._plan = plan.kept(owner.context.native, self._aliases) if self._is_contiguous else plan
        self._forms = None if self._is_contiguous else cache_key((), values, contiguous=True)
        self._memory = [
            (tensor.data_ptr, tensor.data_ptr(), (nbytes := tensor.untyped_storage().nbytes), nbytes())
            for tensor in (_listed(self._tensors) if self._is_contiguous else ())
        ]
        """For each tensor that the call uses as it is: its address and its bytes, each with the function that tells it."""
        self._pending: Work[T] = DONE
        self._completed: Work[T] | None = None
        """The work of a call that was complete when it returned, which is that of all such calls."""

    def __repr__(self) -> str:
        return f"<PersistentCollective {self.op} of group {self._owner.name!r}>"

    def start(self, *, timeout: Timeout = None) -> Work[T]:
        """Start the collective, and return its work, whose value is that of the collective.

        Args:
            timeout: Limit in seconds or as a timedelta; None takes the group's.

        Raises:
            UsageError: The call before has not completed, `free` was called, or a tensor has other memory than before.
            NotInitializedError: The group was destroyed, or its members have regrouped.
        """
        before = self._completed
        work = self._begin({} if timeout is None else {"timeout": timeout}, before is None)
        if before is not None and work is DONE:
            return again(before)
        # Works that do more are those of one call.
        if type(work) is Work and work.is_success():
            self._completed = work
        return work

    def run(self, *, timeout: Timeout = None) -> T:
        """Start the collective, block until it is complete, and return its value. Raises what `start` and its work do."""
        options = _BLOCKING if timeout is None else CallOptions(background=False, timeout=timeout)
        work = self._begin(options, False)
        return self._value if work is DONE else work.result()

    def _begin(self, options: CallOptions, wants_work: bool) -> Work[T]:
        # Looked up here too, because `leave_user_modes` would cost each call a Python frame.
        uses_modes = count_dispatch_modes() or innermost_transform() is not None or forward_ad_level() >= 0
        left = leave_user_modes() if uses_modes else None
        try:
            if self._tensors is None:
                raise UsageError("this persistent collective was freed: prepare another one")
            if self._pending is not DONE and not self._pending.is_completed():
                raise UsageError("the call before has not completed: wait for its work before you start another")
            values, result = self._aliases, self._result
            if not self._is_contiguous:
                values, outputs = converted(self._tensors, self._owner._device, writes=self._writes)
                result = (self._value, outputs, self._writes)
                if cache_key((), values, contiguous=True) != self._forms:
                    raise UsageError(_CHANGED)
            for address_now, address, nbytes_now, nbytes in self._memory:
                # A storage may become smaller where it is.
                if address_now() != address or nbytes_now() != nbytes:
                    raise UsageError(_CHANGED)
            work = self._pending = self._owner._run(self.op, self._plan, values, result, options, wants_work)
        except UsageError as error:
            self._owner._refused(self.op, error)
            raise
        finally:
            if left is not None:
                left.close()
        return work

    def free(self) -> None:
        """Let go of the tensors. A call that has started goes on. Idempotent; does not communicate."""
        self._tensors = self._value = self._completed = None
        self._pending = DONE
        self._aliases, self._memory = (), []
        self._result = (None, (), False)


def start_all(calls: Sequence[PersistentCollective[Any]], *, timeout: Timeout = None) -> Work[list[Any]]:
    """Start several persistent collectives in turn; return one work, whose value is the list of their values.

    Raises:
        UsageError: One of them cannot start; see `PersistentCollective.start`. Those before it have started.
    """
    return joined([call.start(timeout=timeout) for call in calls])


def _each(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return [_each(function, each) for each in values]
    return None if values is None else function(values)


def _listed(values: Any) -> list[torch.Tensor]:
    if isinstance(values, (list, tuple)):
        return [tensor for each in values for tensor in _listed(each)]
    return [] if values is None else [values]


class Preparing(CollectiveOps):
    """The collectives of a group, which prepare a call instead of starting it.

    Args:
        group: The group whose members meet.
        owner: The group, or its operations on a device. It runs the calls.
        blocks: Whether the calling thread waits until the members have met.
    """

    def __init__(self, group: CollectiveOps, owner: CollectiveOps | None = None, *, blocks: bool = False) -> None:
        self._group, self._owner, self._blocks = group, group if owner is None else owner, blocks
        self._given: Sequence[Any] = ()
        # Not a call of the constructor: the plans are those of the owner.
        self.name, self.ranks, self.member_ids = group.name, group.ranks, group.member_ids
        self.timeout, self.context, self._rank = group.timeout, self._owner.context, group.rank()
        self._device, self._device_if_not_host = self._owner._device, self._owner._device_if_not_host
        self._plans = self._owner._plans

    def _group_for(self, value: Any) -> CollectiveOps:
        owner = self._owner._group_for(value)
        return self if owner is self._owner else Preparing(self._group, owner, blocks=self._blocks)

    def _call(self, name: str, prepare: Prepare, tensors: tuple[Any, ...], *rest: Any, **how: Any) -> Work:
        self._given = tensors
        return super()._call(name, prepare, tensors, *rest, **how)

    def _run(
        self, name: str, plan: CallPlan, tensors: Sequence[Any], result: Result, options: CallOptions, work: bool = True
    ) -> Work:
        _, _, writes = result
        call: PersistentCollective[Any] = PersistentCollective(self._owner, name, plan, self._given, tensors, writes)
        group = self._group
        if self._blocks:
            options["background"] = False
        return group._run(f"{name}_init", meeting(group.context, plan.fingerprint), (), (call, (), False), options)

    def _send(self, tensor: Any, peer: int, tag: int, options: CallOptions) -> Work:
        raise UnsupportedError("a message cannot be persistent")

    def _receive(self, tensor: Any, peer: int | None, tag: int, options: CallOptions) -> Work:
        raise UnsupportedError("a message cannot be persistent")


def _method(
    call: Callable[Concatenate[Any, P], Work[T]],
) -> Callable[Concatenate[Any, P], Work[PersistentCollective[T]]]:
    """Return the ``_init`` form of a method of a group."""

    def init(self: Any, /, *args: P.args, **options: P.kwargs) -> Work[PersistentCollective[T]]:
        return call(Preparing(self), *args, **options)  # type: ignore[return-value]

    return described(init, call)


def described(init: F, call: Any, *, blocks: bool = False) -> F:
    """Give a function the name, the signature and the help of the ``_init`` form of a collective."""
    functools.update_wrapper(init, call)
    del init.__dict__["__wrapped__"]
    value = call.__annotations__["return"].removeprefix("Work[").removesuffix("]")
    result = f"PersistentCollective[{value}]" if blocks else f"Work[PersistentCollective[{value}]]"
    init.__annotations__ = {**call.__annotations__, "return": result}
    init.__dict__["__signature__"] = inspect.signature(call).replace(return_annotation=result)
    init.__name__, init.__qualname__ = f"{call.__name__}_init", f"{call.__qualname__}_init"
    init.__doc__ = (
        f"Prepare `{call.__name__}` for many calls on the same tensors. The arguments are its own.\n\n"
        f"Every member of the group calls this, in the same order with the other collectives. Returns "
        f"{'the' if blocks else 'a work whose value is the'} `PersistentCollective`.\n\n"
        "Raises:\n    UsageError: The arguments are refused by the collective.\n"
        "    MismatchError: The ranks prepare different calls.\n"
        "    GroupError: A rank died, the timeout passed, or the group has failed."
    )
    return init


class PersistentOps:
    """The ``_init`` forms of a group's collectives; see `PersistentCollective`."""

    all_gather_coalesced_init = _method(CollectiveOps.all_gather_coalesced)
    all_gather_init = _method(CollectiveOps.all_gather)
    all_gather_single_init = _method(CollectiveOps.all_gather_single)
    all_reduce_coalesced_init = _method(CollectiveOps.all_reduce_coalesced)
    all_reduce_init = _method(CollectiveOps.all_reduce)
    all_to_all_init = _method(CollectiveOps.all_to_all)
    all_to_all_single_init = _method(CollectiveOps.all_to_all_single)
    barrier_init = _method(CollectiveOps.barrier)
    broadcast_init = _method(CollectiveOps.broadcast)
    gather_init = _method(CollectiveOps.gather)
    gather_single_init = _method(CollectiveOps.gather_single)
    reduce_init = _method(CollectiveOps.reduce)
    reduce_scatter_init = _method(CollectiveOps.reduce_scatter)
    reduce_scatter_single_init = _method(CollectiveOps.reduce_scatter_single)
    scatter_init = _method(CollectiveOps.scatter)
