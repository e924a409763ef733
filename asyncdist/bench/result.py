"""What a run has found, and the figures that follow from it. No torch here. The reports read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from asyncdist.bench.plan import RIVALS, WAYS, BenchPlan


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
class ResultRow:
    """One collective at one size. ``timings`` by contender: see `BenchPlan.contenders`."""

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

    def above_blocking(self, who: str) -> float | None:
        """Seconds that a contender's call takes above that of our blocking face; None if it did not run."""
        timing = self.timings.get(who)
        return None if timing is None else timing.median - self.ours.median


@dataclass(frozen=True, slots=True)
class DeviceTiming:
    """A contender's calls on a device: until they returned, and until the data was there."""

    returns: Timing
    there: Timing


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One collective at one size on devices, the first of which is ``device``. ``timings`` by contender.

    "copy" are the same reads and writes on one device, by one process. ``ticks``, by contender: the seconds by which the
    latest tick of an event loop was late that went on meanwhile, in processes that received. ``absent`` says why who
    could compete does not.
    """

    device: str
    collective: str
    nbytes: int
    ranks: int
    timings: dict[str, DeviceTiming]
    ticks: dict[str, float]
    absent: dict[str, str]

    def times_faster_than(self, rival: str, who: str) -> float | None:
        """Return a rival's median until the data is there over that of another; None if one of them did not run."""
        if rival not in self.timings or who not in self.timings or who == rival:
            return None
        return self.timings[rival].there.median / self.timings[who].there.median

    def times_as_long_as(self, rival: str, who: str) -> float | None:
        """Return the inverse of that."""
        inverse = self.times_faster_than(rival, who)
        return None if inverse is None else 1 / inverse


@dataclass(frozen=True, slots=True)
class Training:
    """One training step (from `plan.STEPS`): the parameters of its model, and seconds of the step by contender.

    "asyncdist" is our DistributedDataParallel, "torch" and "gloo" are stock PyTorch on our back end and on gloo's, "alone"
    is the model on one rank.
    """

    step: str
    parameters: int
    timings: dict[str, Timing]

    def times_alone(self, who: str) -> float:
        """Return how many times as long as the model's alone a contender's step takes."""
        return self.timings[who].median / self.timings["alone"].median

    def times_faster_than_gloo(self, who: str) -> float | None:
        """Return the median of stock PyTorch over gloo over that of a contender; None if gloo did not run."""
        return self.timings["gloo"].median / self.timings[who].median if "gloo" in self.timings else None


@dataclass(slots=True)
class Report:
    """Everything that a run has found."""

    plan: BenchPlan
    machine: dict[str, str]
    rows: list[ResultRow] = field(default_factory=list)
    device_rows: list[DeviceRow] = field(default_factory=list)
    training: list[Training] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain data: times in microseconds, bandwidths in bytes a second."""
        return {
            "machine": self.machine,
            "plan": asdict(self.plan),
            "rows": [_row(row) for row in self.rows],
            "device_rows": [_device_row(row) for row in self.device_rows],
            "training": [_training(training) for training in self.training],
        }


def _row(row: ResultRow) -> dict[str, Any]:
    return {
        "collective": row.collective,
        "nbytes": row.nbytes,
        "ranks": row.ranks,
        "contenders": {name: _timing(timing) for name, timing in row.timings.items()},
        "algorithm_bandwidth": row.algorithm_bandwidth,
        "bus_bandwidth": row.bus_bandwidth,
        "times_faster_than": {
            who: {rival: row.times_faster_than(rival, who) for rival in row.timings if rival in RIVALS}
            for who in ("asyncdist", "registered", *WAYS)
            if who in row.timings
        },
        "copies": {who: row.copies(who) for who in row.timings if who != "copy"} if "copy" in row.timings else None,
        "above_blocking_us": {
            who: above * 1e6 for who in (*WAYS, "awaited") if (above := row.above_blocking(who)) is not None
        },
    }


def _device_row(row: DeviceRow) -> dict[str, Any]:
    return {
        "device": row.device,
        "collective": row.collective,
        "nbytes": row.nbytes,
        "ranks": row.ranks,
        "contenders": {
            name: {
                **_timing(timing.there),
                "returns_us": timing.returns.median * 1e6,
                "times_faster_than_gloo": row.times_faster_than("gloo", name),
                "times_as_long_as_copy": row.times_as_long_as("copy", name),
            }
            for name, timing in row.timings.items()
        },
        "latest_tick_us": {name: tick * 1e6 for name, tick in row.ticks.items()},
        "absent": row.absent,
    }


def _training(training: Training) -> dict[str, Any]:
    return {
        "step": training.step,
        "parameters": training.parameters,
        "contenders": {
            name: {
                **_timing(timing),
                "times_alone": training.times_alone(name),
                "times_faster_than_gloo": training.times_faster_than_gloo(name),
            }
            for name, timing in training.timings.items()
        },
    }


def _timing(timing: Timing) -> dict[str, float]:
    return {
        "median_us": timing.median * 1e6,
        "p99_us": timing.p99 * 1e6,
        "best_us": timing.best * 1e6,
        "calls": timing.calls,
    }
