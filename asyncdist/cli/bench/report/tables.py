"""The page of ``asyncdist bench``: a digest, which the README also shows, and tables of collectives and training steps.

Called by `asyncdist.cli.bench`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncdist.cli.bench.plan import RIVALS, BenchPlan
from asyncdist.cli.bench.report.hosts_table import (
    EXPLANATION,
    Cell,
    Column,
    about_hosts,
    fewer_hosts_grids,
    link_columns,
)
from asyncdist.cli.bench.result import Report, ResultRow, by_name
from asyncdist.cli.page import Grid, Page, about_machine, bandwidth, duration, size, times

"""A heading, and a function that returns the text of a row."""

_LABELS = {
    "torch": "through torch",
    "idle": "torch, idle",
    "mpi": "Open MPI",
    "raw": "raw sockets",
    "copy": "memory copy",
}
_MEANINGS = {
    "asyncdist": "the blocking API over the transport `{transport}`, on ordinary tensors",
    "registered": "the same on tensors made by `asyncdist.empty(…, shared=True)`, which every rank maps",
    "torch": "the functions of `torch.distributed` on the asyncdist back end, over the transport `{transport}`",
    "idle": "the functions of `torch.distributed` on a back end that does nothing: torch's own share of what *through "
    "torch* takes longer than *asyncdist*",
    "awaited": "the awaited API on uvloop",
    "gloo": "`torch.distributed` over gloo",
    "mpi": "the buffer-based calls of mpi4py, in place where MPI allows it",
    "raw": "the same traffic over plain non-blocking TCP sockets, with the additions",
    "copy": "a copy of as many bytes from one ordinary tensor to another by one core while the other ranks sleep: "
    "the physical limit",
}
_EXPLANATION = (
    "Contenders took turns in one run, in the same processes, and every result was checked. Times are of single calls on "
    "rank 0: back to back below 8 MiB; above, and for rooted collectives, all ranks start each call at the same instant. "
    "*vs*: how many times faster asyncdist is. *× copy*: the time in memory copies. *− direct*: how much longer a call "
    "takes than with asyncdist's blocking API. *algbw*: bytes over the median time; *busbw*: the resulting load of the "
    "busiest link (all_reduce: × 2(n−1)/n)."
)
_MOST_COLUMNS = 9  # more columns are divided between two tables: times, and ratios with bandwidths

_STEPS = {"ddp": "DDP", "fsdp2": "FSDP2", "tensor_parallel": "tensor parallel"}
_BATCHES = {
    "ddp": "an MLP, 16 pictures per rank",
    "fsdp2": "a transformer, 2 sequences of 64 per rank",
    "tensor_parallel": "a transformer, 2 sequences of 64",
}
_DIGEST_SIZES = (64 << 10, 1 << 20, 25 << 20)
"""Sizes at which the digest compares collectives, in addition to the smallest measured size."""
_DIGEST_STEPS = {"torch": "over asyncdist", "gloo": "over gloo", "alone": "the model alone, on one rank"}


def bench_page(report: Report) -> Page:
    """Return the page of a run on the CPU."""
    collectives = list(_collective_grids(report))
    training = [_training_grid(row) for row in report.of_kind("training")]
    has_sizes = any(row.nbytes for row in report.of_kind("rows"))
    explained = [_EXPLANATION, "\n".join(_meaning(contender, report.plan) for contender in report.plan.contenders)]
    if report.plan.hosts > 1:
        explained.insert(1, EXPLANATION)
    return Page(
        "Benchmark" if report.plan.hosts == 1 else "Benchmark between hosts",
        [about_run(report)],
        [*collectives, *fewer_hosts_grids(report), *training],
        [*digest(report), "## What was measured", *explained],
        picture=f"{'bench' if report.plan.hosts == 1 else 'hosts'}.png" if has_sizes else "",
    )


def about_run(report: Report) -> str:
    """Return one line about the machine and the run."""
    plan = report.plan
    return (
        f"{about_machine(report.machine)}; {_placed(plan)}, one thread each, "
        f"{_beside(plan)}transport {', '.join(plan.transports)}; float32"
    )


def _placed(plan: BenchPlan) -> str:
    return about_hosts(plan) if plan.hosts > 1 else f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"


def _beside(plan: BenchPlan) -> str:
    return f"beside {plan.busy} busy process{'es' * (plan.busy > 1)}, " if plan.busy else ""


def contender_label(contender: str) -> str:
    """Return the name of a contender in tables."""
    return _LABELS.get(contender, contender)


def _meaning(contender: str, plan: BenchPlan) -> str:
    further = f"the blocking API over the transport `{contender}`"
    meaning = _MEANINGS.get(contender, further).format(transport=plan.transports[0])
    return f"- *{contender_label(contender)}*: {meaning}."


# -- collectives ------------------------------------------------------------------------------------


def _collective_grids(report: Report) -> Iterator[Grid]:
    for collective, rows in by_name(report.of_kind("rows")).items():
        for caption, columns in sections(report.plan):
            cells = [[cell(row) for _, cell in columns] for row in rows]
            yield Grid(f"{collective}, {_placed(report.plan)}", [name for name, _ in columns], cells, caption)


def sections(plan: BenchPlan) -> list[tuple[str, list[Column]]]:
    """Return the tables of each collective: the caption and the columns."""
    size_of: Column = ("size", lambda row: size(row.nbytes) if row.nbytes else "—")
    medians, ratios = _medians(plan), _ratios(plan)
    if 1 + len(medians) + len(ratios) <= _MOST_COLUMNS:
        return [("", [size_of, *medians, *ratios])]
    return [("median time of a call", [size_of, *medians]), ("ratios and bandwidth", [size_of, *ratios])]


def _medians(plan: BenchPlan) -> list[Column]:
    columns = [(contender_label(who), _median(who)) for who in plan.contenders if who != "idle"]
    columns.insert(1, ("p99", lambda row: duration(row.blocking.p99)))
    return columns


def _ratios(plan: BenchPlan) -> list[Column]:
    columns: list[Column] = []
    for who in ("asyncdist", *(("registered",) if plan.registered else ()), *plan.through):
        prefix = "" if who == "asyncdist" else f"{contender_label(who)}\n"
        columns += [(f"{prefix}vs {rival}", _ratio(rival, who)) for rival in plan.contenders if rival in RIVALS]
        if "copy" in plan.contenders:
            columns.append((f"{prefix}× copy", _ratio(who, "copy")))
    columns += [(f"{contender_label(who)}\n− direct", _above_blocking(who)) for who in plan.through]
    if "idle" in plan.contenders:
        columns.append((contender_label("idle"), _median("idle")))
    if plan.awaited:
        columns.append(("await − block", _above_blocking("awaited")))
    if plan.hosts > 1:
        return columns + link_columns(plan)
    columns.append(("algbw", lambda row: bandwidth(row.algorithm_bandwidth) if row.nbytes else "—"))
    columns.append(("busbw", lambda row: bandwidth(row.bus_bandwidth) if row.nbytes else "—"))
    return columns


def _median(contender: str) -> Cell:
    return lambda row: duration(row.timings[contender].median) if contender in row.timings else "—"


def _ratio(contender: str, to: str) -> Cell:
    return lambda row: times(row.ratio(contender, to))


def _above_blocking(contender: str) -> Cell:
    def text(row: ResultRow) -> str:
        above = row.above_blocking(contender)
        return "—" if above is None else f"{above * 1e6:+.1f} µs"

    return text


# -- training steps ---------------------------------------------------------------------------------


def _training_grid(row: ResultRow) -> Grid:
    step = _STEPS[row.name]
    who = {
        "asyncdist": "asyncdist's DistributedDataParallel",
        "torch": f"stock {step} on asyncdist",
        "gloo": f"stock {step} on gloo",
        "alone": "the whole model on one rank",
    }
    cells = [
        [
            who[name],
            duration(timing.median),
            duration(timing.p99),
            times(row.ratio("gloo", name)),
            times(row.ratio(name, "alone")),
        ]
        for name, timing in row.timings.items()
    ]
    columns = ["training step", "median", "p99", "vs gloo", "× alone"]
    return Grid(f"Training step: {_training_title(row)}", columns, cells)


def _training_title(row: ResultRow) -> str:
    return f"{_STEPS[row.name]}, {_BATCHES[row.name]}, SGD, {row.parameters / 1e6:.1f} M parameters"


# -- the digest -------------------------------------------------------------------------------------


def digest(report: Report) -> list[str]:
    """Return tables of the first collective, of the others relative to gloo, and of stock PyTorch's training steps."""
    collectives = by_name(row for row in report.of_kind("rows") if row.nbytes)
    parts: list[str] = []
    if collectives:
        first = next(iter(collectives))
        rows = collectives.pop(first)
        columns = _digest_columns(rows[0])
        cells = [[text(row) for _, text in columns] for row in rows]
        parts += [f"`{first}`, median time of a call:", Grid("", [name for name, _ in columns], cells).markdown()]
    others = [[f"`{name}`", *_speedups(rows)] for name, rows in collectives.items() if "gloo" in rows[0].timings]
    if others:
        parts.append("The other collectives as multiples of gloo's speed, with registered tensors in brackets:")
        parts.append(Grid("", ["times gloo", "smallest size", *map(size, _DIGEST_SIZES)], others).markdown())
    steps = [
        [f"stock {_training_title(row)}", *(duration(row.timings[who].median) for who in _DIGEST_STEPS)]
        for row in report.of_kind("training")
        if _DIGEST_STEPS.keys() <= row.timings.keys()
    ]
    if steps:
        parts.append(Grid("", ["a whole training step", *_DIGEST_STEPS.values()], steps).markdown())
    return parts


def _digest_columns(row: ResultRow) -> list[Column]:
    measured = row.timings.keys()
    medians = ("asyncdist", "awaited", "registered", "torch", "gloo", "mpi", "copy")
    columns: list[Column] = [("size", lambda row: size(row.nbytes))]
    columns += [(contender_label(who), _median(who)) for who in medians if who in measured]
    for who, rival in (("asyncdist", "gloo"), ("registered", "gloo"), ("registered", "mpi"), ("torch", "gloo")):
        if {who, rival} <= measured:
            columns.append((f"{contender_label(who)} vs {contender_label(rival)}", _ratio(rival, who)))
    return columns


def _speedups(rows: Sequence[ResultRow]) -> list[str]:
    by_size = {row.nbytes: row for row in rows}
    cells = []
    for row in (rows[0], *map(by_size.get, _DIGEST_SIZES)):
        text = times(row.ratio("gloo", "asyncdist")) if row is not None else "—"
        if row is not None and "registered" in row.timings:
            text += f" ({times(row.ratio('gloo', 'registered'))})"
        cells.append(text)
    return cells
