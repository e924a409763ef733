"""The results of ``python -m benchmarks faults`` as a page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from asyncdist.cli.page import Grid, Page, about_machine, duration
from benchmarks.faults.benchmark import FaultCase, FaultsReport, JobCase
from benchmarks.faults.plan import FAULTS, ON_TWO_HOSTS, FaultsPlan

_FAULT_COLUMNS = ("fault", "who", "heartbeat", "rounds", "known to all", "longest", "going on", "longest")
_JOB_COLUMNS = ("job", "who", "rounds", "median", "longest", "of the throughput without kills")


def faults_page(report: FaultsReport) -> Page:
    """Return the page of a run, with its cases in the order in which they were measured."""
    plan = report.plan
    about = [f"{about_machine(report.machine)}; {plan.ranks} ranks"]
    if report.faults:
        about.append(
            "known to all: from the fault to the error on the last of the ranks that wait. going on: from a rank's error "
            "to the end of its first all-reduce in the new group, on the slowest rank. Medians and longest times"
        )
    if any(case.contender == "gloo" for case in report.faults):
        about.append("a rank of gloo ends with its error, as a training script does; gloo's timeout is 30 minutes")
    grids = []
    for title, two in (("One host", False), ("Two hosts", True)):
        rows = [_fault_cells(case, plan) for case in report.faults if (case.fault in ON_TWO_HOSTS) is two]
        if rows:
            grids.append(Grid(title, _FAULT_COLUMNS, rows, group_rows=True))
    if report.jobs:
        grids.append(Grid("Jobs whose members change", _JOB_COLUMNS, list(map(_job_cells, report.jobs))))
    return Page("Failures", about, grids)


def _fault_cells(case: FaultCase, plan: FaultsPlan) -> tuple[str, ...]:
    name = FAULTS[case.fault]
    beat = "—" if case.heartbeat is None else f"{case.heartbeat:g} s"
    if case.unaware:
        return name, case.contender, beat, "1", f"> {plan.limit:g} s", f"> {plan.limit:g} s", "—", "—"
    again = _both(case.again) if case.again else ("the job is over", "—")
    return name, case.contender, beat, str(len(case.told)), *_both(case.told), *again


def _job_cells(case: JobCase) -> tuple[str, ...]:
    if case.part == "join":
        return "from `join` to the first group", case.contender, str(len(case.seconds)), *_both(case.seconds), "—"
    assert case.share is not None
    name = f"4 members train, one is killed and replaced every {case.every:g} s"
    return name, case.contender, str(case.kills), "—", "—", f"{case.share:.0%}"


def _both(times: Sequence[float]) -> tuple[str, str]:
    return duration(median(times)), duration(max(times))
