"""The tensor operations that a `Group` and its `DeviceGroup` have in common.

`CollectiveOps._call` is the one path of first and repeated calls: it looks up or makes the plan, which the
group then runs. Ranks in arguments are ranks in the group; `asyncdist` and `asyncdist.sync` translate global ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, TypedDict, Unpack

import torch

from asyncdist.base.deadline import Timeout
from asyncdist.base.ops import ReduceOp
from asyncdist.errors import UnsupportedError, UsageError
from asyncdist.kernel.collectives import data_movement, reductions, sparse
from asyncdist.kernel.collectives.arguments import list_of, whole_number_of
from asyncdist.kernel.collectives.call_plan import CallPlan, Prepare, Result, cache_key, converted
from asyncdist.kernel.collectives.group_context import GroupContext
from asyncdist.kernel.collectives.validation import TORCH_REDUCE_OP, reduction
from asyncdist.kernel.engine.operation import PlanOf
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.memory.bounded_cache import BoundedCache
from asyncdist.kernel.memory.buffers import OutputTensor
from asyncdist.kernel.memory.tensor_types import ReductionLike, TensorLike, TensorListsT, TensorsT, TensorT
from asyncdist.kernel.memory.torch_compile import excluded_from_compile
from asyncdist.kernel.memory.user_modes import leave_user_modes
from asyncdist.kernel.torch_private import count_dispatch_modes, forward_ad_level, innermost_transform

_CACHED_CALLS = 512


class CallOptions(TypedDict, total=False):
    """Options of an operation.

    Attributes:
        background: True (the default) returns at once. False returns when the operation has succeeded or failed; call
            ``result()`` on the returned work to get the value or the error. None is False for a caller that needs no value.
        timeout: Limit in seconds or as a timedelta; None takes the group's.
    """

    background: bool | None
    timeout: Timeout


@excluded_from_compile
class CollectiveOps(ABC):
    """The tensor operations of an ordered set of ranks of a world.

    ``ranks`` are global ranks, by rank in the group. Methods start an operation and return its `Work`. Each takes
    `CallOptions` as keywords.
    """

    name: str
    ranks: tuple[int, ...]
    member_ids: tuple[int, ...]
    """The ids by which errors name the members."""
    timeout: float
    _device: torch.device
    """The device of all tensors."""
    # The rank and size in the group, and the settings, for the preparation of calls.
    context: GroupContext
    _rank: int
    _device_if_not_host: torch.device | None = None
    """``_device``; None for the host, whose tensors are recognized faster."""

    def __init__(self) -> None:
        self._plans: BoundedCache[Hashable, CallPlan] = BoundedCache(_CACHED_CALLS)

    # -- identity -------------------------------------------------------------------------------

    def rank(self) -> int:
        """Return the rank of this process in this group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in this group."""
        return len(self.ranks)

    def group_rank(self, global_rank: int) -> int:
        """Return the group rank of a global rank; raise UsageError if the global rank is not in this group."""
        try:
            return self.ranks.index(global_rank)
        except ValueError:
            reason = f"global rank {global_rank!r} is not in group {self.name!r}, which has {self.ranks}"
            raise UsageError(reason) from None

    # -- starting -----------------------------------------------------------------------------

    @abstractmethod
    def _group_for(self, value: Any) -> CollectiveOps:
        """Return the operations for the device of a tensor, or of the first tensor in nested sequences."""

    def _refused(self, name: str, error: UsageError) -> None:
        """Add the operation, the group and the rank to the error of a refused call."""
        error.during(group=self.name, rank=self.member_ids[self._rank], op=name)

    def _call(
        self,
        name: str,
        prepare: Prepare,
        tensors: tuple[Any, ...],
        options: CallOptions,
        arguments: tuple[Any, ...] = (),
        *,
        writes: bool = True,
    ) -> Work:
        """Start the collective that ``prepare(context, *tensors, *arguments)`` plans; its value is ``tensors[0]``.

        ``writes`` says that this rank writes ``tensors[0]``.
        """
        # Those of different factors are equal, so none is part of a key.
        if arguments and type(arguments[-1]) is TORCH_REDUCE_OP:
            arguments = (*arguments[:-1], reduction(arguments[-1]))
        outputs: list[OutputTensor] = []
        values: Sequence[Any] = tensors
        # Asked here too, because `leave_user_modes` would cost each call a Python frame.
        uses_modes = count_dispatch_modes() or innermost_transform() is not None or forward_ad_level() >= 0
        left = leave_user_modes() if uses_modes else None
        try:
            try:
                key = cache_key((name, arguments), tensors, self._device_if_not_host)
            # `converted` refuses a tensor without storage with a proper message.
            except RuntimeError:
                key = None
            if key is None or left is not None:
                group = self._group_for(tensors)
                if group is not self:
                    return group._call(name, prepare, tensors, options, arguments, writes=writes)
                if (
                    prepare is reductions.all_reduce
                    and getattr(tensors[0], "layout", torch.strided) is not torch.strided
                ):
                    return self._run_plan(name, sparse.all_reduce, (tensors[0], *arguments), options)
                values, outputs = converted(tensors, self._device, writes=writes)
                key = cache_key((name, arguments), values, contiguous=True)
            try:
                plan = self._plans.get(key)
            # An argument is not hashable: `prepare` refuses it with a proper message.
            except TypeError:
                plan = key = None
            if plan is None:
                plan = prepare(self.context, *values, *arguments)
                if key is not None:
                    self._plans.add(key, plan)
            return self._run(name, plan, values, (tensors[0] if tensors else None, outputs, writes), options)
        except UsageError as error:
            self._refused(name, error)
            raise
        finally:
            if left is not None:
                left.close()

    @abstractmethod
    def _run(
        self, name: str, plan: CallPlan, tensors: Sequence[Any], result: Result, options: CallOptions, work: bool = True
    ) -> Work:
        """Start a collective with contiguous tensors; ``finish_call(*result)`` ends it and returns its value.

        Without ``work`` a call that is complete may return `DONE`.
        """

    def _run_plan(self, name: str, make: PlanOf, arguments: tuple[Any, ...], options: CallOptions) -> Work:
        """Start the collective over links that ``make(context, *arguments)`` plans."""
        raise UnsupportedError(f"{name} does not support such tensors on {self._device}: move them with .cpu() first")

    @abstractmethod
    def _send(self, tensor: Any, peer: int, tag: int, options: CallOptions) -> Work:
        """Start to send."""

    @abstractmethod
    def _receive(self, tensor: Any, peer: int | None, tag: int, options: CallOptions) -> Work:
        """Start to receive."""

    # -- reductions ----------------------------------------------------------------------------

    def all_reduce(
        self, tensor: TensorT, op: ReductionLike = ReduceOp.SUM, **options: Unpack[CallOptions]
    ) -> Work[TensorT]:
        """Reduce ``tensor`` over the ranks, in place, with the same bits on every rank."""
        return self._call("all_reduce", reductions.all_reduce, (tensor,), options, (op,))

    def all_reduce_coalesced(
        self, tensors: TensorsT, op: ReductionLike = ReduceOp.SUM, **options: Unpack[CallOptions]
    ) -> Work[TensorsT]:
        """Reduce several tensors of one dtype over the ranks as one operation."""
        return self._call("all_reduce_coalesced", reductions.all_reduce_coalesced, (tensors,), options, (op,))

    def reduce(
        self, tensor: TensorT, dst: int, op: ReductionLike = ReduceOp.SUM, **options: Unpack[CallOptions]
    ) -> Work[TensorT]:
        """Reduce ``tensor`` to rank ``dst``; the other ranks' tensors keep their content."""
        at_root = dst == self._rank
        return self._call("reduce", reductions.reduce, (tensor,), options, (dst, op), writes=at_root)

    def reduce_scatter(
        self,
        output: TensorT,
        input_list: Sequence[TensorLike],
        op: ReductionLike = ReduceOp.SUM,
        **options: Unpack[CallOptions],
    ) -> Work[TensorT]:
        """Reduce ``input_list[i]`` over the ranks into rank ``i``'s ``output``; sizes may differ by rank."""
        return self._call("reduce_scatter", reductions.reduce_scatter_list, (output, input_list), options, (op,))

    def reduce_scatter_single(
        self, output: TensorT, input: TensorLike, op: ReductionLike = ReduceOp.SUM, **options: Unpack[CallOptions]
    ) -> Work[TensorT]:
        """Reduce the ``i``-th equal part of ``input`` over the ranks into rank ``i``'s ``output``."""
        return self._call("reduce_scatter_tensor", reductions.reduce_scatter_single, (output, input), options, (op,))

    reduce_scatter_tensor = reduce_scatter_single

    # -- moving --------------------------------------------------------------------------------

    def broadcast(self, tensor: TensorT, src: int, **options: Unpack[CallOptions]) -> Work[TensorT]:
        """Copy rank ``src``'s tensor into every rank's."""
        receives = src != self._rank
        return self._call("broadcast", data_movement.broadcast, (tensor,), options, (src,), writes=receives)

    def all_gather(self, tensor_list: TensorsT, tensor: TensorLike, **options: Unpack[CallOptions]) -> Work[TensorsT]:
        """Gather every rank's ``tensor`` into ``tensor_list``, by rank; sizes may differ by rank."""
        return self._call("all_gather", data_movement.all_gather_list, (tensor_list, tensor), options)

    def all_gather_coalesced(
        self, tensor_lists: TensorListsT, tensors: Sequence[TensorLike], **options: Unpack[CallOptions]
    ) -> Work[TensorListsT]:
        """Gather several tensors as one operation: rank ``r``'s ``tensors[i]`` into ``tensor_lists[r][i]``."""
        lists = tensor_lists, tensors
        return self._call("all_gather_coalesced", data_movement.all_gather_coalesced, lists, options)

    def all_gather_single(self, output: TensorT, input: TensorLike, **options: Unpack[CallOptions]) -> Work[TensorT]:
        """Gather every rank's ``input`` into ``output``, concatenated in group order."""
        return self._call("all_gather_into_tensor", data_movement.all_gather_single, (output, input), options)

    all_gather_into_tensor = all_gather_single

    def gather(
        self, tensor: TensorLike, gather_list: TensorsT | None, dst: int, **options: Unpack[CallOptions]
    ) -> Work[TensorsT | None]:
        """Gather every rank's tensor into ``gather_list`` on rank ``dst``; pass None on the other ranks."""
        tensors, at_root = (gather_list, tensor), dst == self._rank
        return self._call("gather", data_movement.gather, tensors, options, (dst,), writes=at_root)

    def gather_single(
        self, tensor: TensorLike, output: TensorT | None, dst: int, **options: Unpack[CallOptions]
    ) -> Work[TensorT | None]:
        """Gather every rank's tensor into rank ``dst``'s ``output``, concatenated in group order."""
        at_root = dst == self._rank
        tensors = output if at_root else None, tensor
        return self._call("gather_into_tensor", data_movement.gather_single, tensors, options, (dst,), writes=at_root)

    gather_into_tensor = gather_single

    def scatter(
        self, tensor: TensorT, scatter_list: Sequence[TensorLike] | None, src: int, **options: Unpack[CallOptions]
    ) -> Work[TensorT]:
        """Copy the ``i``-th tensor of rank ``src``'s ``scatter_list`` into rank ``i``'s ``tensor``."""
        return self._call("scatter", data_movement.scatter, (tensor, scatter_list), options, (src,))

    def all_to_all(
        self, output_list: TensorsT, input_list: Sequence[TensorLike], **options: Unpack[CallOptions]
    ) -> Work[TensorsT]:
        """Send ``input_list[i]`` to rank ``i``, and receive from it into ``output_list[i]``; any sizes."""
        return self._call("all_to_all", data_movement.all_to_all_lists, (output_list, input_list), options)

    def all_to_all_single(
        self,
        output: TensorT,
        input: TensorLike,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        **options: Unpack[CallOptions],
    ) -> Work[TensorT]:
        """Exchange parts of one tensor. Split sizes are lengths in the first dimension; None means equal parts."""
        sizes = _split_sizes("output", output_split_sizes), _split_sizes("input", input_split_sizes)
        return self._call("all_to_all_single", data_movement.all_to_all_single, (output, input), options, sizes)

    def barrier(self, **options: Unpack[CallOptions]) -> Work[None]:
        """Complete when every rank has called the barrier."""
        return self._call("barrier", data_movement.barrier, (), options, writes=False)

    # -- between two ranks ---------------------------------------------------------------------

    def send(self, tensor: TensorLike, dst: int, tag: int = 0, **options: Unpack[CallOptions]) -> Work[None]:
        """Send ``tensor`` to rank ``dst``. The work completes when the caller may change the memory of ``tensor``."""
        try:
            return self._group_for(tensor)._send(tensor, dst, checked_tag(tag), options)
        except UsageError as error:
            self._refused("send", error)
            raise

    def recv(
        self, tensor: TensorLike, src: int | None = None, tag: int = 0, **options: Unpack[CallOptions]
    ) -> Work[int]:
        """Receive into ``tensor`` from rank ``src``, or from any rank; the result is the sender's global rank."""
        try:
            return self._group_for(tensor)._receive(tensor, src, checked_tag(tag), options)
        except UsageError as error:
            self._refused("recv", error)
            raise

    def isend(self, tensor: TensorLike, dst: int, tag: int = 0) -> Work[None]:
        """Start to send ``tensor`` to rank ``dst``: torch's name of `send`, whose work completes in the background."""
        return self.send(tensor, dst, tag)

    def irecv(self, tensor: TensorLike, src: int | None = None, tag: int = 0) -> Work[int]:
        """Start to receive into ``tensor`` from rank ``src``, or from any rank: torch's name of `recv`."""
        return self.recv(tensor, src, tag)


def _split_sizes(what: str, sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    name = f"{what}_split_sizes"
    return tuple(whole_number_of(f"an entry of {name}", size) for size in list_of(name, sizes, "numbers of rows"))


def checked_tag(tag: int) -> int:
    """Return ``tag``; raise UsageError if it is not a valid tag."""
    if type(tag) is not int:
        tag = whole_number_of("a tag", tag)
    if not 0 <= tag < 1 << 32:
        raise UsageError(f"a tag is a number from 0 to 2^32 - 1, not {tag}")
    return tag
