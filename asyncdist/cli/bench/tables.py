"""The page of ``asyncdist bench``: a table of each collective, and what was measured. Called by `asyncdist.cli.bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asyncdist.cli.bench.limits import least_nbytes, limit_of, rate_in_bytes
from asyncdist.cli.bench.plan import EARLIER, RIVALS, BenchPlan
from asyncdist.cli.bench.result import Report, ResultRow, by_name
from asyncdist.cli.page import Grid, Page, about_machine, duration, size, times

Cell = Callable[[ResultRow], str]
"""Returns the text of a column in one row."""
Column = tuple[str, Cell]

_LABELS = {
    "torch": "through torch", "idle": "torch, idle", "mpi": "Open MPI", "raw": "raw sockets", "copy": "memory copy",
}  # fmt: skip
_MEANINGS = {
    "asyncdist": "the blocking API over the transport `{transport}`, on ordinary tensors",
    "registered": "the same on tensors made by `asyncdist.empty(…, shared=True)`, which every rank maps",
    "torch": "the functions of `torch.distributed` on the asyncdist back end, over the transport `{transport}`",
    "idle": "the functions of `torch.distributed` on a back end that does nothing: torch's own share of what *through "
    "torch* takes longer than *asyncdist*",
    "awaited": "the awaited API on uvloop",
    "gloo": "`torch.distributed` over gloo",
    "mpi": "the buffer-based calls of mpi4py, in place where MPI allows it",
    "raw": "the same traffic over plain non-blocking TCP sockets, with the additions",
    EARLIER: "*asyncdist* in an earlier run on this machine, whose load was another one: `{than}`",
    "copy": "a copy of as many bytes from one ordinary tensor to another by one core while the other ranks sleep: "
    "the physical limit",
}
_EXPLANATION = (
    "Contenders took turns in one run, in the same processes, and every result was checked. Times are of single calls on "
    "rank 0: back to back below 8 MiB; above, and for rooted collectives, all ranks start each call at the same instant. "
    "Medians; *p99*, *vs* (how many times faster it is) and *× copy* (its time in memory copies) are those of *asyncdist*."
)
_EXPLANATION_OF_HOSTS = (
    "The hosts are network namespaces of one machine, so they share its processors. *link*: the share of the link's rate "
    "that the least number of bytes takes up which must enter or leave a host, whatever the algorithm "
    "(all_reduce: 2(h−1)/h times the tensor between h hosts). *limit*: what limits asyncdist: the link from a share of "
    "85 % on; else the CPU, if all processors together were busy for 90 % of the time or longer; else latency."
)


def bench_page(report: Report) -> Page:
    plan, stem = report.plan, file_stem(report.plan)
    meanings = "\n".join(_meaning(contender, plan) for contender in plan.contenders)
    return Page(
        "Benchmark between hosts" if plan.hosts > 1 else "Benchmark",
        [about_run(report)],
        [*_collective_grids(report), *_grids_by_hosts(report)],
        [_EXPLANATION, *([_EXPLANATION_OF_HOSTS] if plan.hosts > 1 else []), meanings],
        picture=f"{stem}.png" if any(row.nbytes for row in report.rows) else "",
    )


def file_stem(plan: BenchPlan) -> str:
    """Return the name of the files of a run, without their endings."""
    return "hosts" if plan.hosts > 1 else "bench"


def about_run(report: Report) -> str:
    """Return one line about the machine and the run."""
    plan = report.plan
    beside = f"beside {plan.busy} busy process{'es' * (plan.busy > 1)}, " if plan.busy else ""
    return (
        f"{about_machine(report.machine)}; {_placed(plan)}, one thread each, "
        f"{beside}transport {', '.join(plan.transports)}; float32"
    )


def _placed(plan: BenchPlan) -> str:
    if plan.hosts == 1:
        return f"{plan.ranks} ranks"
    ranks = f"{plan.ranks_per_host} rank{'s' * (plan.ranks_per_host > 1)} each"
    return f"{plan.hosts} hosts with {ranks}" + (f", links of {plan.link}" if plan.link else "")


def _label(contender: str) -> str:
    return _LABELS.get(contender, contender)


def _meaning(contender: str, plan: BenchPlan) -> str:
    further = f"the blocking API over the transport `{contender}`"
    meaning = _MEANINGS.get(contender, further).format(transport=plan.transports[0], than=plan.than)
    return f"- *{_label(contender)}*: {meaning}."


# -- collectives ------------------------------------------------------------------------------------


def _collective_grids(report: Report) -> Iterator[Grid]:
    for collective, rows in by_name(report.rows).items():
        yield Grid.of(f"{collective}, {_placed(report.plan)}", columns_of(report.plan), rows)


def columns_of(plan: BenchPlan) -> list[Column]:
    columns: list[Column] = [("size", lambda row: size(row.nbytes) if row.nbytes else "—")]
    columns += [(_label(who), _median(who)) for who in plan.contenders]
    columns.insert(2, ("p99", lambda row: duration(row.blocking.p99)))
    columns += [(f"vs {rival}", _ratio(rival, "asyncdist")) for rival in plan.contenders if rival in (*RIVALS, EARLIER)]
    if "copy" in plan.contenders:
        columns.append(("× copy", _ratio("asyncdist", "copy")))
    return columns + (_link_columns(plan) if plan.hosts > 1 else [])


def _median(contender: str) -> Cell:
    return lambda row: duration(row.timings[contender].median) if contender in row.timings else "—"


def _ratio(contender: str, to: str) -> Cell:
    return lambda row: times(row.ratio(contender, to))


# -- between hosts ----------------------------------------------------------------------------------


def link_share(plan: BenchPlan, row: ResultRow, contender: str) -> float | None:
    """Return the share of a link that the least number of bytes takes up; None if that is unknown."""
    if contender not in row.timings or not plan.link:
        return None
    least = least_nbytes(row.name, row.nbytes, plan.hosts, plan.ranks_per_host)
    return least / rate_in_bytes(plan.link) / row.timings[contender].median


def _link_columns(plan: BenchPlan) -> list[Column]:
    """Return the columns with the shares of the link, and with what limits asyncdist."""

    def share_of(contender: str) -> Cell:
        return lambda row: _percent(link_share(plan, row, contender))

    def limit(row: ResultRow) -> str:
        return limit_of(link_share(plan, row, "asyncdist") or 0.0, row.busy.get("asyncdist"))

    shown = [name for name in ("asyncdist", "gloo", "raw") if name in plan.contenders]
    columns = [("link" if name == "asyncdist" else f"{name}\nlink", share_of(name)) for name in shown]
    return [*columns, ("CPU", lambda row: _percent(row.busy.get("asyncdist"))), ("limit", limit)]


def _grids_by_hosts(report: Report) -> Iterator[Grid]:
    """Yield a table for each collective: the share of the link against the number of hosts, at the largest size."""
    for name, points in by_hosts(report).items():
        contenders = [who for who in report.plan.contenders if who in points[0][1].timings]
        rows = [
            [str(plan.hosts), *(_percent(link_share(plan, row, who)) for who in contenders)] for plan, row in points
        ]
        title = f"{name} against the number of hosts"
        yield Grid(title, ["hosts", *contenders], rows, "share of the link at the largest size")


def by_hosts(report: Report) -> dict[str, list[tuple[BenchPlan, ResultRow]]]:
    """Return, by collective, the rows of the largest size with their plans, by number of hosts; empty without links."""
    found: dict[str, list[tuple[BenchPlan, ResultRow]]] = {}
    for part in (*report.fewer_hosts, report) if report.fewer_hosts and report.plan.link else ():
        for name, rows in by_name(row for row in part.rows if row.nbytes).items():
            found.setdefault(name, []).append((part.plan, max(rows, key=lambda row: row.nbytes)))
    return found


def _percent(share: float | None) -> str:
    return "—" if share is None else f"{share:.0%}".replace("%", " %")
