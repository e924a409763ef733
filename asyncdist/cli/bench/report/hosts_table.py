"""The additions of ``asyncdist bench --hosts`` to the page: shares of the link, limits, and runs between fewer hosts.

Used by `tables` and `plot`.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncdist.cli.bench.hosts.limits import least_nbytes, limit_of, rate_in_bytes
from asyncdist.cli.bench.plan import BenchPlan
from asyncdist.cli.bench.result import Report, ResultRow, by_name
from asyncdist.cli.page import Grid

Cell = Callable[[ResultRow], str]
"""Returns the text of a column in one row."""
Column = tuple[str, Cell]

EXPLANATION = (
    "The hosts are network namespaces of one machine, so they share its processors. *link*: the share of the link's rate "
    "that the least number of bytes takes up which must enter or leave a host, whatever the algorithm "
    "(all_reduce: 2(h−1)/h times the tensor between h hosts). *limit*: what limits asyncdist: the link from a share of "
    "85 % on; else the CPU, if all processors together were busy for 90 % of the time or longer; else latency."
)


def about_hosts(plan: BenchPlan) -> str:
    """Return the hosts of a plan in words."""
    ranks = f"{plan.ranks_per_host} rank{'s' * (plan.ranks_per_host > 1)} each"
    return f"{plan.hosts} hosts with {ranks}" + (f", links of {plan.link}" if plan.link else "")


def link_share(plan: BenchPlan, row: ResultRow, contender: str) -> float | None:
    """Return the share of a link that the least number of bytes takes up; None if that is unknown."""
    if contender not in row.timings or not plan.link:
        return None
    least = least_nbytes(row.name, row.nbytes, plan.hosts, plan.ranks_per_host)
    return least / rate_in_bytes(plan.link) / row.timings[contender].median


def link_columns(plan: BenchPlan) -> list[Column]:
    """Return the columns with the shares of the link, and with what limits asyncdist."""

    def share_of(contender: str) -> Cell:
        return lambda row: _percent(link_share(plan, row, contender))

    def limit(row: ResultRow) -> str:
        return limit_of(link_share(plan, row, "asyncdist") or 0.0, row.busy.get("asyncdist"))

    shown = [name for name in ("asyncdist", "gloo", "raw") if name in plan.contenders]
    columns = [("link" if name == "asyncdist" else f"{name}\nlink", share_of(name)) for name in shown]
    return [*columns, ("CPU", lambda row: _percent(row.busy.get("asyncdist"))), ("limit", limit)]


def fewer_hosts_grids(report: Report) -> list[Grid]:
    """Return a table for each collective: the share of the link against the number of hosts, at the largest size."""
    if not report.fewer_hosts or not report.plan.link:
        return []
    grids = []
    for name, points in by_hosts(report).items():
        contenders = [who for who in report.plan.contenders if who in points[0][1].timings]
        rows = [
            [str(plan.hosts), *(_percent(link_share(plan, row, contender)) for contender in contenders)]
            for plan, row in points
        ]
        title = f"{name} against the number of hosts"
        grids.append(Grid(title, ["hosts", *contenders], rows, "share of the link at the largest size"))
    return grids


def by_hosts(report: Report) -> dict[str, list[tuple[BenchPlan, ResultRow]]]:
    """Return, by collective, the rows of the largest size with their plans, by number of hosts."""
    found: dict[str, list[tuple[BenchPlan, ResultRow]]] = {}
    for part in (*report.fewer_hosts, report):
        for name, rows in by_name(row for row in part.of_kind("rows") if row.nbytes).items():
            found.setdefault(name, []).append((part.plan, max(rows, key=lambda row: row.nbytes)))
    return found


def _percent(share: float | None) -> str:
    return "—" if share is None else f"{share:.0%}".replace("%", " %")
