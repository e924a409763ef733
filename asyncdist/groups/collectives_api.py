"""The collectives with the names and argument orders of torch.distributed, for the asyncio API and the blocking API.

`asyncdist` exports a `CollectivesApi` whose collectives return a `Work` to await, `asyncdist.sync` one whose
collectives block unless ``async_op=True``. ``src`` and ``dst`` are global ranks, as in torch; ``group_src`` and
``group_dst`` are ranks in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from asyncdist.base.deadline import Timeout
from asyncdist.base.ops import ReduceOp, Reduction
from asyncdist.engine.work import Work
from asyncdist.errors import UsageError
from asyncdist.groups.default_world import AnyGroup, resolve_group
from asyncdist.groups.group import Group
from asyncdist.memory.torch_compile import excluded_from_compile

R = TypeVar("R")
V = TypeVar("V")

# The module of Work does not import torch, so the decorator is applied here.
excluded_from_compile(Work)


@excluded_from_compile
class P2POp:
    """One send or receive for `batch_isend_irecv`.

    Args:
        op: ``isend`` or ``irecv``.
        tensor: The tensor to send, or to receive into.
        peer: Global rank of the other side.
        group: The group; None means the default group.
        tag: Tag of the message, from 0 to 2^32 - 1.
        group_peer: Group rank of the other side, instead of ``peer``.

    Raises:
        UsageError: ``op`` is another function, or not exactly one of ``peer`` and ``group_peer`` is given.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Any,
        peer: int | None = None,
        group: AnyGroup = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        self._name = getattr(op, "__name__", "")
        if self._name not in ("isend", "irecv"):
            raise UsageError(f"P2POp takes isend or irecv, not {op!r}")
        self.op, self.tensor, self.group, self.tag = op, tensor, group, tag
        self.peer = _member(resolve_group(group), self._name, peer, group_peer, "peer")

    def start(self) -> Work:
        """Start the operation and return its work."""
        of = resolve_group(self.group)
        return (of.send if self._name == "isend" else of.recv)(self.tensor, self.peer, self.tag)


def _member(of: Group, op: str, global_rank: int | None, group_rank: int | None, what: str) -> int:
    """Return the group rank from a global rank or a group rank, exactly one of which must be given."""
    try:
        if global_rank is not None and group_rank is not None:
            raise UsageError(f"give {what} or group_{what}, not both")
        if global_rank is not None:
            return of.group_rank(global_rank)
        if group_rank is not None:
            return group_rank
        raise UsageError(f"{what} is missing: give a global rank as {what}, or a rank in the group as group_{what}")
    except UsageError as error:
        of.refused(op, error)
        raise


def _root(of: Group, op: str, global_rank: int | None, group_rank: int | None, what: str) -> int:
    """Return the group rank as `_member` does; the default is group rank 0."""
    return 0 if global_rank is None and group_rank is None else _member(of, op, global_rank, group_rank, what)


@excluded_from_compile
class CollectivesApi(Generic[R, V]):
    """The collectives with the names of torch.distributed.

    Every rank of the group calls the same collectives in the same order. These rules hold for all methods:

    - Tensors are torch tensors or numpy arrays. Outputs may be non-contiguous but must not overlap themselves. The dtype is
      the same on every rank.
    - ``group`` is the group; None means the default group. Only members of a group call its collectives.
    - ``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` ranks in the group; give one of both.
    - ``async_op=True`` returns a `Work` instead of blocking. Calls of `asyncdist` always return a `Work`, which is awaited.

    Calls raise UsageError for wrong arguments, before anything is sent; MismatchError if the ranks' calls differ;
    PeerLostError if a rank died; OperationTimeoutError after the group's timeout; GroupAbortedError after any of these.

    Args:
        finish: ``finish(work, async_op)`` makes the return value of a collective.
        value: ``value(work)`` makes the return value of an operation whose result is a value.
        blocking: Whether calls block unless ``async_op=True``.
    """

    def __init__(self, finish: Callable[[Work, bool], R], value: Callable[[Work], V], *, blocking: bool) -> None:
        self._finish = finish
        self._value = value
        self._background = not blocking

    def all_reduce(
        self, tensor: Any, op: Reduction = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
    ) -> R:
        """Reduce ``tensor`` over the group, in place. All ranks get the same bits.

        Args:
            tensor: A dense tensor of any shape and layout, equal on all ranks, or a sparse COO tensor (SUM and AVG).
            op: The reduction. AVG of integers truncates towards zero.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking.

        Example:
            >>> gradients = torch.ones(1000)
            >>> await dist.all_reduce(gradients)  # each element is the number of ranks
        """
        work = resolve_group(group).all_reduce(tensor, op, background=async_op or self._background)
        return self._finish(work, async_op)

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: Reduction = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
    ) -> R:
        """Reduce several tensors of one dtype over the group, in place, as one operation."""
        return self._finish(
            resolve_group(group).all_reduce_coalesced(tensors, op, background=async_op or self._background), async_op
        )

    def reduce(
        self,
        tensor: Any,
        dst: int | None = None,
        op: Reduction = ReduceOp.SUM,
        group: AnyGroup = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> R:
        """Reduce ``tensor``, of equal shape on all ranks, into the tensor of ``dst``; other tensors do not change."""
        of = resolve_group(group)
        to = _member(of, "reduce", dst, group_dst, "dst")
        return self._finish(of.reduce(tensor, to, op, background=async_op or self._background), async_op)

    def broadcast(
        self,
        tensor: Any,
        src: int | None = None,
        group: AnyGroup = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> R:
        """Copy the ``tensor`` of ``src`` into the tensor of every rank; shapes are equal on all ranks."""
        of = resolve_group(group)
        root = _member(of, "broadcast", src, group_src, "src")
        return self._finish(of.broadcast(tensor, root, background=async_op or self._background), async_op)

    def all_gather(self, tensor_list: Sequence[Any], tensor: Any, group: AnyGroup = None, async_op: bool = False) -> R:
        """Gather every rank's ``tensor`` into ``tensor_list``, in group order; shapes may differ between ranks."""
        return self._finish(
            resolve_group(group).all_gather(tensor_list, tensor, background=async_op or self._background), async_op
        )

    def all_gather_single(
        self, output_tensor: Any, input_tensor: Any, group: AnyGroup = None, async_op: bool = False
    ) -> R:
        """Gather every rank's ``input_tensor`` into ``output_tensor``.

        Args:
            output_tensor: Output of P times as many elements, for P ranks: of shape (P * n, ...) or (P, n, ...).
            input_tensor: Input of shape (n, ...), equal on all ranks.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking.
        """
        return self._finish(
            resolve_group(group).all_gather_single(
                output_tensor, input_tensor, background=async_op or self._background
            ),
            async_op,
        )

    def all_gather_coalesced(
        self,
        output_tensor_lists: Sequence[Sequence[Any]],
        input_tensor_list: Sequence[Any],
        group: AnyGroup = None,
        async_op: bool = False,
    ) -> R:
        """Gather several tensors as one operation: rank ``r``'s ``i``-th into ``output_tensor_lists[r][i]``."""
        of = resolve_group(group)
        work = of.all_gather_coalesced(output_tensor_lists, input_tensor_list, background=async_op or self._background)
        return self._finish(work, async_op)

    def gather(
        self,
        tensor: Any,
        gather_list: Sequence[Any] | None = None,
        dst: int | None = None,
        group: AnyGroup = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> R:
        """Gather every rank's ``tensor`` into ``gather_list`` on ``dst`` (default: rank 0); pass None on other ranks."""
        of = resolve_group(group)
        to = _root(of, "gather", dst, group_dst, "dst")
        return self._finish(of.gather(tensor, gather_list, to, background=async_op or self._background), async_op)

    def gather_single(
        self,
        tensor: Any,
        gather_tensor: Any = None,
        dst: int | None = None,
        group: AnyGroup = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> R:
        """Gather every rank's ``tensor`` into ``gather_tensor`` on ``dst`` (default: rank 0), concatenated."""
        of = resolve_group(group)
        to = _root(of, "gather_into_tensor", dst, group_dst, "dst")
        return self._finish(
            of.gather_single(tensor, gather_tensor, to, background=async_op or self._background), async_op
        )

    def scatter(
        self,
        tensor: Any,
        scatter_list: Sequence[Any] | None = None,
        src: int | None = None,
        group: AnyGroup = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> R:
        """Copy the ``i``-th tensor of the ``scatter_list`` on ``src`` (default: rank 0) into rank ``i``'s ``tensor``."""
        of = resolve_group(group)
        root = _root(of, "scatter", src, group_src, "src")
        return self._finish(of.scatter(tensor, scatter_list, root, background=async_op or self._background), async_op)

    def reduce_scatter(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: Reduction = ReduceOp.SUM,
        group: AnyGroup = None,
        async_op: bool = False,
    ) -> R:
        """Reduce ``input_list[i]`` over the group into rank ``i``'s ``output``; shapes may differ between ranks."""
        return self._finish(
            resolve_group(group).reduce_scatter(output, input_list, op, background=async_op or self._background),
            async_op,
        )

    def reduce_scatter_single(
        self,
        output: Any,
        input: Any,
        op: Reduction = ReduceOp.SUM,
        group: AnyGroup = None,
        async_op: bool = False,
    ) -> R:
        """Reduce the ``i``-th of P equal parts of ``input`` over the group into ``output`` of rank ``i``, for P ranks.

        Args:
            output: Output of shape (n, ...).
            input: Input of shape (P * n, ...) or (P, n, ...).
            op: The reduction.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking.
        """
        return self._finish(
            resolve_group(group).reduce_scatter_single(output, input, op, background=async_op or self._background),
            async_op,
        )

    def all_to_all(
        self,
        output_tensor_list: Sequence[Any],
        input_tensor_list: Sequence[Any],
        group: AnyGroup = None,
        async_op: bool = False,
    ) -> R:
        """Send ``input_tensor_list[i]`` to rank ``i``, receive from it into ``output_tensor_list[i]``; any shapes."""
        work = resolve_group(group).all_to_all(
            output_tensor_list, input_tensor_list, background=async_op or self._background
        )
        return self._finish(work, async_op)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: AnyGroup = None,
        async_op: bool = False,
    ) -> R:
        """Exchange parts of one tensor: send the ``i``-th part of ``input`` to rank ``i``, and receive its part.

        Args:
            output: Output; its parts are in the order of the senders.
            input: Input; its parts are in the order of the receivers.
            output_split_sizes: Lengths of the parts of ``output`` in the first dimension; None means equal parts.
            input_split_sizes: Lengths of the parts of ``input`` in the first dimension; None means equal parts.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking.
        """
        work = resolve_group(group).all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, background=async_op or self._background
        )
        return self._finish(work, async_op)

    def barrier(
        self, group: AnyGroup = None, async_op: bool = False, device_ids: object = None, timeout: Timeout = None
    ) -> R:
        """Block until every rank of the group has called it, or return a work that completes then.

        Args:
            group: The group; None means the default group.
            async_op: Return a work instead of blocking.
            device_ids: Accepted for compatibility; has no effect.
            timeout: Limit in seconds or as a timedelta; None takes the group's.
        """
        return self._finish(
            resolve_group(group).barrier(timeout=timeout, background=async_op or self._background), async_op
        )

    def monitored_barrier(self, group: AnyGroup = None, timeout: Timeout = None, wait_all_ranks: bool = False) -> R:
        """Synchronize like `barrier`. On a timeout, the error of rank 0 names every missing rank.

        Args:
            group: The group; None means the default group.
            timeout: Limit in seconds or as a timedelta; None takes the group's.
            wait_all_ranks: Accepted for compatibility; the error always names all missing ranks.
        """
        return self._finish(resolve_group(group).monitored_barrier(timeout=timeout, background=self._background), False)

    # -- objects -------------------------------------------------------------------------------

    def all_gather_object(
        self, object_list: list[Any], obj: Any, group: AnyGroup = None, weights_only: bool = False
    ) -> R:
        """Gather every rank's object into every rank's list.

        Args:
            object_list: A list with one element for each rank of the group; it receives the objects in group order.
            obj: The object of this rank: plain data, tensors and arrays.
            group: The group; None means the default group.
            weights_only: Also accept the types that ``torch.load(weights_only=True)`` reads, and refuse pickles even if
                ASYNCDIST_ALLOW_PICKLE allows them. Give the same value on every rank.
        """
        work = resolve_group(group).all_gather_object(object_list, obj, weights_only, background=self._background)
        return self._finish(work, False)

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: AnyGroup = None,
        group_dst: int | None = None,
        weights_only: bool = False,
    ) -> R:
        """Gather every rank's object into the list on ``dst`` (default: rank 0); pass None on other ranks."""
        of = resolve_group(group)
        to = _root(of, "gather_object", dst, group_dst, "dst")
        work = of.gather_object(obj, object_gather_list, to, weights_only, background=self._background)
        return self._finish(work, False)

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Sequence[Any] | None = None,
        src: int | None = None,
        group: AnyGroup = None,
        group_src: int | None = None,
        weights_only: bool = False,
    ) -> R:
        """Put the ``i``-th object of ``src``'s list into rank ``i``'s ``scatter_object_output_list[0]``."""
        of = resolve_group(group)
        root = _root(of, "scatter_object_list", src, group_src, "src")
        lists = scatter_object_output_list, scatter_object_input_list
        return self._finish(of.scatter_object_list(*lists, root, weights_only, background=self._background), False)

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: AnyGroup = None,
        device: object = None,
        group_src: int | None = None,
        weights_only: bool = False,
    ) -> R:
        """Replace every rank's list by the list of ``src`` (default: rank 0), which has the same length."""
        of = resolve_group(group)
        root = _root(of, "broadcast_object_list", src, group_src, "src")
        work = of.broadcast_object_list(object_list, root, weights_only, background=self._background)
        return self._finish(work, False)

    # -- between two ranks ---------------------------------------------------------------------

    def send(
        self, tensor: Any, dst: int | None = None, group: AnyGroup = None, tag: int = 0, group_dst: int | None = None
    ) -> R:
        """Send ``tensor`` to ``dst`` with a tag from 0 to 2^32 - 1; complete when the caller may change ``tensor``."""
        of = resolve_group(group)
        to = _member(of, "send", dst, group_dst, "dst")
        return self._finish(of.send(tensor, to, tag, background=self._background), False)

    def recv(
        self,
        tensor: Any,
        src: int | None = None,
        group: AnyGroup = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> V:
        """Receive a message into ``tensor``.

        Args:
            tensor: Output with the shape of the sent tensor.
            src: Global rank of the sender; None accepts any sender.
            group: The group; None means the default group.
            tag: Tag of the message.
            group_src: Group rank of the sender, instead of ``src``.

        Returns:
            The sender's global rank.
        """
        return self._value(self._receive(tensor, src, group, tag, group_src, self._background))

    def isend(
        self, tensor: Any, dst: int | None = None, group: AnyGroup = None, tag: int = 0, group_dst: int | None = None
    ) -> Work:
        """Start to send ``tensor`` to ``dst``. Do not change ``tensor`` until the work is complete."""
        of = resolve_group(group)
        return of.send(tensor, _member(of, "send", dst, group_dst, "dst"), tag)

    def irecv(
        self,
        tensor: Any,
        src: int | None = None,
        group: AnyGroup = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work:
        """Start to receive into ``tensor`` from ``src``, or from any rank if None."""
        return self._receive(tensor, src, group, tag, group_src, True)

    def _receive(
        self, tensor: Any, src: int | None, group: AnyGroup, tag: int, group_src: int | None, background: bool
    ) -> Work:
        of = resolve_group(group)
        source = None if src is None and group_src is None else _member(of, "recv", src, group_src, "src")
        return of.recv(tensor, source, tag, background=background)

    def batch_isend_irecv(self, p2p_op_list: Sequence[P2POp]) -> list[Work]:
        """Start all sends and receives of a non-empty list and return their works in the same order."""
        if not p2p_op_list or not all(isinstance(op, P2POp) for op in p2p_op_list):
            raise UsageError("batch_isend_irecv takes a list of P2POp, one at least")
        return [op.start() for op in p2p_op_list]

    def send_object_list(
        self,
        object_list: Sequence[Any],
        dst: int | None = None,
        group: AnyGroup = None,
        device: object = None,
        group_dst: int | None = None,
        use_batch: bool = False,
        weights_only: bool = False,
    ) -> R:
        """Send a list of objects to ``dst``; ``device`` and ``use_batch`` are ignored."""
        of = resolve_group(group)
        to = _member(of, "send_object_list", dst, group_dst, "dst")
        work = of.send_object_list(object_list, to, weights_only=weights_only, background=self._background)
        return self._finish(work, False)

    def recv_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: AnyGroup = None,
        device: object = None,
        group_src: int | None = None,
        use_batch: bool = False,
        weights_only: bool = False,
    ) -> V:
        """Receive a list of objects of the same length from ``src`` or any rank; the result is the sender's global rank."""
        of = resolve_group(group)
        source = None if src is None and group_src is None else _member(of, "recv_object_list", src, group_src, "src")
        work = of.recv_object_list(object_list, source, weights_only=weights_only, background=self._background)
        return self._value(work)
