"""The results of a run and the ratios between them. The reports read it. This module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from asyncdist.cli.bench.plan import EARLIER, RIVALS, THROUGH, BenchPlan
from asyncdist.cli.machine import refuse_another_machine
from asyncdist.errors import UsageError


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of calls on rank 0 until the data was there. ``returned`` is the median until a call returned."""

    median: float
    p99: float
    best: float
    calls: int
    returned: float

    @classmethod
    def of(cls, times: Sequence[tuple[float, float]]) -> Timing:
        """Summarise calls, each given as (seconds until it returned, seconds until its data was there).

        The p99 of fewer than a hundred calls is the slowest call.
        """
        ordered = sorted(complete for _, complete in times)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return cls(median(ordered), p99, ordered[0], len(ordered), median(returned for returned, _ in times))


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A collective at one size, 0 for a barrier.

    Attributes:
        timings: By contender, from `plan.CONTENDERS`.
        busy: By contender, the share of the processors' time in which these were busy; only between hosts.
    """

    name: str
    nbytes: int
    ranks: int
    timings: dict[str, Timing]
    busy: dict[str, float] = field(default_factory=dict)

    @property
    def blocking(self) -> Timing:
        """The timing of asyncdist's blocking API."""
        return self.timings["asyncdist"]

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the tensor per second."""
        return self.nbytes / self.blocking.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second over the busiest link of an optimal schedule; comparable between numbers of ranks."""
        share = (self.ranks - 1) / self.ranks
        factor = {"all_reduce": 2 * share, "reduce": 1.0, "broadcast": 1.0}.get(self.name, share)
        return self.algorithm_bandwidth * factor

    def ratio(self, contender: str, to: str) -> float | None:
        """Return the median of one contender over that of another; None if one of them was not measured."""
        if contender not in self.timings or to not in self.timings:
            return None
        return self.timings[contender].median / self.timings[to].median

    def above_blocking(self, contender: str) -> float | None:
        """Return the seconds that a call takes longer than with the blocking API; None if it was not measured."""
        timing = self.timings.get(contender)
        return None if timing is None else timing.median - self.blocking.median

    def as_json(self) -> dict[str, Any]:
        """Return plain data: times in microseconds, bandwidths in bytes per second."""
        contenders = {
            name: {
                "median_us": one.median * 1e6,
                "p99_us": one.p99 * 1e6,
                "best_us": one.best * 1e6,
                "calls": one.calls,
            }
            for name, one in self.timings.items()
        }
        above = {who: self.above_blocking(who) for who in (*THROUGH, "awaited")}
        return {
            "collective": self.name,
            "nbytes": self.nbytes,
            "ranks": self.ranks,
            "contenders": contenders,
            "algorithm_bandwidth": self.algorithm_bandwidth,
            "bus_bandwidth": self.bus_bandwidth,
            "times_faster_than": {
                who: {rival: self.ratio(rival, who) for rival in contenders if rival in (*RIVALS, EARLIER)}
                for who in ("asyncdist", "registered", *THROUGH)
                if who in contenders
            },
            "copies": {who: self.ratio(who, "copy") for who in contenders if who != "copy"}
            if "copy" in contenders
            else None,
            "above_blocking_us": {who: seconds * 1e6 for who, seconds in above.items() if seconds is not None},
            **({"processors_busy": self.busy} if self.busy else {}),
        }


@dataclass(slots=True)
class Report:
    """All results of a run. ``fewer_hosts`` has the runs of `launch.sweep` between fewer hosts, by their number."""

    plan: BenchPlan
    machine: dict[str, str]
    rows: list[ResultRow] = field(default_factory=list)
    fewer_hosts: list[Report] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain data: times in microseconds, bandwidths in bytes per second."""
        return {
            "machine": self.machine,
            "plan": asdict(self.plan),
            "rows": [row.as_json() for row in self.rows],
            **({"fewer_hosts": [each.as_json() for each in self.fewer_hosts]} if self.fewer_hosts else {}),
        }

    def add_earlier(self, timings: Mapping[tuple[str, int, int], Timing]) -> None:
        """Add the figures of an earlier run to those of the same collective, size and number of ranks."""
        for row in self.rows:
            if found := timings.get((row.name, row.nbytes, row.ranks)):
                row.timings[EARLIER] = found


def read_earlier(path: Path) -> dict[tuple[str, int, int], Timing]:
    """Return asyncdist's timings in a file of ``--json``, by collective, bytes and ranks.

    Raises:
        UsageError: The file has no such figures, or those of another machine.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        timings = {}
        for row in found["rows"]:
            of = row["contenders"]["asyncdist"]
            median_us, p99_us, best_us = (of[key] * 1e-6 for key in ("median_us", "p99_us", "best_us"))
            key = row["collective"], row["nbytes"], row["ranks"]
            timings[key] = Timing(median_us, p99_us, best_us, of["calls"], median_us)
        there = dict(found["machine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} has no figures of `asyncdist bench --json` ({error!r})") from None
    refuse_another_machine(there)
    return timings


def by_name(rows: Iterable[ResultRow]) -> dict[str, list[ResultRow]]:
    found: dict[str, list[ResultRow]] = {}
    for row in rows:
        found.setdefault(row.name, []).append(row)
    return found
