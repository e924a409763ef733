"""Time training steps in turns: asyncdist's DistributedDataParallel, and stock PyTorch on asyncdist and on gloo.

Called by `rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from asyncdist import sync
from asyncdist.cli.bench.contenders.contenders import Start
from asyncdist.cli.bench.plan import BenchPlan, in_turns
from asyncdist.cli.bench.result import ResultRow, Timing
from asyncdist.cli.bench.workloads.models import STEPS, Batch, Step, loss_of
from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import BenchmarkError

_WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first step
_TOLERANCE = 1e-4  # difference of weights between contenders, which add in different orders


class Trainer:
    """One model with its optimizer. `step` is timed.

    Args:
        model: The model, wrapped or not.
        keeps_gradients: Whether each step sets the gradients of the last one to zero, instead of freeing them.
    """

    def __init__(self, model: nn.Module, *, keeps_gradients: bool = False) -> None:
        self.model = model
        self._frees_gradients = not keeps_gradients
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad(set_to_none=self._frees_gradients)
        loss_of(self.model, batch).backward()
        self.optimizer.step()

    def weights(self) -> torch.Tensor:
        """Return all weights in one dimension, gathered from all ranks if they are sharded; called on every rank."""
        weights = [parameter.detach() for parameter in self.model.parameters()]
        weights = [each.full_tensor() if isinstance(each, DTensor) else each for each in weights]
        return torch.cat([each.flatten() for each in weights])


def train(
    name: str, plan: BenchPlan, groups: Mapping[str, Any], rank: int, start: Start, progress: Callable[[float], None]
) -> ResultRow:
    """Time a training step of every contender; asyncdist's default group must be open.

    Args:
        name: The step, from `plan.STEPS`.
        plan: Says how many steps to time.
        groups: The process groups of torch.distributed by contender.
        rank: This rank.
        start: Returns on all ranks at the same instant.
        progress: Called with the completed share of the steps (0 to 1).

    Raises:
        BenchmarkError: Two contenders, or two ranks, have different weights after training.
    """
    step = STEPS[name]
    trainers = _trainers(name, step, groups)
    torch.manual_seed(1 + rank * step.own_batches)
    times: dict[str, list[tuple[float, float]]] = {who: [] for who in trainers}
    for turn in range(-_WARM_UP_STEPS, plan.training_steps):
        progress(max(0, turn) / plan.training_steps)
        batch = step.batch()
        for who in in_turns(list(trainers), turn):
            start()
            began = perf_counter()
            trainers[who].step(batch)
            seconds = perf_counter() - began
            if turn >= 0:
                times[who].append((seconds, seconds))
    compare_weights(trainers)
    nbytes = sum(parameter.numel() * 4 for parameter in trainers["alone"].model.parameters())
    return ResultRow(name, nbytes, plan.ranks, {who: Timing.of(steps) for who, steps in times.items()})


def _trainers(name: str, step: Step, groups: Mapping[str, Any]) -> dict[str, Trainer]:
    """Return the contenders, asyncdist's first, all with the same weights."""

    def new_model() -> nn.Module:
        torch.manual_seed(0)
        return step.model()

    trainers = {"asyncdist": Trainer(DistributedDataParallel(new_model()))} if name == "ddp" else {}
    for who, group in groups.items():
        trainers[who] = Trainer(step.parallelize(new_model(), group))
    return {**trainers, "alone": Trainer(new_model())}


def compare_weights(trainers: Mapping[str, Trainer], lossy: Collection[str] = ()) -> None:
    """Raise BenchmarkError if a contender's weights differ between ranks, or from those of the first contender.

    Args:
        trainers: The contenders; "alone" is not compared.
        lossy: Those that are only compared between ranks.
    """
    found = {who: trainer.weights() for who, trainer in trainers.items() if who != "alone"}
    first = next(iter(found), "")
    for who, weights in found.items():
        of_rank_0 = weights.clone()
        sync.broadcast(of_rank_0, 0)
        if not torch.equal(of_rank_0, weights):
            raise BenchmarkError(f"after training with {who} the ranks' weights differ")
        difference = (weights - found[first]).abs().max().item()
        if who not in lossy and difference > _TOLERANCE:
            raise BenchmarkError(f"{who}'s weights differ from {first}'s by {difference:.2g} after training")
