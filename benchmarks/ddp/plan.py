"""What a benchmark of data-parallel training measures. Read by `asyncdist.cli` before torch is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

PARTS = {
    "steps": "training steps on one host",
    "small": "many small parameters, in a world of one",
    "hosts": "training steps between two hosts",
    "memory": "memory above model, gradients and optimizer",
    "diloco": "training with few exchanges between two hosts",
}
"""The parts, with what they measure."""
ON_TWO_HOSTS = ("hosts", "diloco")
ROUNDS_PER_ROUND = {"steps": 1.0, "small": 1.0, "hosts": 0.5, "memory": 0.2, "diloco": 0.1}
"""Rounds of each part for a round of the part "steps"; a round of the others takes longer, or varies less."""


class TrainedModel(NamedTuple):
    """A model of the benchmark; `models` makes it.

    Attributes:
        title: Its name in tables.
        batch: How many inputs each rank has in a step.
    """

    title: str
    batch: int


MODELS = {
    "mlp": TrainedModel("an MLP of 6.3 M parameters, 16 inputs", 16),
    "large": TrainedModel("an MLP of 25 M parameters, 16 inputs", 16),
    "small": TrainedModel("1,000 parameters of 1 or 64 elements, 16 inputs", 16),
    "transformer": TrainedModel("a transformer of 6.4 M parameters, 6 sequences of 64", 6),
    "convolutions": TrainedModel("a convolutional network of 24 M parameters, one picture", 1),
}
"""The models by name."""

ALONE = "alone"
"""The contender that trains without communication, on all ranks at the same time. The others are compared with it."""
KEPT = "kept"
"""The contender that trains without communication and keeps its gradients from step to step, as buckets do."""
CONTENDERS = {
    "asyncdist": "asyncdist's `DistributedDataParallel`",
    "auto": '... with `bucket_cap_mb="auto"`',
    "tcp": "... over TCP",
    "bf16": "... with the hook `bf16`",
    "int8": '... with the hook `Quantized("int8")`',
    "torch": "stock DDP on asyncdist",
    "gloo": "stock DDP on gloo",
    ALONE: "without communication",
    KEPT: "... with gradients that are kept from step to step",
}
"""The contenders, with what they are."""
WITH_TORCH = {"torch": "asyncdist", "gloo": "gloo"}
"""The contenders that are torch's class, with their back ends."""
LOSSY = ("bf16", "int8")
"""The contenders that end with other weights."""


class StepsPart(NamedTuple):
    """Models and contenders of a part whose training steps are timed."""

    models: tuple[str, ...]
    contenders: tuple[str, ...]


STEPS = {
    "steps": StepsPart(("mlp", "large"), ("asyncdist", "auto", "tcp", "torch", "gloo", ALONE)),
    "small": StepsPart(("small",), ("asyncdist", "torch", "gloo", ALONE)),
    "hosts": StepsPart(("mlp", "transformer"), ("asyncdist", "auto", "bf16", "int8", "gloo", ALONE)),
}
"""The parts whose steps are timed."""

_RATE = re.compile(r"(\d+)(k|m|g)bit")


@dataclass(frozen=True)
class DdpPlan:
    """What to measure.

    Attributes:
        parts: Names from `PARTS`.
        rounds: How often each case of the part "steps" is measured, each time in new processes; see `rounds_of`. Tables
            show medians of the rounds' medians.
        steps: The timed steps of each contender in a round.
        ranks: The number of ranks of the parts on one host; a world of one has one, and two hosts have one each.
        rate: The rate of the link between the hosts of the part "hosts", in the words of ``tc``.
        slow_rate: The rate of the link between the hosts of the part "diloco".
        every: Inner steps between two outer steps of the part "diloco".
        outer_steps: The number of outer steps of the part "diloco".
    """

    parts: tuple[str, ...] = tuple(PARTS)
    rounds: int = 10
    steps: int = 10
    ranks: int = 2
    rate: str = "1gbit"
    slow_rate: str = "100mbit"
    every: int = 100
    outer_steps: int = 10

    def rounds_of(self, part: str) -> int:
        """Return how often each case of a part is measured: at least once."""
        return max(1, round(self.rounds * ROUNDS_PER_ROUND[part]))


def nbytes_per_second(rate: str) -> float:
    """Return the bytes per second of a rate such as ``1gbit``; raise ValueError for other words."""
    found = _RATE.fullmatch(rate)
    if found is None or not int(found[1]):
        raise ValueError(f"{rate!r} is not a rate such as 1gbit or 100mbit")
    return int(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8
