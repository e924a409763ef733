"""Let worlds of many ranks begin, and measure what that costs: bytes from the store, processor time, the first barrier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from asyncdist.cli.page import Column, Grid, duration
from benchmarks.benchmark import COUNTS, Benchmark, option
from benchmarks.grid import Case, GridReport, Target, figure_within, yes_or_no

_WHO = "asyncdist"
_PATIENCE = 600.0
"""Seconds for one world, also on a busy machine."""
_MOST_BYTES, _MOST_BARRIERS, _MOST_GROWTH = 2e6, 3.0, 1.3
"""The targets at 256 ranks: bytes of the store, first barrier against later ones, processor time against 32 ranks."""


@dataclass(frozen=True)
class ScalePlan:
    """What to measure."""

    ranks: tuple[int, ...] = option("2,8,32,64,128,256", "Numbers of ranks, comma-separated.", COUNTS)
    transport: str = option("tcp", "The transports of the ranks.", click.STRING)
    barriers: int = option(4, "Barriers in each world.", click.IntRange(2))
    rounds: int = option(3, "Rounds, each with a new process.")


class ScaleBenchmark(Benchmark[ScalePlan]):
    """Measure how the start of a world grows with its ranks.

    The ranks of a world are tasks of one process, so times contain the work of all ranks, one after the other. A run takes
    some minutes.

    \b
    python -m benchmarks scale --ranks 32,256 --rounds 1
    """

    title = "How a world grows"
    plan_type = ScalePlan
    program = Path(__file__).with_name("ranks.py")
    preload = ("torch", "asyncdist")

    def measure(self) -> Iterator[Case]:
        cases = {size: Case("scale", f"{size} ranks") for size in self.plan.ranks}
        for number in range(self.plan.rounds):
            for size, case in cases.items():
                self.laboratory.progress(f"{size} ranks: {number + 1} of {self.plan.rounds}")
                world = self.laboratory.start("meet", self.plan.transport, size, self.plan.barriers)
                found = world.hear(_PATIENCE)
                case.add(_WHO, found.pop("processor"), **found)
                self.laboratory.end([world])
        if {32, 256} <= cases.keys():
            of_32 = cases[32].median(_WHO)
            cases[256].targets = [
                Target(_MOST_BYTES, lambda case: case.median(_WHO, "sent"), lambda value: f"{value / 1e6:g} MB"),
                figure_within(_MOST_GROWTH * of_32, _WHO),
                Target(_MOST_BARRIERS, _first_to_later, lambda value: f"{value:g} × a later barrier"),
            ]
        yield from cases.values()

    @classmethod
    def tables(cls, report: GridReport[ScalePlan]) -> tuple[list[str], list[Grid]]:
        about = [
            report.about(f"ranks as tasks of one process over {report.plan.transport}, {report.plan.rounds} rounds"),
            "processor: time of the whole process for the start of a world, by its ranks. sent: bytes that rank 0's store "
            "has sent when all have started. read: most bytes that a rank has read. memory: of the process after the "
            "barriers, by its ranks.",
        ]
        return about, [Grid.of(cls.title, _COLUMNS, report.cases)]


def _first_to_later(case: Case) -> float:
    return median(case.of(_WHO, "first")) / median(case.of(_WHO, "later"))


_COLUMNS: list[Column[Case]] = [
    ("ranks", lambda case: case.name.split()[0]),
    ("start", lambda case: duration(case.median(_WHO, "opened"))),
    ("processor\nper rank", lambda case: duration(case.median(_WHO))),
    ("sent", lambda case: f"{case.median(_WHO, 'sent') / 1e3:,.0f} KB"),
    ("read", lambda case: f"{case.median(_WHO, 'most_read') / 1e3:.1f} KB"),
    ("first\nbarrier", lambda case: duration(case.median(_WHO, "first"))),
    ("later\nbarrier", lambda case: duration(case.median(_WHO, "later"))),
    ("memory\nper rank", lambda case: f"{case.median(_WHO, 'memory') / 1e3:.0f} KB"),
    ("target", lambda case: ", ".join(map(str, case.targets))),
    ("reached", lambda case: yes_or_no(case) if case.targets else ""),
]
