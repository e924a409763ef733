"""Run a plan between hosts, and its largest size between fewer hosts, for the bus bandwidth against hosts.

Called by `asyncdist.cli.bench`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from asyncdist.cli.bench import launch
from asyncdist.cli.bench.plan import BenchPlan
from asyncdist.cli.bench.result import Report, ResultRow

Progress = Callable[[float, ResultRow | None], None]


def sweep(plan: BenchPlan, progress: Progress) -> Report:
    """Return the report of the whole plan. Its ``fewer_hosts`` are those with the largest size only on 2, 4, … hosts.

    Args:
        plan: A plan with several hosts.
        progress: As that of `launch.run`, for all runs together.
    """
    largest = max(plan.sizes)
    fewer = [1 << power for power in range(1, 16) if 1 << power < plan.hosts]
    plans = [
        replace(
            plan, hosts=hosts, ranks=hosts * plan.ranks_per_host, sizes=(largest,), collectives=_sized(plan), steps=()
        )
        for hosts in fewer
        if _sized(plan)
    ]
    plans.append(plan)
    reports: list[Report] = []
    parts, done = sum(each.parts for each in plans), 0
    for each in plans:

        def within(share: float, row: ResultRow | None, before: int = done, now: BenchPlan = each) -> None:
            progress((before + share * now.parts) / parts, row)

        reports.append(launch.run(each, within))
        done += each.parts
    *fewer_hosts, report = reports
    report.fewer_hosts = fewer_hosts
    return report


def _sized(plan: BenchPlan) -> tuple[str, ...]:
    return tuple(name for name in plan.collectives if name != "barrier")
