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

from enum import IntEnum

import torch
from torch import nn

from asyncdist.base.ops import ReduceOp, Reduction, premul_sum
from asyncdist.ddp.stale_optimizers import OptimizerWatch
from asyncdist.ddp.sync_batchnorm import SyncBatchNorm
from asyncdist.errors import MismatchError, UnevenInputsError, UsageError
from asyncdist.groups import Group


class StepKind(IntEnum):
    """A rank's next step; the value is the byte that it announces."""

    end = 0
    forward = 1
    refresh = 2
    average = 3
    skip = 4


class Joining:
    """One ``with model.join()`` on one rank; `active` are the ranks that had inputs left at the last announcement."""

    def __init__(self, group: Group, module: nn.Module, *, divides_by_all: bool, throws: bool) -> None:
        self.active = list(range(group.size()))
        self._optimizers = OptimizerWatch(module.parameters())
        self._group = group
        self._divides_by_all = divides_by_all
        self._throws = throws

    @property
    def is_even(self) -> bool:
        """Whether no rank has run out before another."""
        return len(self.active) == self._group.size()

    # -- a rank that has inputs -----------------------------------------------------------------

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

    # -- a rank that has run out ----------------------------------------------------------------

    def stand_in(self) -> StepKind:
        """Return the next step of the ranks with inputs left, which this rank follows; ``end`` without such ranks.

        With ``throws``, raise UnevenInputsError if another rank has inputs left.
        """
        self._optimizers.stands_in = True
        return self._announce(StepKind.end)

    # -- all ------------------------------------------------------------------------------------

    def warn_of_older_optimizers(self) -> None:
        """Let the next step warn if this rank ran out before others and its optimizers' state is still the older one."""
        if self._group.rank() not in self.active:
            self._optimizers.warn_at_next_steps(self._group.ranks[self.active[-1]])

    def close(self) -> None:
        """End the block on this rank. Idempotent."""
        self._optimizers.close()

    @property
    def present_reduction(self) -> Reduction:
        """How gradients are averaged, by the ranks that had inputs left at the last announcement."""
        return ReduceOp.AVG if self._divides_by_all or self.is_even else premul_sum(1 / len(self.active))

    def _announce(self, step: StepKind) -> StepKind:
        """Announce this rank's next step; return that of the ranks with inputs left, ``end`` without such ranks."""
        own = torch.tensor([step], dtype=torch.uint8, device="cpu")
        announced = torch.empty(self._group.size(), dtype=torch.uint8, device="cpu")
        self._group.all_gather_single(announced, own, background=False).wait()
        steps = [StepKind(number) for number in announced.tolist()]
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
            f"inside join() rank {ranks[first]} is at the {_WORDS[step]}, rank {ranks[peer]} at the {_WORDS[other]}: "
            "ranks that have inputs left must do the same"
        )
        return MismatchError(ranks[peer], reason, group=self._group.name, rank=ranks[self._group.rank()])


_WORDS = {
    StepKind.end: "end of its inputs",
    StepKind.forward: "beginning of a forward",
    StepKind.refresh: "broadcast of buffers before a forward",
    StepKind.average: "average of a backward's gradients",
    StepKind.skip: "beginning of a forward without averages",
}


def refuse_collectives(module: nn.Module) -> None:
    """Raise UsageError if the forward of a layer needs all ranks, also those that have run out of inputs."""
    for name, each in module.named_modules():
        if isinstance(each, SyncBatchNorm):
            raise UsageError(
                f"module {name!r} is a SyncBatchNorm, whose forward needs all ranks: pass "
                "throw_on_early_termination=True to join()"
            )
