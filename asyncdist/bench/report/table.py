"""The report as tables: cells are made once, and shown by rich in a terminal or as Markdown in a file (`page`).

Used by `asyncdist.cli` and the other reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from asyncdist.bench.plan import RIVALS, BenchPlan
from asyncdist.bench.result import Report, ResultRow, Training

if TYPE_CHECKING:
    from rich.table import Table

_EMPHASISED = frozenset(("asyncdist", "median", "vs gloo"))
_STEPS = {"ddp": "DDP", "fsdp2": "FSDP2", "tensor_parallel": "tensor parallel"}


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


def times(ratio: float | None) -> str:
    """Write a ratio with three digits: ``4.83×``; a dash for none."""
    return "—" if ratio is None else f"{_three(ratio)}×"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


Column = tuple[str, Callable[[ResultRow], str]]
"""A heading, and what makes a row's text."""

_NAMES = {
    "torch": "through torch",
    "idle": "torch, idle",
    "mpi": "Open MPI",
    "raw": "raw sockets",
    "copy": "memory copy",
}
_ONE_TABLE = 9  # more columns than these are divided over two tables: times, and what follows from them


def contender_label(contender: str) -> str:
    """Return what a contender is called in tables."""
    return _NAMES.get(contender, contender)


def _times(plan: BenchPlan) -> list[Column]:
    """Return a column of medians for each contender, with our worst beside ours."""
    columns = [(contender_label(contender), median(contender)) for contender in plan.contenders if contender != "idle"]
    columns.insert(1, ("p99", lambda row: duration(row.ours.p99)))
    return columns


def _ratios(plan: BenchPlan) -> list[Column]:
    """Return the columns of what follows from the times; a heading may have two lines."""
    columns: list[Column] = []
    for who in ("asyncdist", *(("registered",) if plan.registered else ()), *plan.through):
        prefix = "" if who == "asyncdist" else f"{contender_label(who)}\n"
        columns += [(f"{prefix}vs {rival}", faster(rival, who)) for rival in plan.contenders if rival in RIVALS]
        columns.append((f"{prefix}× copy", _copies(who)))
    columns += [(f"{contender_label(who)}\n− direct", _above_blocking(who)) for who in plan.through]
    if "idle" in plan.contenders:
        columns.append((contender_label("idle"), median("idle")))
    if plan.awaited:
        columns.append(("await − block", _above_blocking("awaited")))
    columns.append(("algbw", lambda row: bandwidth(row.algorithm_bandwidth) if row.nbytes else "—"))
    columns.append(("busbw", lambda row: bandwidth(row.bus_bandwidth) if row.nbytes else "—"))
    return columns


def median(contender: str) -> Callable[[ResultRow], str]:
    return lambda row: duration(row.timings[contender].median) if contender in row.timings else "—"


def faster(rival: str, who: str) -> Callable[[ResultRow], str]:
    return lambda row: times(row.times_faster_than(rival, who))


def _copies(who: str) -> Callable[[ResultRow], str]:
    return lambda row: times(row.copies(who))


def _above_blocking(who: str) -> Callable[[ResultRow], str]:
    def text(row: ResultRow) -> str:
        above = row.above_blocking(who)
        return "—" if above is None else f"{above * 1e6:+.1f} µs"

    return text


def sections(plan: BenchPlan) -> list[tuple[str, list[Column]]]:
    """Return the tables that each collective gets: what a table's title adds to the collective, and its columns."""
    size_of: Column = ("size", lambda row: size(row.nbytes) if row.nbytes else "—")
    times_, ratios = _times(plan), _ratios(plan)
    if 1 + len(times_) + len(ratios) <= _ONE_TABLE:
        return [("", [size_of, *times_, *ratios])]
    return [("median time of a call", [size_of, *times_]), ("ratios and bandwidth", [size_of, *ratios])]


def grids(report: Report) -> Iterator[tuple[str, str, list[str], list[list[str]]]]:
    """Yield every table of collectives: the collective, what it shows, headings, and the texts by row."""
    for collective in dict.fromkeys(row.collective for row in report.rows):
        rows = [row for row in report.rows if row.collective == collective]
        for shows, columns in sections(report.plan):
            yield collective, shows, [name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows]


TRAINING_HEADINGS = ["training step", "median", "p99", "vs gloo", "× alone"]


def training_cells(training: Training) -> list[list[str]]:
    """Return a line a contender: who, median, p99, how many times faster than gloo, how many steps of the model alone."""
    who = {
        "asyncdist": "our DistributedDataParallel",
        "torch": f"stock {_STEPS[training.step]} on asyncdist",
        "gloo": f"stock {_STEPS[training.step]} on gloo",
        "alone": "the whole model on one rank",
    }
    return [
        [
            who[name],
            duration(timing.median),
            duration(timing.p99),
            times(training.times_faster_than_gloo(name)),
            times(training.times_alone(name)),
        ]
        for name, timing in training.timings.items()
    ]


def about_run(report: Report) -> str:
    """Return one line on the machine and what ran on it."""
    machine = report.machine
    mpi = f", {machine['mpi']}" if "mpi" in machine else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, "
        f"load {machine['load']} before the run; Python {machine['python']}, "
        f"torch {machine['torch']}, asyncdist {machine['asyncdist']}{mpi}; {report.plan.ranks} ranks, one thread each, "
        f"{'each on its own core, ' if report.plan.pin else ''}transport {', '.join(report.plan.transports)}; float32"
    )


def training_title(training: Training) -> str:
    """Say what was trained."""
    batch = {
        "ddp": "an MLP, 16 pictures a rank",
        "fsdp2": "a transformer, 2 sequences of 64 a rank",
        "tensor_parallel": "a transformer, 2 sequences of 64",
    }
    return f"{_STEPS[training.step]}, {batch[training.step]}, SGD, {training.parameters / 1e6:.1f} M parameters"


def tables(report: Report) -> list[Table]:
    """Return rich tables: one a collective, and one a training step."""
    made = [
        grid(f"{collective}, {report.plan.ranks} ranks{shows and ': '}{shows}", headings, rows)
        for collective, shows, headings, rows in grids(report)
    ]
    made += [grid(training_title(each), TRAINING_HEADINGS, training_cells(each)) for each in report.training]
    return made


def grid(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for position, name in enumerate(columns):
        emphasis = "bold" if name in _EMPHASISED or name.startswith("registered") or "vs " in name else ""
        table.add_column(name, justify="left" if position == 0 else "right", style=emphasis, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [[name.replace("\n", " ") for name in columns], [":--", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
