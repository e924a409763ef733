"""The figures of a run on devices as tables. No torch here. Called by `asyncdist.cli.bench`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from asyncdist.bench.report.table import bandwidth, duration, grid, markdown_of, size, times
from asyncdist.bench.result import DeviceRow, Report

if TYPE_CHECKING:
    from rich.table import Table

_NAMES = {"asyncdist": "asyncdist (auto)", "copy": "on the device alone"}


def _grids(report: Report) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield a title, headings and cells for each collective: one line a size and contender."""
    headings = [
        "size",
        "who",
        "data is there",
        "p99",
        "returns",
        "bandwidth",
        "vs gloo",
        "× device alone",
        "latest tick",
    ]
    for collective in dict.fromkeys(row.collective for row in report.device_rows):
        rows = [row for row in report.device_rows if row.collective == collective]
        title = f"{collective}, {report.plan.ranks} {'rank' if report.plan.ranks == 1 else 'ranks'}, CUDA tensors"
        yield title, headings, [line for row in rows for line in _lines(row)]


def _lines(row: DeviceRow) -> Iterator[list[str]]:
    for place, (name, timing) in enumerate(row.timings.items()):
        tick = row.ticks.get(name)
        yield [
            "" if place else size(row.nbytes),
            _NAMES.get(name, name),
            duration(timing.there.median),
            duration(timing.there.p99),
            duration(timing.returns.median),
            bandwidth(row.nbytes / timing.there.median),
            times(row.times_faster_than("gloo", name)),
            times(row.times_as_long_as("copy", name)),
            "—" if tick is None else duration(tick),
        ]


def notes(report: Report) -> list[str]:
    """Return a sentence for each one who does not compete."""
    absent = {name: reason for row in report.device_rows for name, reason in row.absent.items()}
    return [f"{name} does not compete: {reason}" for name, reason in absent.items()]


def device_tables(report: Report) -> list[Table]:
    """Return rich tables, one a collective."""
    return [grid(*each) for each in _grids(report)]


def device_markdown(report: Report, about: str) -> str:
    """Return the report as a Markdown page."""
    parts: list[str] = ["# Benchmark on CUDA devices", about, *notes(report)]
    for title, headings, cells in _grids(report):
        parts += [f"## {title}", markdown_of(headings, _whole(cells))]
    return "\n\n".join(parts) + "\n"


def _whole(cells: Sequence[Sequence[str]]) -> list[list[str]]:
    """Repeat the size in every line: a page has no lines that belong together."""
    written, last = [], ""
    for first, *others in cells:
        last = first or last
        written.append([last, *others])
    return written
