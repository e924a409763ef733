"""The results of ``python -m benchmarks rpc`` as a page."""

from __future__ import annotations

from asyncdist.cli.page import Grid, Page, about_machine, duration, times
from benchmarks.rpc.benchmark import CONTENDERS, RpcCase, RpcReport


def rpc_page(report: RpcReport) -> Page:
    """Return the page of a run, with its cases in the order in which they were measured."""
    plan = report.plan
    shown = [each for each in CONTENDERS if any(each in case.figures for case in report.cases)]
    columns = ("case", *[CONTENDERS[each] for each in shown], "vs torch RPC", "target")
    about = [
        f"{about_machine(report.machine)}; medians of {plan.rounds} rounds in which all contenders took turns",
        "the caller and the callee are Python processes; the target is that of asyncdist on one host",
        "idle processes of torch RPC take all of a core each, so they are stopped while the others take their turns",
    ]
    return Page("Remote calls", about, [Grid("", columns, [_cells(case, shown) for case in report.cases])])


def _cells(case: RpcCase, shown: list[str]) -> tuple[str, ...]:
    figures = [_figure(case, case.figures[each]) if each in case.figures else "—" for each in shown]
    bound = "≤" if case.unit == "s" else "≥"
    return case.name, *figures, times(_ratio(case)), f"{bound} {_figure(case, case.target)}"


def _ratio(case: RpcCase) -> float | None:
    if "torch" not in case.figures:
        return None
    ratio = case.figures["torch"] / case.figures["unix"]
    return ratio if case.unit == "s" else 1 / ratio


def _figure(case: RpcCase, value: float) -> str:
    return duration(value) if case.unit == "s" else f"{value:,.0f}/s"
