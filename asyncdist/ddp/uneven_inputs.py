"""Training with uneven inputs: a rank without inputs takes part in collectives until every rank has run out.

`module` and `reducer` call it. Inside ``with model.join()`` the ranks synchronise before each collective step, and
each announces its next step:

    a forward with gradients     check()      only where running out early is an error
    buffers are overwritten      source()     by the highest rank that has inputs left
    a forward without averages   skip()       inside torch's Join, whose hooks follow one forward at a time
    a backward's first bucket    reduction()  by which number its sums are divided
    the end of the inputs        stand_in()   follow the other ranks: receive buffers, add zeros to their gradients

The announcement is an all-gather of one byte per rank, so every rank knows the same afterwards.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from asyncdist.base.lifecycle import WeakRegistry
from asyncdist.base.ops import ReduceOp, Reduction, premul_sum
from asyncdist.ddp.sync_batchnorm import SyncBatchNorm
from asyncdist.errors import MismatchError, UnevenInputsError, UsageError
from asyncdist.groups import Group


class StepKind(Enum):
    """A rank's next step, as errors name it."""

    end = "end of its inputs"
    forward = "beginning of a forward"
    refresh = "broadcast of buffers before a forward"
    average = "average of a backward's gradients"
    skip = "beginning of a forward without averages"


_STEPS = list(StepKind)
"""The byte that announces a step is its place here."""


class Joining:
    """One ``with model.join()`` on one rank; `active` are the ranks that had inputs left at the last announcement."""

    def __init__(self, group: Group, module: nn.Module, *, divides_by_all: bool, throws: bool) -> None:
        self.active = list(range(group.size()))
        self.optimizers = OptimizerWatch(module.parameters())
        self._group = group
        self._divides_by_all = divides_by_all
        self._throws = throws

    @property
    def is_even(self) -> bool:
        """Whether no rank has run out before another."""
        return len(self.active) == self._group.size()

    def check(self) -> None:
        """Raise UnevenInputsError if a rank has run out of inputs and ``throws`` is set."""
        if self._throws:
            self._announce(StepKind.forward)

    def source(self) -> int:
        """Return the group rank whose buffers all ranks receive now."""
        # With ``throws`` the ranks have already synchronised before this forward.
        if not self._throws:
            self._announce(StepKind.refresh)
        return self.active[-1]

    def skip(self) -> None:
        """Announce that no averages follow the forward that begins."""
        self._announce(StepKind.skip)

    def reduction(self) -> Reduction:
        """Return how this backward's gradients are averaged."""
        if not self._throws:
            self._announce(StepKind.average)
        return self.present_reduction

    def stand_in(self) -> StepKind:
        """Return the next step of the ranks with inputs left, which this rank follows; ``end`` without such ranks.

        With ``throws``, raise UnevenInputsError if another rank has inputs left.
        """
        self.optimizers.stands_in = True
        return self._announce(StepKind.end)

    def warn_of_older_optimizers(self) -> None:
        """Let the next step warn if this rank ran out before others and its optimizers' state is still the older one."""
        if self._group.rank() not in self.active:
            for optimizer in self.optimizers.stepped:
                _warn_at_next_step(optimizer, self._group.ranks[self.active[-1]])

    @property
    def present_reduction(self) -> Reduction:
        """How gradients are averaged, by the ranks that had inputs left at the last announcement."""
        return ReduceOp.AVG if self._divides_by_all or self.is_even else premul_sum(1 / len(self.active))

    def _announce(self, step: StepKind) -> StepKind:
        """Announce this rank's next step; return that of the ranks with inputs left, ``end`` without such ranks."""
        own = torch.tensor([_STEPS.index(step)], dtype=torch.uint8, device="cpu")
        announced = torch.empty(self._group.size(), dtype=torch.uint8, device="cpu")
        self._group.all_gather_single(announced, own, background=False).wait()
        steps: list[StepKind] = [_STEPS[number] for number in announced.tolist()]
        active = [rank for rank, each in enumerate(steps) if each is not StepKind.end]
        if not active:
            return StepKind.end
        self.active = active
        if self._throws and not self.is_even:
            ended = [self._group.ranks[rank] for rank, each in enumerate(steps) if each is StepKind.end]
            raise UnevenInputsError(ended, [self._group.ranks[rank] for rank in active])
        first = steps[active[0]]
        for rank in active:
            if steps[rank] is not first:
                raise self._mismatch(active[0], first, rank, steps[rank])
        return first

    def _mismatch(self, first: int, step: StepKind, peer: int, other: StepKind) -> MismatchError:
        ranks = self._group.ranks
        reason = (
            f"inside join() rank {ranks[first]} is at the {step.value}, rank {ranks[peer]} at the {other.value}: "
            "ranks that have inputs left must do the same"
        )
        return MismatchError(ranks[peer], reason, group=self._group.name, rank=ranks[self._group.rank()])


def refuse_collectives(module: nn.Module) -> None:
    """Raise UsageError if the forward of a layer needs all ranks, also those that have run out of inputs."""
    for name, each in module.named_modules():
        if isinstance(each, SyncBatchNorm):
            raise UsageError(
                f"module {name!r} is a SyncBatchNorm, whose forward needs all ranks: pass "
                "throw_on_early_termination=True to join()"
            )


_watches: WeakRegistry[OptimizerWatch] = WeakRegistry()
# Never removed: torch iterates over these hooks while another thread steps.
_hook_steps = functools.cache(register_optimizer_step_post_hook)


class OptimizerWatch:
    """The optimizers that step the parameters of one model on this rank, from the construction to `close`.

    A rank that ran out of inputs makes fewer steps, so its momentum or moments differ from those of the other ranks. The
    parameters are equal after the block, and the first step after it makes them differ.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.stands_in = False
        """Whether this rank has run out of inputs."""
        self._parameters = set(map(id, parameters))
        self.stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        _watches.add(self)
        _hook_steps(_note_step)

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer, of this model or not, has made a step."""
        # Torch's Join lets a ZeroRedundancyOptimizer follow the steps of the other ranks.
        if self.stands_in:
            self.stepped.discard(optimizer)
        elif any(id(each) in self._parameters for group in optimizer.param_groups for each in group["params"]):
            self.stepped.add(optimizer)

    def close(self) -> None:
        """Stop looking at steps. Idempotent."""
        _watches.discard(self)


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    for watch in _watches.living():
        watch.note_step(optimizer)


def _first_state(optimizer: Optimizer) -> torch.Tensor | None:
    """Return a tensor of the state that depends on gradients, such as a momentum buffer; None without one."""
    states = (each for state in optimizer.state.values() for each in state.values())
    return next((each for each in states if isinstance(each, torch.Tensor) and each.dim() > 0), None)


def _warn_at_next_step(optimizer: Optimizer, source: int) -> None:
    """Warn at the next step of an optimizer if its state is what it is now; global rank ``source`` has the newest."""
    state = _first_state(optimizer)
    if state is None:
        return
    before = state.detach().clone()

    def check(*_: Any) -> None:
        hook.remove()
        now = _first_state(optimizer)
        if now is not None and now.shape == before.shape and torch.equal(now, before):
            warnings.warn(
                f"the state of this {type(optimizer).__name__} is older than that of rank {source}, because this rank ran "
                "out of inputs before it in join(): from this step on, the parameters of the ranks drift apart. After each "
                f"join() broadcast the tensors in optimizer.state from rank {source} on all ranks, or use an optimizer "
                "without state",
                stacklevel=3,
            )

    hook = optimizer.register_step_pre_hook(check)
