"""The report as a Markdown page: a digest of it, which the README shows too, what it means, and all of its tables.

Called by `asyncdist.cli.bench`.
"""

from __future__ import annotations

from asyncdist.bench.plan import BenchPlan
from asyncdist.bench.report.table import (
    TRAINING_HEADINGS,
    Column,
    about_run,
    contender_label,
    duration,
    faster,
    grids,
    markdown_of,
    median,
    size,
    times,
    training_cells,
    training_title,
)
from asyncdist.bench.result import Report, ResultRow, Training

_COMPARED_AT = (64 << 10, 1 << 20, 25 << 20)
"""Bytes at which the digest compares collectives, beside the fewest that were measured."""
_STEPS_OF = {"torch": "over asyncdist", "gloo": "over gloo", "alone": "the model alone, on one rank"}


def markdown(report: Report) -> str:
    """Return the whole report as a Markdown page; ``bench.png`` lies beside it."""
    parts = ["# Benchmark", about_run(report), *digest(report), "## What was measured", *_legend(report.plan)]
    said = None
    for collective, shows, headings, rows in grids(report):
        if collective != said:
            parts.append(f"## {collective}, {report.plan.ranks} ranks")
        said = collective
        parts += [*([f"{shows[0].upper()}{shows[1:]}:"] if shows else []), markdown_of(headings, rows)]
    for each in report.training:
        parts += [f"## Training step: {training_title(each)}", markdown_of(TRAINING_HEADINGS, training_cells(each))]
    if any(row.nbytes for row in report.rows):
        parts.append("![time against size](bench.png)")
    return "\n\n".join(parts) + "\n"


def _legend(plan: BenchPlan) -> list[str]:
    """Return what a reader must know about the columns: a paragraph on the run, and a list of the contenders."""
    meanings = {
        "asyncdist": f"our blocking face over the transport `{plan.transports[0]}`, on ordinary tensors",
        "registered": "the same on tensors made by `asyncdist.empty(…, shared=True)`, which every rank sees",
        "torch": f"the calls of `torch.distributed` on our back end, over the transport `{plan.transports[0]}`",
        "idle": "the calls of `torch.distributed` on a back end that does nothing: torch's own share of what *through "
        "torch* takes above *direct*",
        **{name: f"our blocking face over the transport `{name}`" for name in plan.transports[1:]},
        "awaited": "our async face on uvloop",
        "gloo": "`torch.distributed` over gloo",
        "mpi": "the buffer-based calls of mpi4py, in place where MPI can",
        "raw": "the same traffic over plain non-blocking TCP sockets, additions included",
        "copy": "one core's copy of as many bytes from one ordinary tensor to another while the other ranks sleep: "
        "the physical limit",
    }
    return [
        "Contenders took turns in one run, in the same processes; every result was checked. Times are of single calls on "
        "rank 0, back to back below 8 MiB and started by all ranks at the same instant above (rooted collectives "
        "always). *vs*: how many times faster ours is. *× copy*: how many memory copies ours takes. *− direct*: what a "
        "call takes above the same one of our blocking face. *algbw*: bytes over our median; *busbw*: what that puts on "
        "the busiest link (all_reduce: × 2(n−1)/n).",
        "\n".join(f"- *{contender_label(contender)}*: {meanings[contender]}." for contender in plan.contenders),
    ]


# -- the digest -------------------------------------------------------------------------------------


def digest(report: Report) -> list[str]:
    """Return a few tables: the first collective by size, the others beside gloo, and training steps of stock PyTorch."""
    rows_of: dict[str, list[ResultRow]] = {}
    for row in report.rows:
        if row.nbytes:
            rows_of.setdefault(row.collective, []).append(row)
    parts: list[str] = []
    if rows_of:
        first = next(iter(rows_of))
        columns, rows = _first_columns(rows_of[first][0]), rows_of.pop(first)
        cells = [[text(row) for _, text in columns] for row in rows]
        parts += [f"`{first}`, median time of a call:", markdown_of([heading for heading, _ in columns], cells)]
    others = [[f"`{name}`", *_beside_gloo(rows)] for name, rows in rows_of.items() if "gloo" in rows[0].timings]
    if others:
        parts.append("How many times faster than gloo others are, with registered tensors in brackets:")
        parts.append(markdown_of(["times gloo", "fewest bytes", *map(size, _COMPARED_AT)], others))
    steps = [_step(training) for training in report.training if set(_STEPS_OF) <= training.timings.keys()]
    if steps:
        parts.append(markdown_of(["a whole training step", *_STEPS_OF.values()], steps))
    return parts


def _first_columns(row: ResultRow) -> list[Column]:
    there = row.timings.keys()
    columns: list[Column] = [("size", lambda row: size(row.nbytes)), ("ours", median("asyncdist"))]
    columns += [
        (contender_label(who), median(who))
        for who in ("awaited", "registered", "torch", "gloo", "mpi", "copy")
        if who in there
    ]
    for who, rival in (("asyncdist", "gloo"), ("registered", "gloo"), ("registered", "mpi"), ("torch", "gloo")):
        if {who, rival} <= there:
            ours = "ours" if who == "asyncdist" else contender_label(who)
            columns.append((f"{ours} vs {contender_label(rival)}", faster(rival, who)))
    return columns


def _beside_gloo(rows: list[ResultRow]) -> list[str]:
    by_size = {row.nbytes: row for row in rows}
    cells = []
    for row in (rows[0], *map(by_size.get, _COMPARED_AT)):
        text = times(row.times_faster_than("gloo")) if row is not None else "—"
        if row is not None and "registered" in row.timings:
            text += f" ({times(row.times_faster_than('gloo', 'registered'))})"
        cells.append(text)
    return cells


def _step(training: Training) -> list[str]:
    return [f"stock {training_title(training)}", *(duration(training.timings[who].median) for who in _STEPS_OF)]
