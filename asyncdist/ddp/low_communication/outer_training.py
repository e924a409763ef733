"""The outer steps of low-communication training: when they happen, who takes part, and what follows a loss.

Awaited and blocking programs share the coroutines here, which wait for each `Procedure` in the thread of a blocking program
and never suspend there. The exchange of a fragment is a task of its own. It runs in the event loop of the caller, or in the
background loop if the caller has none, while the caller computes inner steps:

    inner step t            launch: pseudo-gradient = outer values - parameters
    t + 1 ... t + delay     average the pseudo-gradients; agree that all members have the average, or regroup and repeat
    inner step t + delay    wait for the average if necessary; outer step; set the parameters

All members count their inner steps alike, so the results do not depend on how fast a member or a link is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import json
import logging
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Self, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from asyncdist.base.background_loop import background_loop
from asyncdist.base.callables import Closure
from asyncdist.ddp.averaging import Average, average_of
from asyncdist.ddp.compression import Compress, VectorCodec, codec_of
from asyncdist.ddp.low_communication.fragments import Fragment, fragments_of
from asyncdist.ddp.model_watch import ModelWatch
from asyncdist.errors import ExcludedError, GroupError, MismatchError, NoQuorumError, UsageError
from asyncdist.groups import AnyGroup, Group, Procedure, State, resolve_group
from asyncdist.kernel import whole_number_of

log = logging.getLogger("asyncdist")

T = TypeVar("T")
_Future: TypeAlias = asyncio.Future[T] | concurrent.futures.Future[T]
_uses: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
"""How often a group was used for outer training: each time needs channels of its own."""


@dataclass
class CommunicationSavings:
    """The bytes that this rank has sent, and those of an all-reduce of the gradients in each inner step instead.

    Attributes:
        inner_steps: Steps of the inner optimizer.
        outer_steps: Outer steps of fragments.
        sent_nbytes: Bytes sent for the outer steps, without headers and agreements.
        data_parallel_nbytes: Bytes that data-parallel training would have sent.
        waited: Seconds for which inner steps have waited for outer steps.
    """

    inner_steps: int = 0
    outer_steps: int = 0
    sent_nbytes: int = 0
    data_parallel_nbytes: int = 0
    waited: float = 0.0

    @property
    def factor(self) -> float:
        """How many times fewer bytes were sent; infinite if none were sent."""
        return self.data_parallel_nbytes / self.sent_nbytes if self.sent_nbytes else float("inf")

    def __str__(self) -> str:
        return (
            f"{self.inner_steps} inner and {self.outer_steps} outer steps sent {self.sent_nbytes / 1e6:,.2f} MB instead of "
            f"{self.data_parallel_nbytes / 1e6:,.2f} MB: {self.factor:,.0f} times fewer; waited {self.waited:.2f} s"
        )


@dataclass
class _Exchange:
    """A fragment whose outer step is in progress; `outcome` is a future of the average, and of whether members changed."""

    fragment: Fragment
    due: int
    outcome: _Future[tuple[Average, bool]]


class OuterTraining:
    """The part that `DiLoCo` and `LocalSGD` have in common; their docstrings describe it."""

    _blocks = False
    """Whether the program has no event loop: then the coroutines here block its thread."""

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        outer: Optimizer | None = None,
        *,
        every: int,
        fragments: int | Sequence[nn.Module | Iterable[nn.Parameter]] = 1,
        delay: int = 0,
        alpha: float = 0.0,
        compress: Compress = None,
        group: AnyGroup = None,
        min_size: int = 1,
    ) -> None:
        self.model, self.inner = model, inner
        self.fragments = fragments_of(model, fragments)
        kind = type(self).__name__.removeprefix("Blocking")
        self._watch = ModelWatch(
            model,
            since=f"{kind} was made",
            remedy=f"freeze, unfreeze or replace parameters before, or leave this {kind} and make another, on all members",
        )
        self.every = whole_number_of("every", every)
        self.delay = whole_number_of("delay", delay)
        if self.every < len(self.fragments):
            raise UsageError(f"every={every}: pass at least the number of fragments, {len(self.fragments)}")
        if not 0 <= self.delay < self.every:
            raise UsageError(f"delay={delay}: pass a number from 0 to every - 1, which is {self.every - 1}")
        if not 0 <= alpha <= 1:
            raise UsageError(f"alpha={alpha}: pass the share from 0 to 1 of its own value that a parameter keeps")
        self.alpha = float(alpha)
        # By default that of the DiLoCo paper.
        self.outer = outer or outer_sgd(model, lr=0.7, momentum=0.9, nesterov=True)
        self._check_outer()
        self._codec: VectorCodec | None = codec_of(compress)
        if self._codec is not None and any(fragment.outer.dtype == torch.float64 for fragment in self.fragments):
            raise UsageError("compress=... encodes float32, but a parameter is float64: leave compress out")
        self._min_size = whole_number_of("min_size", min_size)
        self._given_group = group
        self.inner_steps = 0
        self.outer_steps = 0
        self.savings = CommunicationSavings()
        self._state = State(training=self)
        self._group: Group | None = None
        self._exchange_group: Group | None = None
        self._exchanges: list[_Exchange] = []
        """In the order of their launch, and of their completion."""

    def _check_outer(self) -> None:
        known = {parameter for group in self.outer.param_groups for parameter in group["params"]}
        for fragment in self.fragments:
            for name, parameter in zip(fragment.names, fragment.parameters, strict=True):
                if parameter not in known:
                    raise UsageError(f"the outer optimizer lacks the parameter {name!r}: make it of model.parameters()")

    @property
    def group(self) -> Group:
        """The group of the members that take part in the outer steps. The loss of a member replaces it.

        Raises:
            UsageError: The training has not been entered.
        """
        if self._exchange_group is None:
            raise UsageError(
                f"{type(self).__name__} is not entered: write `async with` or, in a program without an event loop, `with`"
            )
        return self._exchange_group

    # -- entering and leaving -------------------------------------------------------------------

    def on(self, group: AnyGroup) -> Self:
        """Use another group from the next entering on, such as that of the next generation of a job.

        Example:
            >>> async for group in session.generations():
            ...     async with diloco.on(group):
            ...         await train(diloco, until=lambda: group.changed)
        """
        self._given_group = group
        return self

    async def _wait_for(self, call: Procedure[T]) -> T:
        return call.wait() if self._blocks else await call

    async def _gathered(self, group: Group, own: Any) -> list[Any]:
        """Return the objects of all members. It refuses to block a loop that drives the group."""
        found: list[Any] = [None] * group.size()
        if self._blocks:
            group.endpoint.progress.refuse_loop_thread("this call")
            group.all_gather_object(found, own, background=False).wait()
        else:
            await group.all_gather_object(found, own)
        return found

    async def __aenter__(self) -> Self:
        group = self._group = resolve_group(self._given_group)
        if self._exchange_group is not None:
            raise UsageError(f"{type(self).__name__} is entered already: leave it first")
        self._watch.check_again()
        await self._compare(group)
        self._state.step = self.outer_steps
        await self._wait_for(group.adopt(self._state))
        if group.error is not None and not _is_elastic(group):
            raise group.error
        if group.error is None:
            # Members that have the same outer steps may have been interrupted at different inner steps.
            self.inner_steps = max(await self._gathered(group, self.inner_steps))
        use = _uses[group] = _uses.get(group, 0) + 1
        self._exchange_group = self._watched(group._sibling(f"outer steps {use}"))
        self._exchanges, self._turn = [], asyncio.Lock()
        return self

    async def _compare(self, group: Group) -> None:
        """Raise MismatchError on all ranks unless they hold models and arguments of the same kind."""
        layout = [
            [name, list(parameter.shape), str(parameter.dtype)]
            for fragment in self.fragments
            for name, parameter in zip(fragment.names, fragment.parameters, strict=True)
        ]
        own = {
            "every": self.every,
            "delay": self.delay,
            "alpha": self.alpha,
            "compress": None if self._codec is None else f"{self._codec.name} with blocks of {self._codec.block}",
            "fragments": [len(fragment.names) for fragment in self.fragments],
            "parameters": hashlib.sha256(json.dumps(layout).encode()).hexdigest()[:16],
        }
        found = await self._gathered(group, own)
        for rank, other in enumerate(found):
            for name, value in found[0].items():
                if other[name] != value:
                    peer, root = group.ranks[rank], group.ranks[0]
                    reason = (
                        f"{type(self).__name__} has {name}={value} on rank {root}, but {name}={other[name]} on rank "
                        f"{peer}: pass the same arguments and equal models on all ranks"
                    )
                    raise MismatchError(peer, reason, group=group.name, rank=group.ranks[group.rank()])

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Take the outer steps that are in progress if the block is completed; else drop them."""
        try:
            if kind is None:
                await self._settle()
        finally:
            group, self._exchange_group = self._exchange_group, None
            pending = self._drop_exchanges()
            if group is not None:
                if pending or kind is not None:
                    # The other members then go on without this one.
                    group.revoke(f"{type(self).__name__} ended with an error")
                group.close()
            await self._wait_for(Procedure(lambda: _ended(pending)))
            log.info("%s: %s", type(self).__name__, self.savings)

    # -- steps ----------------------------------------------------------------------------------

    async def step(self, closure: Closure | None = None) -> float | None:
        """Take a step of the inner optimizer, and the outer steps that are due. Every member calls it equally often.

        Args:
            closure: A function that computes the loss again, for the inner optimizer.

        Returns:
            The result of the inner optimizer's ``step``.

        Raises:
            GroupError: An outer step has failed and could not be repeated.
        """
        group = self.group
        # A call that was cancelled has left its outer steps to this one.
        await self._complete_due()
        self._watch.check(self.model)
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self.inner_steps += 1
        self.savings.inner_steps += 1
        gradients = sum(fragment.gradient_nbytes for fragment in self.fragments)
        self.savings.data_parallel_nbytes += 2 * gradients * (group.size() - 1) // group.size()
        for place, fragment in enumerate(self.fragments):
            # Fragments are exchanged at equal distances; the last one when `every` divides the number of the step.
            offset = (place + 1) * self.every // len(self.fragments)
            if (self.inner_steps - offset) % self.every == 0:
                self._launch(fragment, self.inner_steps + self.delay)
        await self._complete_due()
        return loss

    async def _complete_due(self) -> None:
        while self._exchanges and self._exchanges[0].due <= self.inner_steps:
            await self._complete()

    async def synchronize(self) -> None:
        """Exchange all fragments now, so that all members hold the same model. Every member calls it at the same step.

        Call it before a checkpoint and at the end of the training.
        """
        self._watch.check_again()
        await self._settle()
        for fragment in self.fragments:
            if fragment.exchanged_at != self.inner_steps:
                self._launch(fragment, self.inner_steps)
        await self._settle()
        for fragment in self.fragments:
            fragment.use_outer_values()

    async def _settle(self) -> None:
        """Complete all outer steps in progress, which all members do at the same inner step."""
        self.group  # noqa: B018 - raises if this is not entered
        while self._exchanges:
            await self._complete()

    def _launch(self, fragment: Fragment, due: int) -> None:
        self._watch.check_again()
        fragment.exchanged_at = self.inner_steps
        outcome = _start(self._exchange(fragment, fragment.pseudo_gradient()))
        self._exchanges.append(_Exchange(fragment, due, outcome))

    async def _complete(self) -> None:
        """Wait for the oldest exchange and take its outer step."""
        exchange, began = self._exchanges[0], monotonic()
        try:
            outcome = Procedure(lambda: _outcome_of(exchange.outcome), self.group.endpoint.progress)
            average, changed = await self._wait_for(outcome)
        except (ExcludedError, NoQuorumError) as error:
            self._exchanges.remove(exchange)
            assert self._group is not None
            if not _is_elastic(self._group):
                raise
            # The job goes on without this member, which joins it again.
            log.warning("%s: an outer step was not taken: %s", type(self).__name__, error.summary)
            self._drop_exchanges()
            self._group.changed = True
            return
        except GroupError:
            self._exchanges.remove(exchange)
            raise
        self._exchanges.remove(exchange)
        self.savings.waited += monotonic() - began
        exchange.fragment.feedback.residual = average.lost
        exchange.fragment.take_outer_step(self.outer, average.values, self.alpha)
        self.outer_steps += 1
        self.savings.outer_steps += 1
        self.savings.sent_nbytes += average.sent_nbytes
        log.debug("%s: outer step %d at inner step %d", type(self).__name__, self.outer_steps, self.inner_steps)
        if changed and self._group is not None:
            # All members are at the same inner step, so all of them complete the same exchanges before they go on.
            await self._settle()
            self._group.changed = True

    def _drop_exchanges(self) -> list[_Future[Any]]:
        pending = [exchange.outcome for exchange in self._exchanges]
        self._exchanges = []
        for outcome in pending:
            outcome.cancel()
        return pending

    # -- the exchange of a fragment -------------------------------------------------------------

    def _watched(self, group: Group) -> Group:
        """Let the members of the group notice, at the end of a step, that another generation is wanted."""
        user = self._group
        assert user is not None
        group._watches.candidates = lambda: user._watches.candidates()
        group._show_membership = lambda: user._show_membership()
        return group

    async def _exchange(self, fragment: Fragment, values: torch.Tensor) -> tuple[Average, bool]:
        """Return the average of all members' pseudo-gradients, and whether the members have changed or should.

        If a member is lost, the survivors agree on who is left, and repeat the exchange.
        """
        changed = False
        # Exchanges take turns, in the order of their launch, which is the same on all members.
        async with self._turn:
            while True:
                group = self.group
                average: Average | None = None
                async with group.step() as step:
                    average = await average_of(group, values, self._codec, fragment.feedback)
                changed = changed or group.changed
                if step.committed and average is not None:
                    return average, changed
                if not step.is_shown:
                    raise ExcludedError("a member has lost the store of the job")
                self._exchange_group = self._watched(await group.regroup(min_size=self._min_size))
                changed = True
                log.warning(
                    "%s: lost a member; %d of %d go on and repeat the outer step", type(self).__name__,
                    self._exchange_group.size(), group.size(),
                )  # fmt: skip

    # -- checkpoints ----------------------------------------------------------------------------

    def use_outer_parameters(self) -> None:
        """Set the model's parameters to the outer ones, which are equal on all members, as for an evaluation.

        The inner steps since the last exchange are lost: save the parameters before, or call `synchronize` instead.
        """
        for fragment in self.fragments:
            fragment.use_outer_values()

    def _others(self) -> dict[str, torch.Tensor]:
        """Return the buffers and the parameters that are not exchanged."""
        exchanged = {name for fragment in self.fragments for name in fragment.names}
        others = {name: each.detach() for name, each in self.model.named_parameters() if name not in exchanged}
        return {**others, **dict(self.model.named_buffers())}

    def state_dict(self) -> dict[str, Any]:
        """Return the outer parameters, the outer optimizer's state and the numbers of steps, equal on all members.

        Buffers and parameters that are not trained are those of this rank. The inner optimizer is not included.

        Raises:
            UsageError: An outer step is in progress.
        """
        if self._exchanges:
            raise UsageError(
                f"{len(self._exchanges)} outer steps are in progress: call synchronize() before state_dict(), on all "
                "members"
            )
        outer_values: dict[str, torch.Tensor] = {}
        for fragment in self.fragments:
            outer_values.update(fragment.outer_values())
        return {
            "inner_steps": self.inner_steps,
            "outer_steps": self.outer_steps,
            "exchanged_at": [fragment.exchanged_at for fragment in self.fragments],
            "parameters": outer_values,
            "others": self._others(),
            "outer": self.outer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint, and set the model's parameters to the outer ones.

        The first exchange of state after entering passes that of one member on to all.

        Raises:
            UsageError: The checkpoint has other parameters, or another number of fragments.
        """
        own = [name for fragment in self.fragments for name in fragment.names]
        if sorted(own) != sorted(state["parameters"]) or len(self.fragments) != len(state["exchanged_at"]):
            raise UsageError(
                f"the checkpoint has {len(state['parameters'])} parameters in {len(state['exchanged_at'])} fragments, and "
                f"this {type(self).__name__} {len(own)} in {len(self.fragments)}: make it of the same model and fragments"
            )
        self.inner_steps, self.outer_steps = state["inner_steps"], state["outer_steps"]
        for fragment, exchanged_at in zip(self.fragments, state["exchanged_at"], strict=True):
            fragment.exchanged_at = exchanged_at
            with torch.no_grad():
                for name, view in fragment.outer_values().items():
                    view.copy_(state["parameters"][name])
            fragment.use_outer_values()
        with torch.no_grad():
            for name, tensor in self._others().items():
                tensor.copy_(state["others"][name])
        self.outer.load_state_dict(state["outer"])


def outer_sgd(model: nn.Module, **options: Any) -> Optimizer:
    """Return an outer optimizer of the trained parameters; a learning rate of 1 leads to the average of the members."""
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], **options)


def _is_elastic(group: Group) -> bool:
    """Return whether the group belongs to a job session, which begins another generation after a change."""
    return group._watches.candidates is not tuple


def _start(coroutine: Coroutine[Any, Any, T]) -> _Future[T]:
    """Start a coroutine in the running event loop, or in the background loop if none of asyncio runs here."""
    loop = asyncio._get_running_loop()
    return background_loop().submit(coroutine) if loop is None else loop.create_task(coroutine)


async def _outcome_of(future: _Future[T]) -> T:
    """Wait for a future. A cancelled waiter leaves what it waits for in progress."""
    awaited = future if isinstance(future, asyncio.Future) else asyncio.wrap_future(future)
    return await asyncio.shield(awaited)


async def _ended(futures: Sequence[_Future[Any]]) -> None:
    """Wait until cancelled futures have ended, however they end."""
    await asyncio.gather(*map(_outcome_of, futures), return_exceptions=True)
