"""Collectives and messages on CUDA tensors, over every usable device back end, and over torch's gloo and NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from asyncdist.cli.option_types import ListOf
from asyncdist.cli.page import Column, Grid, bandwidth, duration, size, times
from asyncdist.config import whole_number
from asyncdist.errors import UnsupportedError
from benchmarks.benchmark import Benchmark, option
from benchmarks.grid import Case, GridReport, Line, lines
from benchmarks.laboratory import LIMIT, hear_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLLECTIVES = ("all_reduce", "broadcast", "send")
"""What is measured. "send" forwards rank 0's tensor from each rank to the next."""
_LABELS = {"asyncdist": "asyncdist (auto)", "copy": "on the device alone"}
_SIZES = ListOf("sizes such as 4K,25M", whole_number)


@dataclass(frozen=True)
class DevicesPlan:
    """What to measure."""

    parts: tuple[str, ...] = COLLECTIVES
    ranks: int = option(2, "Number of ranks.", click.IntRange(1, 64))
    sizes: tuple[int, ...] = option("4K,64K,1M,25M,100M,1G", "Tensor sizes in bytes.", _SIZES)
    repeat: int | None = option(None, "Number of timed calls of each contender.  [default: 200 to 12, by size]")
    device: str = option("cuda", "cpu: CPU tensors, to check the benchmark itself.", click.Choice(("cuda", "cpu")))


class DevicesBenchmark(Benchmark[DevicesPlan]):
    """Measure CUDA tensors over every usable device back end, and over torch's gloo and NCCL.

    PART is all_reduce, broadcast, or send (messages from each rank to the next); the default is all of them. Ranks that
    outnumber the devices share them. With one rank, asyncdist's NCCL is compared with torch's.

    \b
    python -m benchmarks devices --output docs/bench
    python -m benchmarks devices all_reduce --ranks 1
    """

    title = "Benchmark on CUDA devices"
    plan_type = DevicesPlan
    program = Path(__file__).with_name("ranks.py")
    preload = ("torch", "torch.distributed", "asyncdist.sync", "asyncdist.cli.bench.measure")
    parts = COLLECTIVES
    has_picture = True

    def measure(self) -> Iterator[Case]:
        plan = self.plan
        if plan.device == "cuda":
            from asyncdist.kernel.transport.device_streams import cuda_missing

            if (missing := cuda_missing()) is not None:
                raise UnsupportedError(f"nothing was measured, as there is no CUDA device: {missing}")
        cases = [(part, nbytes) for part in plan.parts if part != "send" or plan.ranks > 1 for nbytes in plan.sizes]
        self.laboratory.progress("opening the back ends")
        where = self.laboratory.world()
        ranks = [
            self.laboratory.start("time_calls", where, rank, plan.ranks, plan.device, cases, plan.repeat)
            for rank in range(plan.ranks)
        ]
        (device, absent), *_ = hear_all(ranks, LIMIT)
        for part, nbytes in cases:
            self.laboratory.progress(f"{part}, {size(nbytes)}")
            (nbytes, timings, ticks), *_ = hear_all(ranks, LIMIT)
            facts = {"ranks": plan.ranks, "nbytes": nbytes, "device": device, "absent": absent, "latest_ticks": ticks}
            case = Case(part, f"{part}, {size(nbytes)}", facts=facts)
            for who, timing in timings.items():
                case.add(who, timing.median, p99=timing.p99, returned=timing.returned)
            yield case
        self.laboratory.end(ranks)

    @classmethod
    def file_stem(cls, name: str, plan: DevicesPlan) -> str:
        return f"device-{plan.ranks}"

    @classmethod
    def tables(cls, report: GridReport[DevicesPlan]) -> tuple[list[str], list[Grid]]:
        facts = report.cases[0].facts
        absent = [f"{name} is not measured: {reason}" for name, reason in facts["absent"].items()]
        grids = [
            Grid.of(_title(part, report.plan), _COLUMNS, lines(report.of(part)), group_rows=True)
            for part in dict.fromkeys(case.part for case in report.cases)
        ]
        return [_about(report), *absent], grids

    @classmethod
    def picture(cls, report: GridReport[DevicesPlan]) -> Figure:
        from asyncdist.cli.bench.plot import LINES, Panel, figure_of

        looks = {
            "copy": ("one process alone (the limit)", "#111111", ":", 1.6, ""),
            "gloo": LINES["gloo"],
            "torch's nccl": ("torch's NCCL", "#e69f00", "-", 1.8, "P"),
            "staged": ("asyncdist, through the host", "#9aa0a6", "--", 1.4, "x"),
            "awaited": LINES["awaited"],
            "nccl": ("asyncdist over NCCL", "#cc79a7", "-", 1.8, "D"),
            "cuda_ipc": ("asyncdist over mapped memory", "#009e73", "-", 1.8, "v"),
            "asyncdist": LINES["asyncdist"],
        }
        panels = []
        for part in dict.fromkeys(case.part for case in report.cases):
            points: dict[str, list[tuple[int, float, float]]] = {}
            for case, who in lines(report.of(part)):
                point = case.facts["nbytes"], case.median(who), case.median(who, "p99")
                points.setdefault(who, []).append(point)
            panels.append(Panel(_title(part, report.plan), points))
        return figure_of(panels, looks, _about(report))


def _title(part: str, plan: DevicesPlan) -> str:
    return f"{part}, {plan.ranks} rank{'s' * (plan.ranks > 1)}, {plan.device.upper()} tensors"


def _about(report: GridReport[DevicesPlan]) -> str:
    return f"{report.cases[0].facts['device']}; " + report.about(f"{report.plan.ranks} ranks, one thread each; float32")


def _tick(line: Line) -> str:
    tick = line[0].facts["latest_ticks"].get(line[1])
    return "—" if tick is None else duration(tick)


_COLUMNS: list[Column[Line]] = [
    ("size", lambda line: size(line[0].facts["nbytes"])),
    ("who", lambda line: _LABELS.get(line[1], line[1])),
    ("data is there", lambda line: duration(line[0].median(line[1]))),
    ("p99", lambda line: duration(line[0].median(line[1], "p99"))),
    ("returns", lambda line: duration(line[0].median(line[1], "returned"))),
    ("bandwidth", lambda line: bandwidth(line[0].facts["nbytes"] / line[0].median(line[1]))),
    ("vs gloo", lambda line: times(line[0].times_better(line[1], "gloo") if line[1] != "gloo" else None)),
    ("× device alone", lambda line: times(line[0].times_better("copy", line[1]) if line[1] != "copy" else None)),
    ("latest tick", _tick),
]
