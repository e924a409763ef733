"""What a run has found, and the figures that follow from it. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from asyncdist.bench.plan import RIVALS, Plan


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a contender's calls, taken on rank 0."""

    median: float
    p99: float
    best: float
    calls: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise single calls; the p99 of fewer than a hundred is the worst."""
        ordered = sorted(seconds)
        worst = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return cls(median(ordered), worst, ordered[0], len(ordered))


@dataclass(frozen=True, slots=True)
class Row:
    """One collective at one size. ``timings`` by contender: see `Plan.contenders`."""

    collective: str
    nbytes: int
    ranks: int
    timings: dict[str, Timing]

    @property
    def ours(self) -> Timing:
        return self.timings["asyncdist"]

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the tensor a second."""
        return self.nbytes / self.ours.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second through the busiest link of a perfect schedule: comparable over world sizes."""
        share = (self.ranks - 1) / self.ranks
        factor = {"all_reduce": 2 * share, "reduce": 1.0, "broadcast": 1.0}.get(self.collective, share)
        return self.algorithm_bandwidth * factor

    def times_faster_than(self, rival: str, who: str = "asyncdist") -> float | None:
        """Return the rival's median over that of one of ours; None if one of them did not run."""
        if rival not in self.timings or who not in self.timings:
            return None
        return self.timings[rival].median / self.timings[who].median

    def copies(self, who: str = "asyncdist") -> float | None:
        """Return in how many times one core's memory copy a contender is done; None if one of them did not run."""
        return self.times_faster_than(who, "copy")

    @property
    def awaiting(self) -> float | None:
        """Seconds that the awaited call takes more than the blocking one; None if it was not measured."""
        awaited = self.timings.get("awaited")
        return None if awaited is None else awaited.median - self.ours.median


@dataclass(slots=True)
class Report:
    """Everything that a run has found. ``training`` are seconds of a step, by contender (alone, asyncdist, gloo)."""

    plan: Plan
    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    training: dict[str, Timing] = field(default_factory=dict)
    parameters: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return plain data: times in microseconds, bandwidths in bytes a second."""
        return {
            "machine": self.machine,
            "plan": asdict(self.plan),
            "rows": [_row(row) for row in self.rows],
            "training": self._training_as_json() if self.training else None,
        }

    def times_alone(self, who: str) -> float:
        """Return how many times as long as the model's alone a contender's training step takes."""
        return self.training[who].median / self.training["alone"].median

    def _training_as_json(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "contenders": {
                name: {**_timing(timing), "times_alone": self.times_alone(name)}
                for name, timing in self.training.items()
            },
        }


def _row(row: Row) -> dict[str, Any]:
    return {
        "collective": row.collective,
        "nbytes": row.nbytes,
        "ranks": row.ranks,
        "contenders": {name: _timing(timing) for name, timing in row.timings.items()},
        "algorithm_bandwidth": row.algorithm_bandwidth,
        "bus_bandwidth": row.bus_bandwidth,
        "times_faster_than": {
            who: {rival: row.times_faster_than(rival, who) for rival in row.timings if rival in RIVALS}
            for who in ("asyncdist", "registered")
            if who in row.timings
        },
        "copies": {who: row.copies(who) for who in row.timings if who != "copy"} if "copy" in row.timings else None,
        "awaiting_us": None if row.awaiting is None else row.awaiting * 1e6,
    }


def _timing(timing: Timing) -> dict[str, float]:
    return {
        "median_us": timing.median * 1e6,
        "p99_us": timing.p99 * 1e6,
        "best_us": timing.best * 1e6,
        "calls": timing.calls,
    }
