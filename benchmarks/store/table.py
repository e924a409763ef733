"""The results of ``python -m benchmarks store`` as a page with one table, which has a row per case."""

from __future__ import annotations

from asyncdist.cli.page import Grid, Page, about_machine
from benchmarks.store.benchmark import Case, StoreReport

_COLUMNS = ("case", "asyncdist", "torch", "unit", "better by", "bar", "reached")
"""The bar of a case is the least factor in "better by", or the largest accepted figure if torch has no such figure."""


def store_page(report: StoreReport) -> Page:
    """Return the page of a run, with its cases in the order in which they were measured."""
    plan = report.plan
    about = (
        f"{about_machine(report.machine)}; medians of {plan.rounds} rounds of {plan.seconds:g} s in which all contenders "
        f"took turns ({plan.crowd_rounds} rounds of {plan.crowd:,} clients and of the restart)"
    )
    return Page("The store", [about], [Grid("", _COLUMNS, [_cells(case) for case in report.cases])])


def _cells(case: Case) -> tuple[str, ...]:
    return (
        case.name,
        _figure(case.ours),
        "—" if case.torchs is None else _figure(case.torchs),
        case.unit,
        "—" if case.ratio is None else f"{case.ratio:.2f}×",
        f"≤ {case.bar:g}" if case.ratio is None else f"≥ {case.bar:g}×",
        "yes" if case.reached else "no",
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
