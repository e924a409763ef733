"""The models of the benchmark of data-parallel training, by the names of `names.MODELS`. Used by `ranks`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from asyncdist.cli.bench.workloads.models import Batch, Transformer, perceptron, sentences
from benchmarks.ddp.names import MODELS

_CLASSES = 10
_INPUTS, _HIDDEN = 1024, 2048


class Workload(NamedTuple):
    """A model and its batches."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]


def large_perceptron() -> nn.Module:
    """Return an MLP of 25.2 M parameters, all but 1 % of them in seven layers."""
    widths = [_INPUTS, *[_HIDDEN] * 6, _INPUTS]
    layers = [each for pair in itertools.pairwise(widths) for each in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(_INPUTS, _CLASSES))


class ManySmall(nn.Module):
    """1,000 parameters of 1 or 64 elements: a scale and a shift for each of 500 layers without other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in range(500))
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(500))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            x = torch.addcmul(shift, x, scale)
        return x[:, :_CLASSES]


def convolutions() -> nn.Module:
    """Return a network of ten convolutions with 23.6 M parameters, whose gradients are copied into buckets."""
    layers = [each for _ in range(10) for each in (nn.Conv2d(512, 512, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512 * 16, _CLASSES))


def _batch(*shape: int) -> Batch:
    return torch.randn(shape), torch.randint(_CLASSES, shape[:1])


WORKLOADS = {
    "mlp": Workload(perceptron, lambda: _batch(MODELS["mlp"].batch, _INPUTS)),
    "large": Workload(large_perceptron, lambda: _batch(MODELS["large"].batch, _INPUTS)),
    "small": Workload(ManySmall, lambda: _batch(MODELS["small"].batch, 64)),
    "transformer": Workload(lambda: Transformer(layers=8), lambda: sentences(MODELS["transformer"].batch)),
    "convolutions": Workload(convolutions, lambda: _batch(MODELS["convolutions"].batch, 512, 4, 4)),
}
"""What `names.MODELS` names."""
