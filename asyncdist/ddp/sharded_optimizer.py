"""`ZeroRedundancyOptimizer`: each rank keeps the optimizer's state of its share of the parameters. Exported by `asyncdist`.

The interface is that of `torch.distributed.optim.ZeroRedundancyOptimizer`. A step updates this rank's share with a local
optimizer, and then all ranks receive all shares.

Source: Rajbhandari et al., "ZeRO" (arXiv 1910.02054), stage 1.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from asyncdist.base.callables import Closure
from asyncdist.ddp.torch_class.arguments import group_of
from asyncdist.ddp.torch_class.names import counted_group
from asyncdist.errors import UnsupportedError, UsageError
from asyncdist.groups import AnyGroup, Group
from asyncdist.kernel import Work, c10d_private, whole_number_of
from asyncdist.kernel.torch_private import pytree as tree

log = logging.getLogger("asyncdist")

LocalState = dict[int, Any]
"""The optimizer's state of some parameters, by their places among all parameters."""


class _Share:
    """The parameters of one rank with one device and dtype, and the memory in which their values travel."""

    def __init__(self, owner: int, parameters: list[torch.Tensor], *, as_views: bool) -> None:
        self.owner, self.parameters = owner, parameters
        self._memory: torch.Tensor | None = None
        if as_views:
            memory = self._memory = torch.cat([each.detach().reshape(-1) for each in parameters])
            for parameter, view in zip(parameters, self._views(memory), strict=True):
                parameter.data = view
        self._addresses = self._present_addresses()

    def _present_addresses(self) -> list[int]:
        return [each.data_ptr() for each in self.parameters]

    @property
    def is_current(self) -> bool:
        """Whether no parameter has left the memory: a cast, a swap or a program's ``data`` takes it elsewhere."""
        return self._memory is None or self._present_addresses() == self._addresses

    def _views(self, memory: torch.Tensor) -> Iterable[torch.Tensor]:
        parts = memory.split([each.numel() for each in self.parameters])
        return [part.view(each.shape) for each, part in zip(self.parameters, parts, strict=True)]

    def send(self, group: Group) -> tuple[Work[torch.Tensor], torch.Tensor]:
        """Start to broadcast the values of the owner; return the work and its memory."""
        memory = self._memory
        if memory is None:
            first = self.parameters[0]
            if group.rank() == self.owner:
                memory = torch.cat([each.detach().reshape(-1) for each in self.parameters])
            else:
                count = sum(each.numel() for each in self.parameters)
                memory = torch.empty(count, dtype=first.dtype, device=first.device)
        return group.broadcast(memory, self.owner), memory

    def receive(self, memory: torch.Tensor) -> None:
        """Copy received values into the parameters, unless these lie in that memory."""
        if memory is not self._memory:
            with torch.no_grad():
                for parameter, view in zip(self.parameters, self._views(memory), strict=True):
                    parameter.copy_(view)


class ZeroRedundancyOptimizer(Optimizer):
    """Shard an optimizer's state over the ranks: each keeps that of about 1 / P of the parameters.

    All ranks hold all parameters, with equal gradients, as after a backward of `DistributedDataParallel`. `step` updates
    the parameters of this rank, and broadcasts the shares of all ranks concurrently. The parameters are the same bits as
    those of ``optimizer_class`` without sharding, for every optimizer that treats each parameter by itself.

    Parameters are assigned whole, the largest first, to the rank with the fewest elements, as in torch.

    Args:
        params: Parameters, or dicts of them with their own options; in the same order on all ranks.
        optimizer_class: The class of the optimizer, such as `torch.optim.AdamW`.
        process_group: The group, or one of torch.distributed on the back end "asyncdist"; None is the default group.
        parameters_as_bucket_view: Move the parameters of each share into one tensor, which is sent without copies. Do it
            before anything else refers to the parameters' memory.
        overlap_with_ddp: Must be False.
        defaults: The arguments of ``optimizer_class``.

    Attributes:
        optim: The local optimizer of this rank's share.
        process_group: The group over whose ranks the state is sharded.

    Raises:
        UnsupportedError: ``overlap_with_ddp`` is True.
        UsageError: There are no parameters, or something else is among them.

    Example:
        >>> model = dist.DistributedDataParallel(model)
        >>> optimizer = dist.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> model(inputs).sum().backward()
        >>> optimizer.step()
        >>> optimizer.consolidate_state_dict(to=0)  # on all ranks
        >>> if dist.get_rank() == 0:
        ...     torch.save(optimizer.state_dict(), "optimizer.pt")
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: AnyGroup = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        if overlap_with_ddp:
            raise UnsupportedError(
                "overlap_with_ddp=True is not supported: leave it out and call step() after backward(); it broadcasts all "
                "shares concurrently, from the first step on"
            )
        params = list(params)
        if not params:
            raise UsageError("ZeroRedundancyOptimizer got no parameters")
        self.process_group, self._torch_group = group_of(process_group, None)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._consolidated: dict[str, Any] | None = None
        self.optim: Optimizer | None = None
        super().__init__(params, defaults)
        self._make_local(optimizer_class)
        if self._torch_group is not None:
            self._join_config = c10d_private.JoinConfig.construct_disabled_join_config()

    # -- the partition ----------------------------------------------------------------------------

    def _everything(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _places(self) -> dict[torch.Tensor, int]:
        return {parameter: place for place, parameter in enumerate(self._everything())}

    def _partition(self) -> list[list[list[torch.Tensor]]]:
        """Return each rank's parameters of each parameter group. Further groups change nothing for earlier ones."""
        sizes = [0] * self.process_group.size()
        owned: list[list[list[torch.Tensor]]] = [[[] for _ in self.param_groups] for _ in sizes]
        for place, group in enumerate(self.param_groups):
            for parameter in sorted(group["params"], key=lambda each: -each.numel()):
                rank = min(range(len(sizes)), key=sizes.__getitem__)
                owned[rank][place].append(parameter)
                sizes[rank] += parameter.numel()
        return owned

    def _make_local(self, optimizer_class: type[Optimizer]) -> None:
        owned = self._partition()[self.process_group.rank()]
        groups = [{**group, "params": own} for group, own in zip(self.param_groups, owned, strict=True)]
        self.optim = optimizer_class(groups, **self.defaults)
        # The class may have more options than were given.
        self.defaults = self.optim.defaults
        self._copy_options(self.optim.param_groups, self.param_groups)
        self._make_shares()

    def _make_shares(self) -> None:
        self._shares = self._shares_of(self._owned_by_rank(), as_views=self.parameters_as_bucket_view)

    def _owned_by_rank(self) -> list[list[torch.Tensor]]:
        return [[each for group in groups for each in group] for groups in self._partition()]

    @staticmethod
    def _shares_of(owned: Sequence[Sequence[torch.Tensor]], *, as_views: bool) -> list[_Share]:
        shares = []
        for rank, parameters in enumerate(owned):
            kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            for parameter in parameters:
                kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            shares += [_Share(rank, members, as_views=as_views) for members in kinds.values()]
        return shares

    @staticmethod
    def _copy_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
        for one, other in zip(source, target, strict=True):
            other.update({name: value for name, value in one.items() if name != "params"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, such as those of layers that are trained from now on. Every rank calls it."""
        super().add_param_group(param_group)
        if self.optim is None:
            return  # called by the constructor of the base class
        own = self._partition()[self.process_group.rank()][-1]
        self.optim.add_param_group({**self.param_groups[-1], "params": own})
        self._copy_options(self.optim.param_groups[-1:], self.param_groups[-1:])
        self._make_shares()
        self._consolidated = None

    # -- steps ------------------------------------------------------------------------------------

    def step(self, closure: Closure | None = None, **arguments: Any) -> float | None:  # type: ignore[override]
        """Update this rank's parameters, and receive those of the others. Every rank calls it.

        In a program with an event loop, call it in a worker thread, or await `awaited_step`.

        Args:
            closure: A function that computes the loss and the gradients again.
            arguments: Further arguments for the local optimizer.

        Returns:
            The result of the local optimizer's ``step``.

        Raises:
            GroupError: A rank died. Ranks may hold old or new values of each share: call `set_group` on the survivors.
            LoopThreadError: The calling thread runs an event loop.
        """
        self.process_group.endpoint.progress.refuse_loop_thread("ZeroRedundancyOptimizer.step")
        loss = self._local_step(closure, arguments)
        self._exchange(self._shares)
        return loss

    async def awaited_step(self, closure: Closure | None = None, **arguments: Any) -> float | None:
        """Do the same as `step`, and wait for the other shares without blocking the event loop."""
        loss = self._local_step(closure, arguments)
        with self._exchanging(self._shares) as works:
            for work in works:
                await work
        return loss

    def _local_step(self, closure: Closure | None, arguments: dict[str, Any]) -> float | None:
        assert self.optim is not None
        # Schedulers change the options of this optimizer, and some optimizers change their own.
        self._copy_options(self.param_groups, self.optim.param_groups)
        self._consolidated = None
        loss: float | None = self.optim.step(**arguments) if closure is None else self.optim.step(closure, **arguments)
        self._copy_options(self.optim.param_groups, self.param_groups)
        if not all(share.is_current for share in self._shares):
            self._make_shares()
        return loss

    def _exchange(self, shares: Sequence[_Share]) -> None:
        with self._exchanging(shares) as works:
            for work in works:
                work.wait()

    @contextlib.contextmanager
    def _exchanging(self, shares: Sequence[_Share]) -> Iterator[list[Work[torch.Tensor]]]:
        """Start to broadcast shares; after the block, in which the caller waits for all, take their values over."""
        sent = [share.send(self.process_group) for share in shares]
        works = [work for work, _ in sent]
        try:
            yield works
        except BaseException:
            for work in works:
                work.exception()  # they have failed for the same reason
            raise
        for share, (_, memory) in zip(shares, sent, strict=True):
            if share.owner != self.process_group.rank():
                share.receive(memory)

    # -- checkpoints ------------------------------------------------------------------------------

    def _local_state(self) -> LocalState:
        """Return the state of this rank's parameters by their places, with tensors on the CPU."""
        assert self.optim is not None
        places = self._places()
        return {places[parameter]: _on_cpu(state) for parameter, state in self.optim.state.items()}

    def _with(self, state: LocalState) -> dict[str, Any]:
        """Return a state dict of all parameters in the form of an optimizer without shards."""
        groups, place = [], 0
        for group in self.param_groups:
            places = list(range(place, place + len(group["params"])))
            groups.append({**group, "params": places})
            place += len(places)
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the states of all ranks on one, for `state_dict`. Every rank calls it.

        Args:
            to: The rank in the group that receives the states.
        """
        to = whole_number_of("to", to)
        if not 0 <= to < self.process_group.size():
            raise UsageError(f"to={to}: pass a rank of the group, from 0 to {self.process_group.size() - 1}")
        assert self.optim is not None
        self._copy_options(self.param_groups, self.optim.param_groups)
        here = self.process_group.rank() == to
        gathered: list[Any] | None = [None] * self.process_group.size() if here else None
        self.process_group.gather_object(self._local_state(), gathered, to, weights_only=True, background=False).wait()
        if gathered is not None:
            self._consolidated = self._with({place: each for state in gathered for place, each in state.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks' shares, in the form of ``optimizer_class`` without shards.

        Raises:
            UsageError: `consolidate_state_dict` was not called with this rank since the last step.
        """
        if self._consolidated is None:
            rank = self.process_group.rank()
            raise UsageError(
                f"rank {rank} does not have the optimizer's state of the other ranks: call "
                f"consolidate_state_dict(to={rank}) on all ranks before state_dict()"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all parameters, of which this rank keeps its share. Every rank calls it.

        Args:
            state_dict: What `state_dict` has returned, on any number of ranks, or ``optimizer_class`` without shards.
        """
        assert self.optim is not None
        given = [len(group["params"]) for group in state_dict["param_groups"]]
        own = [len(group["params"]) for group in self.param_groups]
        if given != own:
            raise UsageError(f"the checkpoint has parameter groups of {given} parameters, and this optimizer of {own}")
        self._copy_options(state_dict["param_groups"], self.param_groups)
        self._load(state_dict["state"])

    def _load(self, state: LocalState) -> None:
        """Keep this rank's share of a state by places."""
        assert self.optim is not None
        places = self._places()
        groups, local, count = [], {}, 0
        for group, mine in zip(self.param_groups, self.optim.param_groups, strict=True):
            for number, parameter in enumerate(mine["params"]):
                if places[parameter] in state:
                    local[count + number] = state[places[parameter]]
            groups.append({**group, "params": list(range(count, count + len(mine["params"])))})
            count += len(mine["params"])
        # The optimizer casts the state to the devices and dtypes that it needs.
        self.optim.load_state_dict({"state": local, "param_groups": groups})
        self._consolidated = None

    # -- other members ----------------------------------------------------------------------------

    def set_group(self, group: AnyGroup = None) -> list[int]:
        """Shard the state over the survivors in a group that `Group.regroup` has made. Every member calls it.

        All members hold the same parameters afterwards: those of each share from its old owner, and those of lost ranks
        from rank 0. The optimizer's state of lost ranks is lost, and begins anew; load a checkpoint if that matters.

        Args:
            group: The new group; None is the default group.

        Returns:
            The places of the parameters whose state was lost, among all parameters.
        """
        old, owned, places = self.process_group, self._owned_by_rank(), self._places()
        self.process_group, self._torch_group = group_of(group, None)
        states: list[Any] = [None] * self.process_group.size()
        self.process_group.all_gather_object(states, self._local_state(), weights_only=True, background=False).wait()
        kept = {place: each for state in states for place, each in state.items()}
        ranks = {member: rank for rank, member in enumerate(self.process_group.member_ids)}
        sources: list[list[torch.Tensor]] = [[] for _ in ranks]
        lost = []
        for member, parameters in zip(old.member_ids, owned, strict=True):
            sources[ranks.get(member, 0)] += parameters
            if member not in ranks:
                lost += [places[parameter] for parameter in parameters]
        self._exchange(self._shares_of(sources, as_views=False))
        assert self.optim is not None
        self._make_local(type(self.optim))
        self._load(kept)
        if lost:
            log.warning("ZeroRedundancyOptimizer: the state of %d of %d parameters was lost", len(lost), len(places))
        return sorted(lost)

    # -- torch's Join -----------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> Any:
        """Return the hook with which torch's `Join` lets a rank without inputs follow the steps of the others."""
        from torch.distributed.algorithms.join import JoinHook

        _ = self.join_process_group
        optimizer = self

        class Following(JoinHook):
            def main_hook(self) -> None:
                optimizer.step()

        return Following()

    @property
    def join_device(self) -> torch.device:
        """The device of the tensors with which torch's `Join` counts ranks."""
        return self._everything()[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group of torch whose ranks torch's `Join` counts.

        Raises:
            UsageError: The group of this optimizer is not one of torch.distributed.
        """
        return counted_group(self._torch_group)


def _on_cpu(value: Any) -> Any:
    """Return plain data with copies of its tensors on the CPU."""
    return tree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)
