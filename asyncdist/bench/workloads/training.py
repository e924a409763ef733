"""Training steps in turns: our DistributedDataParallel, stock PyTorch on our back end and on gloo's, the model alone.

Called by `bench.rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from asyncdist import sync
from asyncdist.bench.contenders.contenders import Start
from asyncdist.bench.plan import BenchPlan, in_turns
from asyncdist.bench.result import Timing, Training
from asyncdist.bench.workloads.models import STEPS, Batch, Step, loss_of
from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import BenchmarkError

_WARM_UP_STEPS = 3  # buckets are dealt anew after the first
_TOLERANCE = 1e-4  # of weights after training, between contenders that add in another order


class _Trainer:
    """One model with its optimizer; ``step`` is what is timed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss_of(self.model, batch).backward()
        self.optimizer.step()

    def weights(self) -> torch.Tensor:
        """Return all weights, put together from all ranks where they are spread; call it on every rank."""
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in parameters]
        return torch.cat([each.flatten() for each in whole])


def train(
    name: str, plan: BenchPlan, groups: Mapping[str, Any], rank: int, start: Start, tell: Callable[[float], None]
) -> Training:
    """Time a training step (from `plan.STEPS`) of every contender.

    ``groups`` are torch.distributed's, by contender; our default world is open. All contenders see the same batches.
    BenchmarkError if two contenders that train alike, or two ranks, end with other weights.
    """
    step = STEPS[name]
    trainers = _trainers(name, step, groups)
    torch.manual_seed(1 + rank * step.apart)
    seconds: dict[str, list[float]] = {who: [] for who in trainers}
    names = list(trainers)
    for turn in range(-_WARM_UP_STEPS, plan.training_steps):
        tell(max(0, turn) / plan.training_steps)
        batch = step.batch()
        for who in in_turns(names, turn):
            start()
            began = perf_counter()
            trainers[who].step(batch)
            if turn >= 0:
                seconds[who].append(perf_counter() - began)
    _compare(trainers)
    parameters = sum(parameter.numel() for parameter in trainers["alone"].model.parameters())
    return Training(name, parameters, {who: Timing.of(times) for who, times in seconds.items()})


def _trainers(name: str, step: Step, groups: Mapping[str, Any]) -> dict[str, _Trainer]:
    """Return the contenders, ours first, all with the same weights."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return step.model()

    trainers = {"asyncdist": _Trainer(DistributedDataParallel(made()))} if name == "ddp" else {}
    for who, group in groups.items():
        trainers[who] = _Trainer(step.spread(made(), group))
    return {**trainers, "alone": _Trainer(made())}


def _compare(trainers: Mapping[str, _Trainer]) -> None:
    """Raise BenchmarkError if weights are not alike on all ranks, or not those of the first contender."""
    found = {who: trainer.weights() for who, trainer in trainers.items() if who != "alone"}
    first = next(iter(found), "")
    for who, weights in found.items():
        others = weights.clone()
        sync.broadcast(others, 0)
        if not torch.equal(others, weights):
            raise BenchmarkError(f"after training with {who} the ranks' weights differ")
        difference = (weights - found[first]).abs().max().item()
        if difference > _TOLERANCE:
            raise BenchmarkError(f"{who}'s weights differ from {first}'s by {difference:.2g} after training")
