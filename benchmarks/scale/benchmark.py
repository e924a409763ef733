"""Let worlds of many ranks begin: as tasks of one process, as processes, and in a simulation up to 100,000 ranks.

The simulation gets its times from real processes of this machine, and is compared with worlds of real processes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from asyncdist.cli.page import Column, Grid, duration
from benchmarks.benchmark import COUNTS, Benchmark, option
from benchmarks.grid import FIGURE, Case, GridReport, Target, figure_within, yes_or_no
from benchmarks.scale.cluster import Shape
from benchmarks.scale.measured import CROWDED, RealWorld, measured_costs, real_world, world_of_gloo
from benchmarks.scale.simulation import DOWNTIME, SLOWNESS, Loss, Outcome, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WHO, _SIMULATED = "asyncdist", "simulated"
_GLOO = {"gloo": True, "gloo, file": False}
"""Contenders, and whether their store is torch's over TCP or a file."""
_PATIENCE = 600.0
"""Seconds for one world, also on a busy machine."""
_MOST_BYTES, _MOST_BARRIERS, _MOST_GROWTH = 2e6, 3.0, 1.3
"""The targets at 256 ranks: bytes of the store, first barrier against later ones, processor time against 32 ranks."""
_MOST_OFF = 1.3
"""The factor by which a simulated time may differ from the measured one."""
_TIMES_GLOO, _AGAINST_GLOO = 10.0, (64, 128)
"""How many times faster than gloo these numbers of processes should be there, start and first barrier, in shared memory."""


@dataclass(frozen=True)
class ScalePlan:
    """What to measure."""

    parts: tuple[str, ...]
    ranks: tuple[int, ...] = option("2,8,32,64,128,256", "tasks: numbers of ranks, comma-separated.", COUNTS)
    transport: str = option("tcp", "tasks: the transports of the ranks.", click.STRING)
    barriers: int = option(4, "tasks: barriers in each world.", click.IntRange(2))
    rounds: int = option(3, "tasks, processes: rounds, each with new processes.")
    processes: tuple[int, ...] = option("8,64,128,256", "processes: numbers of ranks, comma-separated.", COUNTS)
    simulated: tuple[int, ...] = option("100,1000,10000", "simulation: numbers of ranks.", COUNTS)
    per_host: int = option(8, "simulation: ranks of a host.")


class ScaleBenchmark(Benchmark[ScalePlan]):
    """Measure how a world grows with its ranks: its start, its first calls, and the loss of a rank.

    \b
    tasks        worlds whose ranks are tasks of one process, so that times contain the work of all ranks
    processes    worlds of processes on this machine, next to what the simulation says of them
    simulation   the real code with simulated processes, network and time, which are measured on this machine

    A run takes some minutes.

    \b
    python -m benchmarks scale tasks --ranks 32,256 --rounds 1
    python -m benchmarks scale simulation --simulated 1000,10000 --output docs/bench
    """

    title = "How a world grows"
    plan_type = ScalePlan
    program = Path(__file__).with_name("ranks.py")
    preload = ("torch", "asyncdist", "benchmarks.scale.ranks")
    parts = ("tasks", "processes", "simulation")
    has_picture = True

    def measure(self) -> Iterator[Case]:
        for part, measure in zip(self.parts, (self._tasks, self._processes, self._simulation), strict=True):
            if part in self.plan.parts:
                yield from measure()

    def _tasks(self) -> Iterator[Case]:
        cases = {size: Case("tasks", f"{size}") for size in self.plan.ranks}
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
                Target(
                    _MOST_BARRIERS,
                    lambda case: case.median(_WHO, "first") / case.median(_WHO, "later"),
                    lambda value: f"{value:g} × a later barrier",
                ),
            ]
        yield from cases.values()

    def _processes(self) -> Iterator[Case]:
        self.laboratory.progress("the costs of a process")
        measured = {each: measured_costs(self.laboratory, each, crowded=True) for each in ("shm,tcp", "tcp")}
        for size in self.plan.processes:
            others: list[tuple[str, RealWorld]] = []
            for number, (who, is_over_tcp) in itertools.product(range(self.plan.rounds), _GLOO.items()):
                self.laboratory.progress(f"{size} processes of {who}: {number + 1} of {self.plan.rounds}")
                others.append((who, world_of_gloo(self.laboratory, size, is_over_tcp=is_over_tcp)))
            for transport, (costs, turn) in measured.items():
                worlds: list[RealWorld] = []
                case = Case("processes", f"{size}", facts={"transport": transport})
                for number in range(self.plan.rounds):
                    self.laboratory.progress(f"{size} processes over {transport}: {number + 1} of {self.plan.rounds}")
                    worlds.append(world := real_world(self.laboratory, size, transport))
                    first, *later = (step.seconds for step in world.barriers)
                    case.add(_WHO, world.start.seconds, first=first, later=median(later), both=world.first_seconds)
                for who, other in others:
                    case.add(who, other.start.seconds, both=other.first_seconds)
                shape = Shape(size, size, os.cpu_count() or 1, memory=transport != "tcp")
                longer = max(0.0, median(world.turn for world in worlds) - turn) if size > CROWDED else 0.0
                case.add(_SIMULATED, **_samples(simulate(shape, replace(costs, wakeup=longer))))
                case.targets = [Target(_MOST_OFF, _off, lambda value: f"a factor of {value:g}", allowance=1.1)]
                if size in _AGAINST_GLOO and transport != "tcp":
                    faster = Target(_TIMES_GLOO, _times_gloo, lambda value: f"{value:g} × gloo", True, allowance=1.1)
                    case.targets.append(faster)
                yield case

    def _simulation(self) -> Iterator[Case]:
        self.laboratory.progress("the costs of a process")
        costs, _ = measured_costs(self.laboratory, "shm,tcp", crowded=False)
        for size in self.plan.simulated:
            self.laboratory.progress(f"{size} simulated ranks")
            case = Case("simulation", f"{size:,}", facts={"costs": asdict(costs)})
            case.add(_SIMULATED, **_samples(simulate(Shape(size, self.plan.per_host), costs, faults=True)))
            yield case

    @classmethod
    def tables(cls, report: GridReport[ScalePlan]) -> tuple[list[str], list[Grid]]:
        plan = report.plan
        about = [report.about(f"tasks over {plan.transport}, {plan.rounds} rounds")]
        grids = [Grid.of(title, columns, report.of(part), caption=caption) for part, title, caption, columns in _TABLES]
        grids = [grid for grid in grids if grid.rows]
        if cases := report.of("simulation"):
            costs = ", ".join(f"{name} {value:.3g}" for name, value in cases[0].facts["costs"].items())
            about.append(f"Simulated hosts have {plan.per_host} ranks. Seconds, and bytes per second: {costs}.")
        return about, grids

    @classmethod
    def picture(cls, report: GridReport[ScalePlan]) -> Figure:
        """Draw seconds against ranks, and next to them faults and bytes of simulated worlds."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter

        part = next(part for part in reversed(cls.parts) if part in report.plan.parts)
        who = _SIMULATED if part == "simulation" else _WHO
        panels = [(_SECONDS, "s"), (_FAULTS, "s"), (_BYTES, "B")][: 3 if part == "simulation" else 1]
        figure = Figure(figsize=(5.4 * len(panels), 5.4), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (lines, unit) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for quantity, (label, colour, marker) in lines.items():
                points = [(int(case.name.replace(",", "")), case.of(who, quantity)) for case in report.of(part)]
                drawn = [(size, median(samples)) for size, samples in points if samples]
                axes.plot(*zip(*drawn, strict=True) if drawn else ((), ()), colour, marker=marker, label=label)
            axes.set(xscale="log", yscale="log", xlabel="ranks")
            axes.yaxis.set_major_formatter(EngFormatter(unit))
            axes.grid(color="#e4e4e4")
            axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14))
        figure.suptitle(next(title for of, title, *_ in _TABLES if of == part))
        return figure


_SECONDS = {
    FIGURE: ("start", "#0072b2", "o"),
    "first": ("first barrier", "#d55e00", "s"),
    "later": ("later barrier", "#e69f00", "v"),
}
_FAULTS = {
    "killed_known": ("a killed rank is known to all", "#cc79a7", "D"),
    "killed_regroup": ("regroup without it", "#009e73", "P"),
    "stopped_regroup": ("… without a stopped rank", "#0072b2", "o"),
    "rack_regroup": ("… without a killed rack", "#d55e00", "s"),
    "cut_regroup": ("… without a silent rack", "#e69f00", "v"),
    "first_cut_regroup": ("… which has rank 0", "#56b4e9", "^"),
    "back": ("a restarted store serves all", "#000000", "X"),
}
_BYTES = {"sent": ("sent by the store", "#0072b2", "o"), "most_read": ("read by one rank", "#d55e00", "s")}


def _samples(outcome: Outcome) -> dict[str, float]:
    found = {FIGURE if name == "start" else name: value for name, value in asdict(outcome).items()}
    losses = {name: found.pop(name) for name, value in list(found.items()) if isinstance(value, Loss)}
    return found | {f"{name}_{step}": value for name, loss in losses.items() for step, value in loss._asdict().items()}


def _off(case: Case) -> float:
    """Return the largest factor between a simulated and a measured time."""
    ratios = [case.median(_SIMULATED, each) / case.median(_WHO, each) for each in (FIGURE, "first")]
    return max(max(ratio, 1 / ratio) for ratio in ratios)


def _times_gloo(case: Case) -> float:
    return case.median("gloo", "both") / case.median(_WHO, "both")


def _time(heading: str, quantity: str = FIGURE, who: str = _WHO) -> Column[Case]:
    def text(case: Case) -> str:
        value = case.median(who, quantity)
        return "—" if isnan(value) else duration(value)

    return heading, text


def _simulated(heading: str, quantity: str = FIGURE) -> Column[Case]:
    return _time(heading, quantity, _SIMULATED)


def _loss(heading: str, which: str) -> Column[Case]:
    (_, known), (_, regroup) = _simulated("", f"{which}_known"), _simulated("", f"{which}_regroup")
    return heading, lambda case: f"{known(case)} + {regroup(case)}"


def _nbytes(heading: str, quantity: str, who: str = _WHO) -> Column[Case]:
    return heading, lambda case: f"{case.median(who, quantity) / 1e3:,.1f} KB"


_RANKS: Column[Case] = ("ranks", lambda case: case.name)
_REACHED: list[Column[Case]] = [
    ("target", lambda case: ", ".join(map(str, case.targets))),
    ("reached", lambda case: yes_or_no(case) if case.targets else ""),
]
_TABLES: list[tuple[str, str, str, list[Column[Case]]]] = [
    (
        "tasks",
        "Ranks as tasks of one process",
        "processor: time of the whole process for the start, by its ranks; sent: bytes from rank 0's store; read: the "
        "most that a rank has read; memory: of the process after the barriers, by its ranks",
        [
            _RANKS,
            _time("start", "opened"),
            _time("processor\nper rank"),
            _nbytes("sent", "sent"),
            _nbytes("read", "most_read"),
            _time("first\nbarrier", "first"),
            _time("later\nbarrier", "later"),
            _nbytes("memory\nper rank", "memory"),
            *_REACHED,
        ],
    ),
    (
        "processes",
        "Processes of this machine, and the simulation of them",
        "from the first process to the last",
        [
            _RANKS,
            ("over", lambda case: str(case.facts["transport"])),
            _time("start"),
            _simulated("simulated\nstart"),
            _time("first\nbarrier", "first"),
            _simulated("simulated\nfirst barrier", "first"),
            _time("later\nbarrier", "later"),
            _simulated("simulated\nlater barrier", "later"),
        ],
    ),
    (
        "processes",
        "Start and first barrier of processes",
        "gloo with torch's TCPStore, or with a file",
        [
            _RANKS,
            ("over", lambda case: str(case.facts["transport"])),
            *[_time(who, "both", who) for who in (_WHO, *_GLOO)],
            *_REACHED,
        ],
    ),
    (
        "simulation",
        "Simulated worlds",
        f"slow: one rank needs {SLOWNESS:g} times the processor time",
        [
            _RANKS,
            _simulated("start"),
            _simulated("slow\nstart", "slow_start"),
            _nbytes("sent", "sent", _SIMULATED),
            _nbytes("read", "most_read", _SIMULATED),
            _simulated("first\nbarrier", "first"),
            _simulated("later\nbarrier", "later"),
            _simulated("slow\nbarrier", "slow_barrier"),
        ],
    ),
    (
        "simulation",
        "Faults of simulated worlds",
        "until all others know of it + until they have the new group; a rack has 32 hosts, or a quarter; first: that of "
        f"rank 0; store back: from the return of a store after {DOWNTIME:g} s until it serves all ranks; busy: its "
        "processor time of these",
        [
            _RANKS,
            _loss("rank killed", "killed"),
            _loss("rank stopped", "stopped"),
            _loss("rack killed", "rack"),
            _loss("rack silent", "cut"),
            _loss("first silent", "first_cut"),
            _simulated("store back", "back"),
            _simulated("busy", "busy"),
        ],
    ),
]
