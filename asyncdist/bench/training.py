"""A training step: our DistributedDataParallel, stock DDP over gloo, and the model alone, in turns."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from asyncdist.bench.contenders import Start
from asyncdist.bench.plan import Plan
from asyncdist.bench.result import Timing
from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import BenchmarkError

_BATCH, _CLASSES = 16, 10
_WARM_UP_STEPS = 3  # buckets are dealt anew after the first


def _model() -> nn.Module:
    """Return an MLP of 6.3 M parameters, equal in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, _CLASSES))


class _Trainer:
    """One model with its optimizer; ``step`` is what is timed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()


def train(plan: Plan, rank: int, start: Start, tell: Callable[[float], None]) -> tuple[int, dict[str, Timing]]:
    """Time steps of every contender; return the number of parameters and seconds by contender.

    The process groups are open already. All contenders see the same batches; BenchmarkError if ours and stock DDP, or
    two ranks, end with other weights.
    """
    trainers = {"asyncdist": _Trainer(DistributedDataParallel(_model()))}
    if "gloo" in plan.against:
        trainers["gloo"] = _Trainer(nn.parallel.DistributedDataParallel(_model()))
    trainers["alone"] = _Trainer(_model())
    torch.manual_seed(rank + 1)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    names = list(trainers)
    for turn in range(-_WARM_UP_STEPS, plan.training_steps):
        tell(max(0, turn) / plan.training_steps)
        inputs, labels = torch.randn(_BATCH, 1024), torch.randint(_CLASSES, (_BATCH,))
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            start()
            began = perf_counter()
            trainers[name].step(inputs, labels)
            if turn >= 0:
                seconds[name].append(perf_counter() - began)
    _compare(trainers)
    parameters = sum(parameter.numel() for parameter in trainers["alone"].model.parameters())
    return parameters, {name: Timing.of(times) for name, times in seconds.items()}


def _compare(trainers: dict[str, _Trainer]) -> None:
    """Raise BenchmarkError if the weights of ours are not those of stock DDP, or not alike on all ranks."""
    from asyncdist import sync

    ours = torch.cat([parameter.detach().flatten() for parameter in trainers["asyncdist"].model.parameters()])
    first = ours.clone()
    sync.broadcast(first, 0)
    if not torch.equal(first, ours):
        raise BenchmarkError("after training with asyncdist the ranks' weights differ")
    if "gloo" in trainers:
        theirs = torch.cat([parameter.detach().flatten() for parameter in trainers["gloo"].model.parameters()])
        difference = (ours - theirs).abs().max().item()
        if difference > 1e-4:
            raise BenchmarkError(f"asyncdist's weights differ from stock DDP's by {difference:.2g} after training")
