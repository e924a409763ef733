"""The operations on tensors among some ranks, each one line: a plan, handed to whoever carries it out.

`Calls` is what a `Group` and its part on a device have in common. Ranks in arguments are ranks in the group; the faces
(`asyncdist`, `asyncdist.sync`) translate global ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypedDict, Unpack

from asyncdist.collectives import plans, reductions
from asyncdist.collectives.arguments import check_length
from asyncdist.collectives.operation import Plan
from asyncdist.compiling import left_alone
from asyncdist.deadline import Timeout
from asyncdist.errors import UsageError
from asyncdist.ops import ReduceOp, Reduction, reduction
from asyncdist.work import Work


class How(TypedDict, total=False):
    """How an operation is driven.

    ``background`` (the default) lets it go on by itself; else the method returns when it is over, well or badly: call
    ``result()`` on what it returns. ``timeout`` (seconds, timedelta) overrides the group's.
    """

    background: bool
    timeout: Timeout


@left_alone
class Calls(ABC):
    """Some ranks of a world, in an order of their own, and the operations among them on tensors.

    ``ranks`` are global ranks, by rank in the group. Methods start an operation and return its `Work`. Each takes `How`
    as keywords.
    """

    name: str
    ranks: tuple[int, ...]
    timeout: float
    _rank: int
    _who: plans.Member

    # -- who we are ----------------------------------------------------------------------------

    def rank(self) -> int:
        """Return our rank in this group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in this group."""
        return len(self.ranks)

    def _other(self, rank: int, what: str) -> int:
        if self._peer(rank, what) == self._rank:
            raise UsageError(f"{what}={rank} is this rank itself: a message to oneself is a copy")
        return rank

    def _peer(self, rank: int, what: str) -> int:
        if not 0 <= rank < len(self.ranks):
            raise UsageError(f"{what}={rank} is not a rank of group {self.name!r}, which has {len(self.ranks)}")
        return rank

    # -- the one path --------------------------------------------------------------------------

    @abstractmethod
    def _at(self, value: Any) -> Calls:
        """Return who carries a tensor, or the first of a list: these ranks where it lies in the host's memory."""

    @abstractmethod
    def _issue(self, name: str, plan: Plan, how: How) -> Work:
        """Start a collective."""

    def _call(
        self, name: str, first: Any, make: Callable[..., Plan], tensors: tuple[Any, ...], how: How, *more: Hashable
    ) -> Work:
        """Start the collective that ``make(who, *tensors, *more)`` plans, where ``first`` lies, one of the tensors.

        Its value is ``tensors[0]``.
        """
        at = self._at(first)
        return at._issue(name, make(at._who, *tensors, *more), how)

    @abstractmethod
    def _send(self, tensor: Any, peer: int, tag: int, how: How) -> Work:
        """Start to send."""

    @abstractmethod
    def _receive(self, tensor: Any, peer: int | None, tag: int, how: How) -> Work:
        """Start to receive."""

    # -- reductions ----------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, op: Reduction = ReduceOp.SUM, **how: Unpack[How]) -> Work:
        """Reduce ``tensor`` over the ranks, in place, with the same bits on every rank."""
        return self._call("all_reduce", tensor, reductions.all_reduce, (tensor,), how, reduction(op))

    def all_reduce_coalesced(self, tensors: Sequence[Any], op: Reduction = ReduceOp.SUM, **how: Unpack[How]) -> Work:
        """Reduce several tensors of one dtype over the ranks as one operation."""
        if not tensors:
            raise UsageError("all_reduce_coalesced needs at least one tensor")
        at = self._at(tensors)
        plan = reductions.all_reduce_coalesced(at._who, tensors, reduction(op))
        return at._issue("all_reduce_coalesced", plan, how)

    def reduce(self, tensor: Any, dst: int, op: Reduction = ReduceOp.SUM, **how: Unpack[How]) -> Work:
        """Reduce ``tensor`` to rank ``dst``; the other ranks' tensors keep their content."""
        root = self._peer(dst, "dst")
        return self._call("reduce", tensor, reductions.reduce, (tensor,), how, root, reduction(op))

    def reduce_scatter(
        self, output: Any, input_list: Sequence[Any], op: Reduction = ReduceOp.SUM, **how: Unpack[How]
    ) -> Work:
        """Reduce ``input_list[i]`` over the ranks into rank ``i``'s ``output``; sizes may differ by rank."""
        tensors = output, input_list
        make = reductions.reduce_scatter_list
        return self._call("reduce_scatter", output, make, tensors, how, reduction(op))

    def reduce_scatter_single(self, output: Any, input: Any, op: Reduction = ReduceOp.SUM, **how: Unpack[How]) -> Work:
        """Reduce the ``i``-th equal part of ``input`` over the ranks into rank ``i``'s ``output``."""
        tensors = output, input
        make = reductions.reduce_scatter_single
        return self._call("reduce_scatter_tensor", output, make, tensors, how, reduction(op))

    # -- moving --------------------------------------------------------------------------------

    def broadcast(self, tensor: Any, src: int, **how: Unpack[How]) -> Work:
        """Copy rank ``src``'s tensor into every rank's."""
        return self._call("broadcast", tensor, plans.broadcast, (tensor,), how, self._peer(src, "src"))

    def all_gather(self, tensor_list: Sequence[Any], tensor: Any, **how: Unpack[How]) -> Work:
        """Gather every rank's ``tensor`` into ``tensor_list``, by rank; sizes may differ by rank."""
        return self._call("all_gather", tensor, plans.all_gather_list, (tensor_list, tensor), how)

    def all_gather_coalesced(
        self, tensor_lists: Sequence[Sequence[Any]], tensors: Sequence[Any], **how: Unpack[How]
    ) -> Work:
        """Gather several tensors as one operation: rank ``r``'s ``tensors[i]`` into ``tensor_lists[r][i]``."""
        check_length(tensor_lists, self.size(), "output_tensor_lists")
        if not tensors or any(len(row) != len(tensors) for row in tensor_lists):
            raise UsageError(
                f"each of output_tensor_lists needs {len(tensors)} tensors, and one at least, as the input"
            )
        pairs = [([row[place] for row in tensor_lists], tensor) for place, tensor in enumerate(tensors)]
        at = self._at(tensors)
        plan = plans.all_gather_lists(at._who, pairs, tensor_lists, "output_tensor_lists")
        return at._issue("all_gather_coalesced", plan, how)

    def all_gather_single(self, output: Any, input: Any, **how: Unpack[How]) -> Work:
        """Gather every rank's ``input`` into ``output``, one after the other in its memory."""
        return self._call("all_gather_into_tensor", output, plans.all_gather_single, (output, input), how)

    def gather(self, tensor: Any, gather_list: Sequence[Any] | None, dst: int, **how: Unpack[How]) -> Work:
        """Gather every rank's tensor into ``gather_list`` on rank ``dst``; None elsewhere."""
        return self._call("gather", tensor, plans.gather, (gather_list, tensor), how, self._peer(dst, "dst"))

    def gather_single(self, tensor: Any, output: Any, dst: int, **how: Unpack[How]) -> Work:
        """Gather every rank's tensor into rank ``dst``'s ``output``, one after the other; None elsewhere."""
        into = output if dst == self.rank() else None
        tensors = into, tensor
        return self._call("gather_into_tensor", tensor, plans.gather_single, tensors, how, self._peer(dst, "dst"))

    def scatter(self, tensor: Any, scatter_list: Sequence[Any] | None, src: int, **how: Unpack[How]) -> Work:
        """Give rank ``i`` the ``i``-th tensor of rank ``src``'s ``scatter_list``; None elsewhere."""
        return self._call("scatter", tensor, plans.scatter, (tensor, scatter_list), how, self._peer(src, "src"))

    def all_to_all(self, output_list: Sequence[Any], input_list: Sequence[Any], **how: Unpack[How]) -> Work:
        """Send ``input_list[i]`` to rank ``i``, and receive from it into ``output_list[i]``; any sizes."""
        tensors = output_list, input_list
        return self._call("all_to_all", output_list, plans.all_to_all_lists, tensors, how)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        **how: Unpack[How],
    ) -> Work:
        """Exchange parts of one tensor; split sizes count along the first dimension, equal parts if not given."""
        sizes = _hashable(output_split_sizes), _hashable(input_split_sizes)
        return self._call("all_to_all_single", output, plans.all_to_all_single, (output, input), how, *sizes)

    def barrier(self, **how: Unpack[How]) -> Work:
        """Complete when every rank has called it."""
        return self._call("barrier", None, plans.barrier, (), how)

    # -- between two ranks ---------------------------------------------------------------------

    def send(self, tensor: Any, dst: int, tag: int = 0, **how: Unpack[How]) -> Work:
        """Send ``tensor`` to rank ``dst``, complete when its memory may be changed."""
        return self._at(tensor)._send(tensor, self._other(dst, "dst"), checked_tag(tag), how)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0, **how: Unpack[How]) -> Work:
        """Receive into ``tensor`` from rank ``src``, or from any rank; the value is the sender's global rank."""
        source = None if src is None else self._other(src, "src")
        return self._at(tensor)._receive(tensor, source, checked_tag(tag), how)


def _hashable(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(sizes)


def checked_tag(tag: int) -> int:
    """Return a message's tag; UsageError if it is none."""
    if not 0 <= tag < 1 << 32:
        raise UsageError(f"a tag is a number from 0 to 2^32 - 1, not {tag}")
    return tag
