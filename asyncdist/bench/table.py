"""The report as a table: cells are made once, and shown by rich in a terminal or as Markdown in a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncdist.bench.result import Report, Row

if TYPE_CHECKING:
    from rich.table import Table

_TITLES = {"alone": "alone", "asyncdist": "asyncdist DDP", "gloo": "stock DDP over gloo"}


def size(nbytes: int) -> str:
    """Write bytes as people do: ``64 KiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % (unit // 2) == 0:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def duration(seconds: float) -> str:
    """Write a time with three digits: ``14.2 µs``, ``3.06 ms``."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{_three(seconds / unit)} {name}"
    return f"{_three(seconds * 1e6)} µs"


def bandwidth(nbytes_per_second: float) -> str:
    """Write a bandwidth in GB/s (10^9), or MB/s below a tenth."""
    if nbytes_per_second >= 1e8:
        return f"{_three(nbytes_per_second / 1e9)} GB/s"
    return f"{_three(nbytes_per_second / 1e6)} MB/s"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def headings(report: Report) -> list[str]:
    """Return the columns that a report has."""
    named = ["size", "median", "p99", "algbw", "busbw"]
    if "gloo" in report.plan.against:
        named += ["gloo", "vs gloo"]
    if "raw" in report.plan.against:
        named += ["raw sockets", "of raw"]
    if report.plan.awaited:
        named += ["awaited", "await − block"]
    return named


def cells(row: Row, report: Report) -> list[str]:
    """Return a row's texts, in the order of `headings`."""
    sized = row.nbytes > 0
    made = [
        size(row.nbytes) if sized else "—",
        duration(row.ours.median),
        duration(row.ours.p99),
        bandwidth(row.algorithm_bandwidth) if sized else "—",
        bandwidth(row.bus_bandwidth) if sized else "—",
    ]
    if (faster := row.times_faster_than("gloo")) is not None:
        made += [duration(row.timings["gloo"].median), f"{_three(faster)}×"]
    if (share := row.times_faster_than("raw")) is not None:
        made += [duration(row.timings["raw"].median), f"{share:.0%}"]
    if row.awaiting is not None:
        made += [duration(row.timings["awaited"].median), f"{row.awaiting * 1e6:+.1f} µs"]
    return made


def training_cells(report: Report) -> list[list[str]]:
    """Return a line a contender: who, median, p99, and how much faster ours is."""
    ours = report.training["asyncdist"].median
    return [
        [_TITLES[name], duration(timing.median), duration(timing.p99), f"{_three(timing.median / ours)}×"]
        for name, timing in report.training.items()
    ]


_TRAINING_HEADINGS = ["training step", "median", "p99", "of ours"]


def about(report: Report) -> str:
    """Return one line on the machine and what ran on it."""
    machine = report.machine
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, "
        f"load {machine['load']} before the run; Python {machine['python']}, "
        f"torch {machine['torch']}, asyncdist {machine['asyncdist']}; {report.plan.ranks} ranks, one thread each, "
        f"{'each on its own core, ' if report.plan.pin else ''}transport {report.plan.transport}, float32"
    )


def training_title(report: Report) -> str:
    """Say what was trained."""
    return f"SGD, batch 16 a rank, {report.parameters / 1e6:.1f} M parameters"


def tables(report: Report) -> list[Table]:
    """Return rich tables: one a collective, and one for training."""
    made = []
    for collective in dict.fromkeys(row.collective for row in report.rows):
        rows = [cells(row, report) for row in report.rows if row.collective == collective]
        made.append(_table(f"{collective}, {report.plan.ranks} ranks", headings(report), rows))
    if report.training:
        made.append(_table(training_title(report), _TRAINING_HEADINGS, training_cells(report)))
    return made


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for position, name in enumerate(columns):
        emphasis = "bold" if name in ("median", "vs gloo", "of raw", "of ours") else ""
        table.add_column(name, justify="left" if position == 0 else "right", style=emphasis, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def markdown(report: Report) -> str:
    """Return the whole report as a Markdown page; ``bench.png`` lies beside it."""
    parts = [
        "# Benchmark",
        about(report),
        "Contenders took turns in one run, in the same processes; times are of single calls on rank 0, back to back "
        "below 8 MiB and started by all ranks at the same instant above (rooted collectives always). *algbw* is bytes "
        "over the median, *busbw* what that puts on the busiest link "
        "(all_reduce: × 2(n−1)/n). *raw sockets*: the same traffic over plain non-blocking sockets between the same "
        "processes, additions included; *of raw* is how much of that speed is reached.",
    ]
    for collective in dict.fromkeys(row.collective for row in report.rows):
        rows = [cells(row, report) for row in report.rows if row.collective == collective]
        parts += [f"## {collective}", _markdown(headings(report), rows)]
    if report.training:
        parts += [f"## Training step: {training_title(report)}", _markdown(_TRAINING_HEADINGS, training_cells(report))]
    if any(row.nbytes for row in report.rows):
        parts.append("![time against size](bench.png)")
    return "\n\n".join(parts) + "\n"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, [":--", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
