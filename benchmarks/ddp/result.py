"""The figures of a benchmark of data-parallel training. `benchmark` collects them, `report.ddp_table` shows them.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.ddp.plan import ALONE, DdpPlan, nbytes_per_second


@dataclass(slots=True)
class StepFigures:
    """One contender's training steps, with one number for each round.

    Attributes:
        seconds: The median of the steps on rank 0.
        hidden: The median share of the all-reduces' time that passed during backward; empty for torch's class.
        forward: The median time from the start of a forward to that of its backward; empty for torch's class.
        sent: The bytes that the host of rank 0 has sent in a step; empty on one host.
        note: The buckets of ``bucket_cap_mb="auto"`` in the last round.
    """

    seconds: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    note: str = ""


@dataclass(slots=True)
class StepCase:
    """The training steps of one model.

    Attributes:
        part: A name from `plan.STEPS`.
        model: A name from `plan.MODELS`.
        gradient_nbytes: The bytes of all gradients.
        contenders: The figures by contender.
    """

    part: str
    model: str
    gradient_nbytes: int = 0
    contenders: dict[str, StepFigures] = field(default_factory=dict)

    def ratios(self, who: str, to: str) -> list[float]:
        """Return the time of a contender over that of another for each round."""
        pairs = zip(self.contenders[who].seconds, self.contenders[to].seconds, strict=True)
        return [one / other for one, other in pairs]

    def over_bound(self, who: str, rate: str) -> list[float]:
        """Return the time of a contender over the longer one of computation and transfer, for each round.

        These are the step without communication, and the bytes that the contender has sent over a link of this rate.
        """
        return self._over_longer(who, rate, [0.0] * len(self.contenders[who].seconds))

    def over_limit(self, who: str, rate: str) -> list[float]:
        """Return the time of a contender over what is physically possible, for each round.

        As `over_bound`, but the transfer begins after the forward of asyncdist's class: before, there are no gradients.
        """
        return self._over_longer(who, rate, self.contenders["asyncdist"].forward)

    def _over_longer(self, who: str, rate: str, delays: Sequence[float]) -> list[float]:
        found, alone = self.contenders[who], self.contenders[ALONE].seconds
        return [
            seconds / max(compute, delay + sent / nbytes_per_second(rate))
            for seconds, sent, compute, delay in zip(found.seconds, found.sent, alone, delays, strict=True)
        ]


@dataclass(slots=True)
class MemoryCase:
    """The times and bytes of one contender for one model.

    Attributes:
        model: A name from `plan.MODELS`.
        contender: A name from `plan.CONTENDERS`.
        peak: For each round the most bytes of a rank above those before the first step: gradients, activations, buckets.
            Memory that ranks share counts once.
        largest_bucket: The bytes of the largest bucket; 0 for torch's class and without communication.
    """

    model: str
    contender: str
    peak: list[int] = field(default_factory=list)
    largest_bucket: int = 0


@dataclass(slots=True)
class TrainingCase:
    """What a way to train a model over a slow link did.

    Attributes:
        who: ``"alone"``: each member on its own. ``"data parallel"``: with a hundred times the bytes, on a link without a
            limit. ``"diloco"``: over the slow link.
        seconds: For each round the time of all inner steps, outer steps included.
        losses: For each round the loss on held-out samples at the end.
        sent: For each round the bytes that a member has sent.
        waited: For each round the seconds of these for which inner steps waited for outer steps.
    """

    who: str
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


@dataclass(slots=True)
class DdpReport:
    """All figures of a run."""

    plan: DdpPlan
    machine: dict[str, str]
    steps: list[StepCase] = field(default_factory=list)
    memory: list[MemoryCase] = field(default_factory=list)
    training: list[TrainingCase] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain data: times in seconds."""
        return asdict(self)
