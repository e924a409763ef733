"""The results of ``python -m benchmarks weights`` as a page."""

from __future__ import annotations

from statistics import median

from asyncdist.cli.page import Grid, Page, about_machine, duration, size, times
from benchmarks.weights.benchmark import WeightsCase, WeightsReport

_HOST_COLUMNS = (
    "readers", "version", "one copy", "published", "read by all", "of its rate", "latest answer", "before", "reached",
)  # fmt: skip
_HOSTS_COLUMNS = (
    "hosts", "version", "one transfer", "published", "read by all", "of one transfer", "target", "reached",
)  # fmt: skip
_LEAST_RATE = 0.6
"""The least rate of each reader, as a part of the rate of one copy."""
_LATEST = 0.010
"""Seconds by which an answer may be late because of a version."""
_MOST_TIME = 1.3
"""The most time in which all hosts have a version, in transfers over one link."""
_ALLOWANCE = 1.1
"""A figure that misses its target by less than a tenth has reached it."""


def weights_page(report: WeightsReport) -> Page:
    """Return the page of a run, with its cases in the order in which they were measured."""
    plan = report.plan
    about = [f"{about_machine(report.machine)}; medians of {plan.rounds} rounds, in which all take turns"]
    grids = []
    host = [case for case in report.cases if case.part == "host"]
    if host:
        about.append(
            "one host: from the call of `publish` until the slowest reader has swapped the version in, compared with a "
            "copy of the same bytes by one thread. Latest answer: how late the latest answer of any reader was from the "
            "call to 0.1 s after the last swap, and in an equally long time before; the median over the rounds. Targets: "
            f"{_LEAST_RATE:.0%} of the rate of the copy for each reader, and no answer more than {1e3 * _LATEST:g} ms later"
        )
        grids.append(Grid("One host", _HOST_COLUMNS, [_host_cells(case) for case in host]))
    hosts = [case for case in report.cases if case.part == "hosts"]
    if hosts:
        about.append(
            f"several hosts: network namespaces with links of {plan.rate} in each direction, one reader on each, compared "
            "with a plain TCP transfer of the same bytes between two of them"
        )
        grids.append(Grid("Several hosts", _HOSTS_COLUMNS, [_hosts_cells(case) for case in hosts]))
    return Page("Weights", about, grids)


def _host_cells(case: WeightsCase) -> tuple[str, ...]:
    read = median(max(each) for each in case.read)
    late, before = median(case.late), median(case.late_before)
    reached = 1 / case.ratio >= _LEAST_RATE / _ALLOWANCE and late - before <= _LATEST * _ALLOWANCE
    return (
        str(case.readers),
        size(case.nbytes),
        duration(median(case.alone)),
        duration(median(case.published)),
        duration(read),
        f"{1 / case.ratio:.0%}",
        duration(late),
        duration(before),
        "yes" if reached else "no",
    )


def _hosts_cells(case: WeightsCase) -> tuple[str, ...]:
    return (
        str(case.readers),
        size(case.nbytes),
        duration(median(case.alone)),
        duration(median(case.published)),
        duration(median(max(each) for each in case.read)),
        times(case.ratio),
        f"≤ {times(_MOST_TIME)}",
        "yes" if case.ratio <= _MOST_TIME * _ALLOWANCE else "no",
    )
