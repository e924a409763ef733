"""What `asyncdist bench store` found, as a table in a terminal or in Markdown.

Called by `asyncdist.cli.bench_store`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdist.bench.store.benchmark import Case, StoreReport

if TYPE_CHECKING:
    from rich.table import Table

_HEADINGS = ("case", "asyncdist", "torch", "unit", "better by", "bar", "reached")


def case_cells(case: Case) -> tuple[str, ...]:
    """Return a case's texts, one a column."""
    bar = f"≤ {case.bar:g}" if case.ratio is None else f"≥ {case.bar:g}×"
    return (
        case.name,
        _figure(case.ours),
        "—" if case.torchs is None else _figure(case.torchs),
        case.unit,
        "—" if case.ratio is None else f"{case.ratio:.2f}×",
        bar,
        "yes" if case.reached else "no",
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def about_store(report: StoreReport) -> str:
    """Return one line on the machine and the run."""
    machine, plan = report.machine, report.plan
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, load {machine['load']} before; "
        f"Python {machine['python']}, torch {machine['torch']}, uvloop {machine['uvloop']}; medians of "
        f"{plan.rounds} rounds of {plan.seconds:g} s in which all took turns ({plan.crowd_rounds} rounds of crowds)"
    )


def store_results_table(report: StoreReport) -> Table:
    """Return a rich table."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in _HEADINGS:
        made.add_column(heading, justify="left" if heading in ("case", "unit") else "right", no_wrap=True)
    for case in report.cases:
        made.add_row(*case_cells(case))
    return made


def store_markdown(report: StoreReport) -> str:
    """Return the report as a Markdown page."""
    lines = [_HEADINGS, (":--", "--:", "--:", ":--", "--:", "--:", ":--"), *map(case_cells, report.cases)]
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join(["# The store", about_store(report), rows]) + "\n"
