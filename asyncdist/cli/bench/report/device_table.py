"""The page of ``asyncdist bench --device cuda``. `asyncdist.cli.bench` calls it. It does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from asyncdist.cli.bench.report.tables import about_run
from asyncdist.cli.bench.result import Report, ResultRow, by_name
from asyncdist.cli.page import Grid, Page, bandwidth, duration, size, times

_LABELS = {"asyncdist": "asyncdist (auto)", "copy": "on the device alone"}
_COLUMNS = (
    "size",
    "who",
    "data is there",
    "p99",
    "returns",
    "bandwidth",
    "vs gloo",
    "× device alone",
    "latest tick",
)


def device_page(report: Report) -> Page:
    """Return the page of a run on devices."""
    rows = report.of_kind("device_rows")
    ranks = f"{report.plan.ranks} rank{'s' * (report.plan.ranks > 1)}"
    grids = [
        Grid(
            f"{name}, {ranks}, CUDA tensors", _COLUMNS, [line for row in found for line in _lines(row)], group_rows=True
        )
        for name, found in by_name(rows).items()
    ]
    absent = {name: reason for row in rows for name, reason in row.absent.items()}
    notes = [f"{name} is not measured: {reason}" for name, reason in absent.items()]
    return Page("Benchmark on CUDA devices", [f"{rows[0].device}; {about_run(report)}", *notes], grids)


def _lines(row: ResultRow) -> Iterator[list[str]]:
    for place, (name, timing) in enumerate(row.timings.items()):
        tick = row.latest_ticks.get(name)
        yield [
            "" if place else size(row.nbytes),
            _LABELS.get(name, name),
            duration(timing.median),
            duration(timing.p99),
            duration(timing.returned),
            bandwidth(row.nbytes / timing.median),
            times(row.ratio("gloo", name) if name != "gloo" else None),
            times(row.ratio(name, "copy") if name != "copy" else None),
            "—" if tick is None else duration(tick),
        ]
