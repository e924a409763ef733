"""The tensor operations that a `Group` and its `DeviceGroup` have in common.

`Group` and `DeviceGroup` derive from it. `CollectiveOps` is what a `Group` and its part on a device have in common.
Ranks in arguments are ranks in the group; the faces (`asyncdist`, `asyncdist.sync`) translate global ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

from asyncdist.base.deadline import Timeout
from asyncdist.base.ops import ReduceOp, Reduction
from asyncdist.collectives import data_movement, reductions
from asyncdist.engine.operation import Plan
from asyncdist.engine.work import Work
from asyncdist.errors import UsageError
from asyncdist.memory.torch_compile import excluded_from_compile

T = TypeVar("T")


class CallOptions(TypedDict, total=False):
    """Options of an operation.

    Attributes:
        background: True (the default) returns at once. False returns when the operation has succeeded or failed; call
            ``result()`` on the returned work to get the value or the error.
        timeout: Limit in seconds or as a timedelta; None takes the group's.
    """

    background: bool
    timeout: Timeout


@excluded_from_compile
class CollectiveOps(ABC):
    """The tensor operations of an ordered set of ranks of a world.

    ``ranks`` are global ranks, by rank in the group. Methods start an operation and return its `Work`. Each takes
    `CallOptions` as keywords.
    """

    name: str
    ranks: tuple[int, ...]
    timeout: float
    _rank: int
    _who: data_movement.GroupContext

    # -- identity -------------------------------------------------------------------------------

    def rank(self) -> int:
        """Return the rank of this process in this group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in this group."""
        return len(self.ranks)

    # -- issuing ------------------------------------------------------------------------------

    @abstractmethod
    def _at(self, value: Any) -> CollectiveOps:
        """Return the operations for the device of a tensor, or of the first tensor of a list; host memory: ``self``."""

    def refused(self, name: str, error: UsageError) -> None:
        """Add the operation, the group and the rank to the error of a refused call."""
        error.during(group=self.name, rank=self.ranks[self._rank], op=name)

    def _named(self, start: Callable[..., T], name: str, *args: Any) -> T:
        """Return ``start(name, *args)``; a UsageError is annotated with the operation ``name``."""
        try:
            return start(name, *args)
        except UsageError as error:
            self.refused(name, error)
            raise

    @abstractmethod
    def _issue(self, name: str, plan: Plan, how: CallOptions) -> Work:
        """Start a collective."""

    def _call(
        self,
        name: str,
        first: Any,
        make: Callable[..., Plan],
        tensors: tuple[Any, ...],
        how: CallOptions,
        *more: Hashable,
    ) -> Work:
        """Start the collective that ``make(context, *tensors, *more)`` plans, on the device of the tensor ``first``.

        The result of the work is ``tensors[0]``.
        """
        try:
            at = self._at(first)
            return at._issue(name, make(at._who, *tensors, *more), how)
        except UsageError as error:
            self.refused(name, error)
            raise

    def _begin(self, name: str, first: Any, make: Callable[..., Plan], args: tuple[Any, ...], how: CallOptions) -> Work:
        at = self._at(first)
        return at._issue(name, make(at._who, *args), how)

    @abstractmethod
    def _send(self, name: str, tensor: Any, peer: int, tag: int, how: CallOptions) -> Work:
        """Start to send."""

    @abstractmethod
    def _receive(self, name: str, tensor: Any, peer: int | None, tag: int, how: CallOptions) -> Work:
        """Start to receive."""

    # -- reductions ----------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, op: Reduction = ReduceOp.SUM, **how: Unpack[CallOptions]) -> Work:
        """Reduce ``tensor`` over the ranks, in place, with the same bits on every rank."""
        return self._call("all_reduce", tensor, reductions.all_reduce, (tensor,), how, op)

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: Reduction = ReduceOp.SUM, **how: Unpack[CallOptions]
    ) -> Work:
        """Reduce several tensors of one dtype over the ranks as one operation."""
        make = reductions.all_reduce_coalesced
        return self._named(self._begin, "all_reduce_coalesced", tensors, make, (tensors, op), how)

    def reduce(self, tensor: Any, dst: int, op: Reduction = ReduceOp.SUM, **how: Unpack[CallOptions]) -> Work:
        """Reduce ``tensor`` to rank ``dst``; the other ranks' tensors keep their content."""
        return self._call("reduce", tensor, reductions.reduce, (tensor,), how, dst, op)

    def reduce_scatter(
        self, output: Any, input_list: Sequence[Any], op: Reduction = ReduceOp.SUM, **how: Unpack[CallOptions]
    ) -> Work:
        """Reduce ``input_list[i]`` over the ranks into rank ``i``'s ``output``; sizes may differ by rank."""
        tensors = output, input_list
        make = reductions.reduce_scatter_list
        return self._call("reduce_scatter", output, make, tensors, how, op)

    def reduce_scatter_single(
        self, output: Any, input: Any, op: Reduction = ReduceOp.SUM, **how: Unpack[CallOptions]
    ) -> Work:
        """Reduce the ``i``-th equal part of ``input`` over the ranks into rank ``i``'s ``output``."""
        tensors = output, input
        make = reductions.reduce_scatter_single
        return self._call("reduce_scatter_tensor", output, make, tensors, how, op)

    # -- moving --------------------------------------------------------------------------------

    def broadcast(self, tensor: Any, src: int, **how: Unpack[CallOptions]) -> Work:
        """Copy rank ``src``'s tensor into every rank's."""
        return self._call("broadcast", tensor, data_movement.broadcast, (tensor,), how, src)

    def all_gather(self, tensor_list: Sequence[Any], tensor: Any, **how: Unpack[CallOptions]) -> Work:
        """Gather every rank's ``tensor`` into ``tensor_list``, by rank; sizes may differ by rank."""
        return self._call("all_gather", tensor, data_movement.all_gather_list, (tensor_list, tensor), how)

    def all_gather_coalesced(
        self, tensor_lists: Sequence[Sequence[Any]], tensors: Sequence[Any], **how: Unpack[CallOptions]
    ) -> Work:
        """Gather several tensors as one operation: rank ``r``'s ``tensors[i]`` into ``tensor_lists[r][i]``."""
        args = tensor_lists, tensors
        return self._named(self._begin, "all_gather_coalesced", tensors, data_movement.all_gather_coalesced, args, how)

    def all_gather_single(self, output: Any, input: Any, **how: Unpack[CallOptions]) -> Work:
        """Gather every rank's ``input`` into ``output``, concatenated in group order."""
        return self._call("all_gather_into_tensor", output, data_movement.all_gather_single, (output, input), how)

    def gather(self, tensor: Any, gather_list: Sequence[Any] | None, dst: int, **how: Unpack[CallOptions]) -> Work:
        """Gather every rank's tensor into ``gather_list`` on rank ``dst``; pass None on the other ranks."""
        return self._call("gather", tensor, data_movement.gather, (gather_list, tensor), how, dst)

    def gather_single(self, tensor: Any, output: Any, dst: int, **how: Unpack[CallOptions]) -> Work:
        """Gather every rank's tensor into rank ``dst``'s ``output``, concatenated in group order."""
        into = output if dst == self.rank() else None
        tensors = into, tensor
        return self._call("gather_into_tensor", tensor, data_movement.gather_single, tensors, how, dst)

    def scatter(self, tensor: Any, scatter_list: Sequence[Any] | None, src: int, **how: Unpack[CallOptions]) -> Work:
        """Copy the ``i``-th tensor of rank ``src``'s ``scatter_list`` into rank ``i``'s ``tensor``."""
        return self._call("scatter", tensor, data_movement.scatter, (tensor, scatter_list), how, src)

    def all_to_all(self, output_list: Sequence[Any], input_list: Sequence[Any], **how: Unpack[CallOptions]) -> Work:
        """Send ``input_list[i]`` to rank ``i``, and receive from it into ``output_list[i]``; any sizes."""
        tensors = output_list, input_list
        return self._call("all_to_all", output_list, data_movement.all_to_all_lists, tensors, how)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        **how: Unpack[CallOptions],
    ) -> Work:
        """Exchange parts of one tensor; split sizes count along the first dimension, equal parts if not given."""
        sizes = _hashable(output_split_sizes), _hashable(input_split_sizes)
        return self._call("all_to_all_single", output, data_movement.all_to_all_single, (output, input), how, *sizes)

    def barrier(self, **how: Unpack[CallOptions]) -> Work:
        """Complete when every rank has called it."""
        return self._call("barrier", None, data_movement.barrier, (), how)

    # -- between two ranks ---------------------------------------------------------------------

    def send(self, tensor: Any, dst: int, tag: int = 0, **how: Unpack[CallOptions]) -> Work:
        """Send ``tensor`` to rank ``dst``; complete when the caller may change the memory of ``tensor``."""
        return self._named(self._at(tensor)._send, "send", tensor, dst, tag, how)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0, **how: Unpack[CallOptions]) -> Work:
        """Receive into ``tensor`` from rank ``src``, or from any rank; the result is the sender's global rank."""
        return self._named(self._at(tensor)._receive, "recv", tensor, src, tag, how)


def _hashable(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(sizes)


def checked_tag(tag: int) -> int:
    """Return ``tag``; raise UsageError if it is not a valid tag."""
    if not 0 <= tag < 1 << 32:
        raise UsageError(f"a tag is a number from 0 to 2^32 - 1, not {tag}")
    return tag
