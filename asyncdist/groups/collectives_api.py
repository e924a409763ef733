"""The collectives with the names and argument orders of torch.distributed, for the asyncio API and the blocking API.

`asyncdist` exports the methods of a `CollectivesApi`, which return a `Work` to await, and `asyncdist.sync` those of a
`BlockingApi`, which block unless ``async_op=True``. ``src`` and ``dst`` are global
ranks, as in torch; ``group_src`` and ``group_dst`` are ranks in the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.base.callables import AnyFunction
from asyncdist.base.deadline import Timeout
from asyncdist.base.ops import ReduceOp
from asyncdist.errors import UsageError
from asyncdist.groups.default_world import AnyGroup, resolve_group
from asyncdist.groups.group import Group
from asyncdist.groups.members.regrouping import Agreed
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.memory.tensor_types import ReductionLike, TensorLike, TensorListsT, TensorsT, TensorT
from asyncdist.kernel.memory.torch_compile import excluded_from_compile

# The module of Work does not import torch, so the decorator is applied here.
excluded_from_compile(Work)


@excluded_from_compile
class P2POp:
    """One send or receive for `batch_isend_irecv`.

    Args:
        op: ``isend`` or ``irecv``: the function, or the method of a group.
        tensor: The tensor to send, or to receive into.
        peer: Global rank of the other side; with a method, its rank in that group.
        group: The group; None means the default group or, with a method, that group.
        tag: Tag of the message, from 0 to 2^32 - 1.
        group_peer: Group rank of the other side, instead of ``peer``.

    Raises:
        UsageError: ``op`` is another function, or a method of another group than ``group``; or not exactly one of
            ``peer`` and ``group_peer`` is given.

    Example:
        >>> received = torch.empty(2)
        >>> op = dist.P2POp(dist.irecv, received, 1)  # of the default group
        >>> op = dist.P2POp(group.irecv, received, 1)  # of any group
    """

    def __init__(
        self,
        op: AnyFunction,
        tensor: TensorLike,
        peer: int | None = None,
        group: AnyGroup = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        self._name = getattr(op, "__name__", "")
        if self._name not in ("isend", "irecv"):
            raise UsageError(f"P2POp takes isend or irecv, not {op!r}")
        owner = getattr(op, "__self__", None)
        if isinstance(owner, Group):
            if group is not None and group is not owner:
                raise UsageError(
                    f"this is the {self._name} of group {owner.name!r}: leave group= out, or pass that group"
                )
            # Methods take ranks in the group, and functions global ones.
            if peer is not None and group_peer is None:
                peer, group_peer = None, peer
            group = owner
        self.op, self.tensor, self.group, self.tag = op, tensor, group, tag
        self.peer = _member(self.owner, self._name, peer, group_peer, "peer")

    @property
    def owner(self) -> Group:
        """The group of the operation."""
        return resolve_group(self.group)

    def start(self) -> Work:
        """Start the operation and return its work."""
        of = self.owner
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
        of._refused(op, error)
        raise


def _root(of: Group, op: str, global_rank: int | None, group_rank: int | None, what: str) -> int:
    """Return the group rank as `_member` does; the default is group rank 0."""
    return 0 if global_rank is None and group_rank is None else _member(of, op, global_rank, group_rank, what)


@excluded_from_compile
class CollectivesApi:
    """The collectives with the names of torch.distributed.

    Every rank of the group calls the same collectives in the same order. These rules hold for all methods:

    - Tensors are torch tensors or numpy arrays. Outputs may be non-contiguous but must not overlap themselves. The dtype is
      the same on every rank.
    - ``group`` is the group; None means the default group. Only members of a group call its collectives.
    - ``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` ranks in the group; give one of both.
    - ``async_op=True`` returns a `Work` instead of blocking. Calls of `asyncdist` always return a `Work`, which is awaited.

    Calls raise UsageError for wrong arguments, before anything is sent; MismatchError if the ranks' calls differ;
    PeerLostError if a rank died; OperationTimeoutError after the group's timeout; GroupAbortedError after any of these.
    """

    _background: bool | None = True
    """Whether calls return at once without ``async_op=True``; `BlockingApi` says None: no, and the value is not used."""

    def _finish(self, work: Work, async_op: bool) -> Work:
        return work

    def _value(self, work: Work) -> Work:
        """Return what an operation returns whose result is a value."""
        return work

    def all_reduce(
        self, tensor: TensorT, op: ReductionLike = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
    ) -> Work[TensorT]:
        """Reduce ``tensor`` over the group, in place. Every rank gets the same bits.

        Args:
            tensor: Input and output: a dense tensor of any shape and layout, of the same shape and dtype on all ranks; or a
                sparse COO tensor (SUM and AVG).
            op: The reduction: a `ReduceOp`, a `premul_sum`, torch's own ReduceOp, or a name such as ``"avg"``. AVG of
                integers truncates towards zero.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.

        Returns:
            A work whose value is ``tensor``. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            UsageError: ``tensor`` is not a tensor or cannot be written, or ``op`` is not a reduction of its dtype.
            MismatchError: Shape, dtype or ``op`` differ between ranks.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> gradients = torch.ones(1000)
            >>> await dist.all_reduce(gradients)  # each element is the number of ranks
        """
        work = resolve_group(group).all_reduce(tensor, op, background=async_op or self._background)
        return self._finish(work, async_op)

    def all_reduce_coalesced(
        self, tensors: TensorsT, op: ReductionLike = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
    ) -> Work[TensorsT]:
        """Reduce several tensors over the group, in place, as one operation.

        Args:
            tensors: Inputs and outputs: one tensor or more, of one dtype and any shapes, which are the same on all ranks.
            op: The reduction.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.

        Returns:
            A work whose value is ``tensors``. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            UsageError: The list is empty or holds several dtypes, or a tensor cannot be written.
            MismatchError: Sizes, dtype or ``op`` differ between ranks.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> loss, hits = torch.rand(1), torch.rand(3, 2)
            >>> await dist.all_reduce_coalesced([loss, hits], dist.ReduceOp.AVG)
        """
        work = resolve_group(group).all_reduce_coalesced(tensors, op, background=async_op or self._background)
        return self._finish(work, async_op)

    def reduce(
        self,
        tensor: TensorT,
        dst: int | None = None,
        op: ReductionLike = ReduceOp.SUM,
        group: AnyGroup = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work[TensorT]:
        """Reduce ``tensor`` into the tensor of ``dst``. The tensors of the other ranks do not change.

        Args:
            tensor: Input, and on ``dst`` also output: any shape and layout; shape and dtype are the same on all ranks.
            dst: Global rank of the destination.
            op: The reduction.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.
            group_dst: Rank of the destination in the group, instead of ``dst``.

        Returns:
            A work whose value is ``tensor``. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            UsageError: Not exactly one of ``dst`` and ``group_dst`` is given, or it names no rank of the group.
            MismatchError: Shape, dtype, ``op`` or destination differ between ranks.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> loss = torch.ones(1)
            >>> await dist.reduce(loss, dst=0)  # on rank 0, loss is the number of ranks
        """
        of = resolve_group(group)
        to = _member(of, "reduce", dst, group_dst, "dst")
        return self._finish(of.reduce(tensor, to, op, background=async_op or self._background), async_op)

    def broadcast(
        self,
        tensor: TensorT,
        src: int | None = None,
        group: AnyGroup = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work[TensorT]:
        """Copy the ``tensor`` of ``src`` into the tensor of every other rank.

        Args:
            tensor: Input on ``src``, output on the other ranks: any layout; shape and dtype are the same on all ranks.
            src: Global rank of the source.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.
            group_src: Rank of the source in the group, instead of ``src``.

        Returns:
            A work whose value is ``tensor``. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            UsageError: Not exactly one of ``src`` and ``group_src`` is given, or it names no rank of the group.
            MismatchError: Shape, dtype or source differ between ranks.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> weights = torch.zeros(10, 10) if dist.get_rank() else torch.rand(10, 10)
            >>> await dist.broadcast(weights, src=0)  # every rank has the weights of rank 0
        """
        of = resolve_group(group)
        root = _member(of, "broadcast", src, group_src, "src")
        return self._finish(of.broadcast(tensor, root, background=async_op or self._background), async_op)

    def all_gather(
        self, tensor_list: TensorsT, tensor: TensorLike, group: AnyGroup = None, async_op: bool = False
    ) -> Work[TensorsT]:
        """Gather every rank's ``tensor`` into ``tensor_list``, in group order.

        Args:
            tensor_list: Outputs, one for each rank of the group: ``tensor_list[i]`` has the dtype and the number of
                elements of the ``tensor`` of rank ``i``.
            tensor: Input: any shape, which may differ between ranks; the dtype is the same on all ranks.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.

        Returns:
            A work whose value is ``tensor_list``. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            UsageError: ``tensor_list`` does not have one tensor for each rank, or holds several dtypes.
            MismatchError: A rank's input does not fit the outputs of another rank.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> mine = torch.full((2,), dist.get_rank())
            >>> gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            >>> await dist.all_gather(gathered, mine)  # tensor([0, 0]), tensor([1, 1]), ...
        """
        work = resolve_group(group).all_gather(tensor_list, tensor, background=async_op or self._background)
        return self._finish(work, async_op)

    def all_gather_single(
        self, output_tensor: TensorT, input_tensor: TensorLike, group: AnyGroup = None, async_op: bool = False
    ) -> Work[TensorT]:
        """Gather every rank's ``input_tensor`` into ``output_tensor``, in group order.

        Args:
            output_tensor: Output of P times as many elements, for P ranks: of shape (P * n, ...) or (P, n, ...).
            input_tensor: Input of shape (n, ...); shape and dtype are the same on all ranks.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.

        Returns:
            A work whose value is ``output_tensor``. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            UsageError: The output does not have P times as many elements, or has another dtype.
            MismatchError: Number of elements or dtype differ between ranks.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> mine = torch.full((2,), dist.get_rank())
            >>> gathered = torch.empty(dist.get_world_size(), 2, dtype=mine.dtype)
            >>> await dist.all_gather_single(gathered, mine)  # row i is rank i's tensor
        """
        background = async_op or self._background
        work = resolve_group(group).all_gather_single(output_tensor, input_tensor, background=background)
        return self._finish(work, async_op)

    def all_gather_coalesced(
        self,
        output_tensor_lists: TensorListsT,
        input_tensor_list: Sequence[TensorLike],
        group: AnyGroup = None,
        async_op: bool = False,
    ) -> Work[TensorListsT]:
        """Gather several tensors as one operation: rank ``r``'s ``i``-th into ``output_tensor_lists[r][i]``.

        Args:
            output_tensor_lists: Outputs, one list for each rank of the group, each with one tensor for each input.
            input_tensor_list: Inputs, one at least: any shapes. Their number and dtypes are the same on all ranks.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.

        Returns:
            A work whose value is ``output_tensor_lists``. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            UsageError: An output is missing, or the outputs of one input have several dtypes.
            MismatchError: A rank's inputs do not fit the outputs of another rank.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> mine = [torch.ones(2), torch.ones(3)]
            >>> gathered = [[torch.empty(2), torch.empty(3)] for _ in range(dist.get_world_size())]
            >>> await dist.all_gather_coalesced(gathered, mine)
        """
        of = resolve_group(group)
        work = of.all_gather_coalesced(output_tensor_lists, input_tensor_list, background=async_op or self._background)
        return self._finish(work, async_op)

    def gather(
        self,
        tensor: TensorLike,
        gather_list: TensorsT | None = None,
        dst: int | None = None,
        group: AnyGroup = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work[TensorsT | None]:
        """Gather every rank's ``tensor`` into the ``gather_list`` of ``dst``, in group order.

        Args:
            tensor: Input: any shape; number of elements and dtype are the same on all ranks.
            gather_list: On ``dst`` the outputs, one for each rank of the group, each with as many elements as ``tensor``;
                None on the other ranks.
            dst: Global rank of the destination; without ``dst`` and ``group_dst`` it is rank 0 of the group.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.
            group_dst: Rank of the destination in the group, instead of ``dst``.

        Returns:
            A work whose value is ``gather_list``. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            UsageError: ``gather_list`` is missing or does not fit on ``dst``, or is given on another rank.
            MismatchError: Number of elements, dtype or destination differ between ranks.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> mine = torch.ones(2)
            >>> gathered = [torch.empty(2) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
            >>> await dist.gather(mine, gathered, dst=0)
        """
        of = resolve_group(group)
        to = _root(of, "gather", dst, group_dst, "dst")
        return self._finish(of.gather(tensor, gather_list, to, background=async_op or self._background), async_op)

    def gather_single(
        self,
        tensor: TensorLike,
        gather_tensor: TensorT | None = None,
        dst: int | None = None,
        group: AnyGroup = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work[TensorT | None]:
        """Gather every rank's ``tensor`` into the ``gather_tensor`` of ``dst``, in group order.

        Args:
            tensor: Input of shape (n, ...); number of elements and dtype are the same on all ranks.
            gather_tensor: On ``dst`` the output, of shape (P * n, ...) or (P, n, ...) for P ranks; None on the other ranks.
            dst: Global rank of the destination; without ``dst`` and ``group_dst`` it is rank 0 of the group.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.
            group_dst: Rank of the destination in the group, instead of ``dst``.

        Returns:
            A work whose value is ``gather_tensor`` on ``dst``, None on the other ranks. `asyncdist.sync` returns None
            unless ``async_op=True``.

        Raises:
            UsageError: ``gather_tensor`` is missing on ``dst``, or does not have P times as many elements.
            MismatchError: Number of elements, dtype or destination differ between ranks.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> mine = torch.ones(2)
            >>> gathered = torch.empty(dist.get_world_size(), 2) if dist.get_rank() == 0 else None
            >>> await dist.gather_single(mine, gathered, dst=0)  # row i is rank i's tensor
        """
        of = resolve_group(group)
        to = _root(of, "gather_into_tensor", dst, group_dst, "dst")
        work = of.gather_single(tensor, gather_tensor, to, background=async_op or self._background)
        return self._finish(work, async_op)

    def scatter(
        self,
        tensor: TensorT,
        scatter_list: Sequence[TensorLike] | None = None,
        src: int | None = None,
        group: AnyGroup = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work[TensorT]:
        """Copy the ``i``-th tensor of the ``scatter_list`` of ``src`` into the ``tensor`` of rank ``i``.

        Args:
            tensor: Output: any shape and layout; number of elements and dtype are the same on all ranks.
            scatter_list: On ``src`` the inputs, one for each rank of the group, each with as many elements as ``tensor``;
                None on the other ranks.
            src: Global rank of the source; without ``src`` and ``group_src`` it is rank 0 of the group.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.
            group_src: Rank of the source in the group, instead of ``src``.

        Returns:
            A work whose value is ``tensor``. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            UsageError: ``scatter_list`` is missing or does not fit on ``src``, or is given on another rank.
            MismatchError: Number of elements, dtype or source differ between ranks.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> mine = torch.empty(2)
            >>> parts = [torch.full((2,), float(i)) for i in range(dist.get_world_size())]
            >>> await dist.scatter(mine, parts if dist.get_rank() == 0 else None, src=0)  # elements are the rank
        """
        of = resolve_group(group)
        root = _root(of, "scatter", src, group_src, "src")
        return self._finish(of.scatter(tensor, scatter_list, root, background=async_op or self._background), async_op)

    def reduce_scatter(
        self,
        output: TensorT,
        input_list: Sequence[TensorLike],
        op: ReductionLike = ReduceOp.SUM,
        group: AnyGroup = None,
        async_op: bool = False,
    ) -> Work[TensorT]:
        """Reduce the ``i``-th tensors of all ranks' ``input_list`` into the ``output`` of rank ``i``.

        Args:
            output: Output: as many elements as ``input_list[i]`` on rank ``i``, and its dtype.
            input_list: Inputs, one for each rank of the group, of one dtype. Sizes may differ within the list, but the list
                has the same sizes on all ranks.
            op: The reduction.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.

        Returns:
            A work whose value is ``output``. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            UsageError: ``input_list`` does not have one tensor for each rank, or ``output`` does not fit.
            MismatchError: Sizes, dtype or ``op`` differ between ranks.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> mine = torch.empty(2)
            >>> await dist.reduce_scatter(mine, [torch.ones(2) for _ in range(dist.get_world_size())])
        """
        work = resolve_group(group).reduce_scatter(output, input_list, op, background=async_op or self._background)
        return self._finish(work, async_op)

    def reduce_scatter_single(
        self,
        output: TensorT,
        input: TensorLike,
        op: ReductionLike = ReduceOp.SUM,
        group: AnyGroup = None,
        async_op: bool = False,
    ) -> Work[TensorT]:
        """Reduce the ``i``-th of P equal parts of ``input`` over the group into ``output`` of rank ``i``, for P ranks.

        Args:
            output: Output of shape (n, ...).
            input: Input of shape (P * n, ...) or (P, n, ...); shape and dtype are the same on all ranks.
            op: The reduction.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.

        Returns:
            A work whose value is ``output``. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            UsageError: ``input`` does not have P times as many elements as ``output``, or another dtype.
            MismatchError: Number of elements, dtype or ``op`` differ between ranks.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> mine = torch.empty(2)
            >>> await dist.reduce_scatter_single(mine, torch.ones(2 * dist.get_world_size()))
        """
        work = resolve_group(group).reduce_scatter_single(output, input, op, background=async_op or self._background)
        return self._finish(work, async_op)

    def all_to_all(
        self,
        output_tensor_list: TensorsT,
        input_tensor_list: Sequence[TensorLike],
        group: AnyGroup = None,
        async_op: bool = False,
    ) -> Work[TensorsT]:
        """Send ``input_tensor_list[i]`` to rank ``i``, and receive from it into ``output_tensor_list[i]``.

        Args:
            output_tensor_list: Outputs, one for each rank of the group: any shapes, of as many elements as it sends.
            input_tensor_list: Inputs, one for each rank of the group: any shapes. All inputs and outputs have one dtype.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.

        Returns:
            A work whose value is ``output_tensor_list``. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            UsageError: A list does not have one tensor for each rank, or the dtypes differ.
            MismatchError: A rank sends a different number of elements than the receiver expects.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> sent = [torch.full((2,), dist.get_rank()) for _ in range(dist.get_world_size())]
            >>> received = [torch.empty_like(tensor) for tensor in sent]
            >>> await dist.all_to_all(received, sent)  # tensor([0, 0]), tensor([1, 1]), ...
        """
        background = async_op or self._background
        work = resolve_group(group).all_to_all(output_tensor_list, input_tensor_list, background=background)
        return self._finish(work, async_op)

    def all_to_all_single(
        self,
        output: TensorT,
        input: TensorLike,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: AnyGroup = None,
        async_op: bool = False,
    ) -> Work[TensorT]:
        """Exchange parts of one tensor: send the ``i``-th part of ``input`` to rank ``i``, and receive its part.

        Args:
            output: Output; its parts are in the order of the senders.
            input: Input of the same dtype; its parts are in the order of the receivers.
            output_split_sizes: Lengths of the parts of ``output`` in the first dimension; None means equal parts.
            input_split_sizes: Lengths of the parts of ``input`` in the first dimension; None means equal parts.
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.

        Returns:
            A work whose value is ``output``. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            UsageError: Split sizes do not add up to the first dimension, or equal parts are not possible.
            MismatchError: A rank sends a different number of elements than the receiver expects.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> sent = torch.arange(2 * dist.get_world_size())
            >>> received = torch.empty_like(sent)
            >>> await dist.all_to_all_single(received, sent)  # two elements from each rank
        """
        sizes = output_split_sizes, input_split_sizes
        work = resolve_group(group).all_to_all_single(output, input, *sizes, background=async_op or self._background)
        return self._finish(work, async_op)

    def barrier(
        self, group: AnyGroup = None, async_op: bool = False, device_ids: object = None, timeout: Timeout = None
    ) -> Work[None]:
        """Synchronize: complete when every rank of the group has called the barrier.

        Args:
            group: The group; None means the default group.
            async_op: Return a work instead of blocking. Calls of `asyncdist` always return one.
            device_ids: Accepted for compatibility; has no effect.
            timeout: Limit in seconds or as a timedelta; None takes the group's.

        Returns:
            A work whose value is None. `asyncdist.sync` returns None unless ``async_op=True``.

        Raises:
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> await dist.barrier()
        """
        work = resolve_group(group).barrier(timeout=timeout, background=async_op or self._background)
        return self._finish(work, async_op)

    def monitored_barrier(
        self, group: AnyGroup = None, timeout: Timeout = None, wait_all_ranks: bool = False
    ) -> Work[None]:
        """Synchronize like `barrier`. On a timeout, the error of rank 0 names every missing rank.

        Args:
            group: The group; None means the default group.
            timeout: Limit in seconds or as a timedelta; None takes the group's.
            wait_all_ranks: Accepted for compatibility; the error always names all missing ranks.

        Returns:
            A work whose value is None. `asyncdist.sync` blocks and returns None.

        Raises:
            OperationTimeoutError: A rank did not call the barrier in time.
            GroupError: A rank died, or the group has failed.

        Example:
            >>> await dist.monitored_barrier(timeout=30)
        """
        return self._finish(resolve_group(group).monitored_barrier(timeout=timeout, background=self._background), False)

    # -- objects -------------------------------------------------------------------------------

    def all_gather_object(
        self, object_list: list[Any], obj: Any, group: AnyGroup = None, weights_only: bool = False
    ) -> Work[list[Any]]:
        """Gather every rank's object into every rank's list.

        Args:
            object_list: Output with one element for each rank of the group; it receives the objects in group order.
            obj: The object of this rank: plain data, tensors and arrays.
            group: The group; None means the default group.
            weights_only: Also accept the types that ``torch.load(weights_only=True)`` reads, and refuse pickles even if
                ASYNCDIST_ALLOW_PICKLE allows them. Give the same value on every rank.

        Returns:
            A work whose value is ``object_list``. `asyncdist.sync` blocks and returns None.

        Raises:
            UsageError: An object needs pickle, which is not allowed; or a list has the wrong length.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> objects = [None] * dist.get_world_size()
            >>> await dist.all_gather_object(objects, {"rank": dist.get_rank()})
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
    ) -> Work[list[Any] | None]:
        """Gather every rank's object into the list of ``dst``.

        Args:
            obj: The object of this rank: plain data, tensors and arrays.
            object_gather_list: On ``dst`` a list with one element for each rank of the group; None on the other ranks.
            dst: Global rank of the destination; without ``dst`` and ``group_dst`` it is rank 0 of the group.
            group: The group; None means the default group.
            group_dst: Rank of the destination in the group, instead of ``dst``.
            weights_only: Also accept the types that ``torch.load(weights_only=True)`` reads, and refuse pickles even if
                ASYNCDIST_ALLOW_PICKLE allows them. Give the same value on every rank.

        Returns:
            A work whose value is ``object_gather_list``. `asyncdist.sync` blocks and returns None.

        Raises:
            UsageError: An object needs pickle, which is not allowed; or a list has the wrong length.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> objects = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            >>> await dist.gather_object("text", objects, dst=0)
        """
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
    ) -> Work[list[Any]]:
        """Put the ``i``-th object of the list of ``src`` into the output list of rank ``i``.

        Args:
            scatter_object_output_list: Output of length 1 or more; its first element becomes this rank's object.
            scatter_object_input_list: On ``src`` the objects, one for each rank of the group; None on the other ranks.
            src: Global rank of the source; without ``src`` and ``group_src`` it is rank 0 of the group.
            group: The group; None means the default group.
            group_src: Rank of the source in the group, instead of ``src``.
            weights_only: Also accept the types that ``torch.load(weights_only=True)`` reads, and refuse pickles even if
                ASYNCDIST_ALLOW_PICKLE allows them. Give the same value on every rank.

        Returns:
            A work whose value is ``scatter_object_output_list``. `asyncdist.sync` blocks and returns None.

        Raises:
            UsageError: An object needs pickle, which is not allowed; or a list has the wrong length.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> mine = [None]
            >>> objects = list(range(dist.get_world_size())) if dist.get_rank() == 0 else None
            >>> await dist.scatter_object_list(mine, objects, src=0)  # mine[0] is the rank
        """
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
    ) -> Work[list[Any]]:
        """Replace every rank's list by the list of ``src``.

        Args:
            object_list: Input on ``src``, output on the other ranks: a list of the same length on all ranks.
            src: Global rank of the source; without ``src`` and ``group_src`` it is rank 0 of the group.
            group: The group; None means the default group.
            device: Accepted for compatibility; has no effect.
            group_src: Rank of the source in the group, instead of ``src``.
            weights_only: Also accept the types that ``torch.load(weights_only=True)`` reads, and refuse pickles even if
                ASYNCDIST_ALLOW_PICKLE allows them. Give the same value on every rank.

        Returns:
            A work whose value is ``object_list``. `asyncdist.sync` blocks and returns None.

        Raises:
            UsageError: An object needs pickle, which is not allowed.
            GroupError: The lists have different lengths, a rank died, the timeout passed, or the group has failed.

        Example:
            >>> settings = [{"lr": 0.1}] if dist.get_rank() == 0 else [None]
            >>> await dist.broadcast_object_list(settings, src=0)
        """
        of = resolve_group(group)
        root = _root(of, "broadcast_object_list", src, group_src, "src")
        work = of.broadcast_object_list(object_list, root, weights_only, background=self._background)
        return self._finish(work, False)

    # -- between two ranks ---------------------------------------------------------------------

    def send(
        self,
        tensor: TensorLike,
        dst: int | None = None,
        group: AnyGroup = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Work[None]:
        """Send ``tensor`` to ``dst``; complete when the caller may change ``tensor``.

        Args:
            tensor: Input: any shape, layout and dtype.
            dst: Global rank of the receiver.
            group: The group; None means the default group.
            tag: Tag of the message, from 0 to 2^32 - 1; the receiver gives the same tag.
            group_dst: Group rank of the receiver, instead of ``dst``.

        Returns:
            A work whose value is None. `asyncdist.sync` blocks and returns None.

        Raises:
            UsageError: Not exactly one of ``dst`` and ``group_dst`` is given, it is this rank, or the tag is not valid.
            MismatchError: The receiver expects another dtype or number of elements.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> if dist.get_rank() == 0 and dist.get_world_size() > 1:
            ...     await dist.send(torch.ones(2), dst=1)
        """
        of = resolve_group(group)
        to = _member(of, "send", dst, group_dst, "dst")
        return self._finish(of.send(tensor, to, tag, background=self._background), False)

    def recv(
        self,
        tensor: TensorLike,
        src: int | None = None,
        group: AnyGroup = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work[int]:
        """Receive a message into ``tensor``.

        Args:
            tensor: Output with the number of elements and the dtype of the sent tensor.
            src: Global rank of the sender; without ``src`` and ``group_src`` any rank may send.
            group: The group; None means the default group.
            tag: Tag of the message, from 0 to 2^32 - 1.
            group_src: Group rank of the sender, instead of ``src``.

        Returns:
            A work whose value is the sender's global rank. `asyncdist.sync` blocks and returns that rank.

        Raises:
            UsageError: ``src`` is this rank or not in the group, or the tag is not valid.
            MismatchError: The message has another dtype or number of elements.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> if dist.get_rank() == 1:
            ...     received = torch.empty(2)
            ...     sender = await dist.recv(received)  # from any rank
        """
        return self._value(self._receive(tensor, src, group, tag, group_src, bool(self._background)))

    def agree(self, flag: bool | int = True, group: AnyGroup = None, timeout: Timeout = None) -> Work[Agreed]:
        """Agree with all members of the group on the logical AND of a flag, although members may end during the call.

        Every member calls it, as often as the others. It also works after the group has failed. All members that get a
        result get the same one. A cancelled waiter has voted nevertheless.

        Args:
            flag: This member's flag.
            group: The group; None means the default group.
            timeout: Limit in seconds or as a timedelta; None takes the group's.

        Returns:
            A work whose value is an `Agreed`: the flag, and the ids of the members that did not take part. The flag is
            False if one of these is alive. `asyncdist.sync` blocks and returns the `Agreed`.

        Raises:
            OperationTimeoutError: A member that is alive has not called it in time.
            NoQuorumError: This member is cut off from others that may be alive and go on.
            ExcludedError: The others have agreed without this member, which they hold lost.

        Example:
            >>> loss = torch.rand(1)
            >>> flag, lost = await dist.agree(bool(loss.isfinite().all()))  # True if all losses are finite
        """
        return self._value(resolve_group(group).agree(flag, background=bool(self._background), timeout=timeout))

    def regroup(self, group: AnyGroup = None, min_size: int = 1, timeout: Timeout = None) -> Work[Group]:
        """Make the group of the members that are alive. It replaces ``group``, which is destroyed.

        Every member calls it, usually after an error. If the group has not failed, the first call makes it fail on all
        members, so that they call it too. Connections and registered tensors are kept. Repeated calls return the same work.
        The successor of the default group becomes the default group, so its members have new global ranks.

        Args:
            group: The group; None means the default group.
            min_size: The fewest members to go on with. The largest one that a member passes counts.
            timeout: Limit in seconds or as a timedelta; None takes the group's.

        Returns:
            A work whose value is the new group. Its ``member_ids`` are the ids of its members, and its ``generation`` is
            higher by one. `asyncdist.sync` blocks and returns the group.

        Raises:
            OperationTimeoutError: A member that is alive has not called it in time.
            NoQuorumError: Fewer than ``min_size`` members are left, or others may be alive elsewhere and go on.
            ExcludedError: The others go on without this member, which they hold lost.

        Example:
            >>> gradients = torch.ones(1000)
            >>> try:
            ...     await dist.all_reduce(gradients)
            ... except RuntimeError:  # every error of asyncdist is one
            ...     group = await dist.regroup(min_size=2)
        """
        work = resolve_group(group).regroup(min_size=min_size, background=bool(self._background), timeout=timeout)
        return self._value(work)

    def isend(
        self,
        tensor: TensorLike,
        dst: int | None = None,
        group: AnyGroup = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Work[None]:
        """Start to send ``tensor`` to ``dst``. Do not change ``tensor`` until the work is complete.

        Args:
            tensor: Input: any shape, layout and dtype.
            dst: Global rank of the receiver.
            group: The group; None means the default group.
            tag: Tag of the message, from 0 to 2^32 - 1; the receiver gives the same tag.
            group_dst: Group rank of the receiver, instead of ``dst``.

        Returns:
            A work whose value is None.

        Raises:
            UsageError: Not exactly one of ``dst`` and ``group_dst`` is given, it is this rank, or the tag is not valid.
            MismatchError: The receiver expects another dtype or number of elements.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> if dist.get_rank() == 0 and dist.get_world_size() > 1:
            ...     work = dist.isend(torch.ones(2), dst=1)
            ...     await work  # with asyncdist.sync: work.wait()
        """
        of = resolve_group(group)
        return of.send(tensor, _member(of, "send", dst, group_dst, "dst"), tag)

    def irecv(
        self,
        tensor: TensorLike,
        src: int | None = None,
        group: AnyGroup = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work[int]:
        """Start to receive a message into ``tensor``.

        Args:
            tensor: Output with the number of elements and the dtype of the sent tensor.
            src: Global rank of the sender; without ``src`` and ``group_src`` any rank may send.
            group: The group; None means the default group.
            tag: Tag of the message, from 0 to 2^32 - 1.
            group_src: Group rank of the sender, instead of ``src``.

        Returns:
            A work whose value is the sender's global rank.

        Raises:
            UsageError: ``src`` is this rank or not in the group, or the tag is not valid.
            MismatchError: The message has another dtype or number of elements.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> if dist.get_rank() == 1:
            ...     received = torch.empty(2)
            ...     work = dist.irecv(received, src=0)
            ...     await work  # with asyncdist.sync: work.wait()
        """
        return self._receive(tensor, src, group, tag, group_src, True)

    def _receive(
        self, tensor: TensorLike, src: int | None, group: AnyGroup, tag: int, group_src: int | None, background: bool
    ) -> Work[int]:
        of = resolve_group(group)
        source = None if src is None and group_src is None else _member(of, "recv", src, group_src, "src")
        return of.recv(tensor, source, tag, background=background)

    def batch_isend_irecv(self, p2p_op_list: Sequence[P2POp]) -> list[Work[Any]]:
        """Start several sends and receives.

        Args:
            p2p_op_list: The sends and receives, one at least.

        Returns:
            Their works, in the same order.

        Raises:
            UsageError: The list is empty, or holds something else.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> rank, size = dist.get_rank(), dist.get_world_size()
            >>> sent, received = torch.ones(2), torch.empty(2)
            >>> if size > 1:  # around a ring
            ...     ops = [
            ...         dist.P2POp(dist.isend, sent, (rank + 1) % size),
            ...         dist.P2POp(dist.irecv, received, (rank - 1) % size),
            ...     ]
            ...     for work in dist.batch_isend_irecv(ops):
            ...         await work  # with asyncdist.sync: work.wait()
        """
        is_list = isinstance(p2p_op_list, Sequence) and all(isinstance(op, P2POp) for op in p2p_op_list)
        if not is_list or not p2p_op_list:
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
    ) -> Work[None]:
        """Send a list of objects to ``dst``.

        Args:
            object_list: The objects: plain data, tensors and arrays.
            dst: Global rank of the receiver.
            group: The group; None means the default group.
            device: Accepted for compatibility; has no effect.
            group_dst: Group rank of the receiver, instead of ``dst``.
            use_batch: Accepted for compatibility; has no effect.
            weights_only: Also accept the types that ``torch.load(weights_only=True)`` reads, and refuse pickles even if
                ASYNCDIST_ALLOW_PICKLE allows them. Give the same value on every rank.

        Returns:
            A work whose value is None. `asyncdist.sync` blocks and returns None.

        Raises:
            UsageError: An object needs pickle, which is not allowed; or ``dst`` is not another rank of the group.
            GroupError: A rank died, the timeout passed, or the group has failed.

        Example:
            >>> if dist.get_rank() == 0 and dist.get_world_size() > 1:
            ...     await dist.send_object_list(["text", 7], dst=1)
        """
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
    ) -> Work[int]:
        """Receive a list of objects from ``src`` or any rank.

        Args:
            object_list: Output: a list of the length of the sent one, whose elements are replaced.
            src: Global rank of the sender; without ``src`` and ``group_src`` any rank may send.
            group: The group; None means the default group.
            device: Accepted for compatibility; has no effect.
            group_src: Group rank of the sender, instead of ``src``.
            use_batch: Accepted for compatibility; has no effect.
            weights_only: Also accept the types that ``torch.load(weights_only=True)`` reads, and refuse pickles even if
                ASYNCDIST_ALLOW_PICKLE allows them. Give the same value on every rank.

        Returns:
            A work whose value is the sender's global rank. `asyncdist.sync` blocks and returns that rank.

        Raises:
            UsageError: ``src`` is this rank or not in the group.
            GroupError: The sent list has another length or needs pickle, which is not allowed; a rank died, the timeout
                passed, or the group has failed.

        Example:
            >>> if dist.get_rank() == 1:
            ...     objects = [None, None]
            ...     sender = await dist.recv_object_list(objects, src=0)
        """
        of = resolve_group(group)
        source = None if src is None and group_src is None else _member(of, "recv_object_list", src, group_src, "src")
        work = of.recv_object_list(object_list, source, weights_only=weights_only, background=self._background)
        return self._value(work)
