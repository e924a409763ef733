"""``asyncdist trace``: report from flight recorder dumps which rank is stuck in which call."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncdist.cli.console import print_stacks, screen
from asyncdist.cli.option_types import NewFile, NewFolder, Seconds, reporting_write_errors
from asyncdist.cli.page import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from asyncdist.kernel.tracing.desync_report import RankPace, RankPosition
    from asyncdist.kernel.tracing.trace_record import TracedCall, TraceRecord

_GROUPS = 8
"""The largest number of groups with a table. Blocked groups come first."""
_WAITS = {"spin": "polling", "yield": "yielding", "sleep": "sleeping"}
"""How a rank waits for its peers, by `TraceRecord.waiting`."""


@click.command(short_help="Find in flight recorder dumps which rank is stuck in which call; plot a timeline.")
@click.argument(
    "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), envvar="ASYNCDIST_DUMP_DIR", default="."
)
@click.option(
    "--calls", default=0, type=click.IntRange(0), metavar="N", help="Show the last N calls, one column per rank."
)
@click.option(
    "--plot", type=NewFile(), help="Plot the calls of all ranks against time into this file (png, svg or pdf)."
)
@click.option("--seconds", default=0.0, type=Seconds(), metavar="N", help="Plot only the last N seconds; 0 plots all.")
@click.option(
    "--perfetto", type=NewFile(), help="Write the calls to this file for ui.perfetto.dev or chrome://tracing."
)
@click.option(
    "--format",
    "report_format",
    type=click.Choice(["text", "torch"]),
    default="text",
    show_default=True,
    help="torch: write the dumps as files for torch's analyser torchfrtrace, instead of a report.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option(
    "--out", type=NewFolder(), metavar="FOLDER", help="Folder for the files of --format torch; FOLDER if not given."
)
def trace(
    folder: Path,
    calls: int,
    plot: Path | None,
    seconds: float,
    perfetto: Path | None,
    report_format: str,
    as_json: bool,
    out: Path | None,
) -> None:
    """Find in the flight recorder dumps in FOLDER which call blocks each group, and which ranks have not made it.

    FOLDER defaults to ASYNCDIST_DUMP_DIR, or else to the current folder. Ranks write their dumps there when a group
    fails. With ASYNCDIST_DUMP_SIGNAL=USR2 they also write them on that signal, which shows where a hanging job is.
    A dump has the Python stacks of its process; the report shows those of ranks that hold up others.
    Copy the files of all hosts into one folder first. Latencies between ranks rely on the hosts' wall clocks.
    If the folder has dumps of several worlds, the report covers those written within 30 seconds of the latest one.

    \b
    ASYNCDIST_DUMP_DIR=/tmp/dumps ASYNCDIST_DUMP_SIGNAL=USR2 torchrun --nproc-per-node=8 train.py
    pkill -USR2 -f -- '-u train.py'          # matches torchrun's ranks, not torchrun, which the signal would end
    asyncdist trace /tmp/dumps --plot timeline.png
    asyncdist trace /tmp/dumps --format torch    # and then: torchfrtrace /tmp/dumps
    """
    from asyncdist.cli import timeline
    from asyncdist.kernel.tracing import desync_report

    if as_json and report_format == "torch":
        raise click.UsageError(
            "--json prints a report, and --format torch writes files instead of one: name one of them"
        )
    if plot is not None:
        timeline.require_matplotlib(plot)
    found = desync_report.read(folder)
    worlds = desync_report.recent(found)
    console = screen(stderr=as_json)
    if as_json:
        click.echo(json.dumps({"worlds": [_report(records) for records in worlds]}))
    for records in () if as_json else worlds:
        if report_format == "torch":
            _export(records, out or folder, console)
            continue
        if len(worlds) > 1:
            size = records[0].world_size
            title = f"{desync_report.name_of(records)} of {size} rank{'s' * (size > 1)}"
            console.print(title, style="bold", markup=False)
        _show(records, calls, console)
    if older := sum(map(len, found[len(worlds) :])):
        console.print(f"{older} file{'s' * (older > 1)} of older worlds in {folder} left out", markup=False)
    if plot is not None:
        with reporting_write_errors(plot):
            timeline.timeline_figure(worlds, seconds).savefig(plot, dpi=150)
        console.print(f"plotted into {plot}", markup=False)
    if perfetto is not None:
        with reporting_write_errors(perfetto):
            timeline.export_trace_events(worlds, perfetto)
        console.print(f"written to {perfetto}: open it at https://ui.perfetto.dev", markup=False)


def _export(records: Sequence[TraceRecord], folder: Path, console: Console) -> None:
    """Write the dumps of one world in torch's format, and print the command that analyses them."""
    from asyncdist.kernel.tracing import torch_format
    from asyncdist.kernel.tracing.recorder import write_private

    prefix = torch_format.file_prefix(records[0].world)
    evicted = torch_format.evicted_collectives(records)
    with reporting_write_errors(folder):
        for record in records:
            write_private(str(folder / f"{prefix}{record.rank}"), torch_format.torch_pickle(record, evicted))
    missing = " --allow-incomplete-ranks" if len(records) < records[0].world_size else ""
    count = f"{len(records)} file{'s' * (len(records) > 1)}"
    command = f"torchfrtrace {shlex.quote(str(folder))} --prefix {prefix}{missing}"
    console.print(f"written {count} to {folder}; analyse them with", markup=False)
    console.print(f"  {command}", markup=False, soft_wrap=True)


def _show(records: Sequence[TraceRecord], calls: int, console: Console) -> None:
    """Print the report of one world."""
    from asyncdist.kernel.tracing import desync_report

    for sentence in desync_report.tell(records):
        console.print(sentence, markup=False)
    for record in desync_report.late_records(records):
        if record.stacks:
            console.print(f"Python stacks of rank {record.rank}:", markup=False)
            print_stacks(record.stacks, console)
    standings = desync_report.standings(records)
    for standing in standings[:_GROUPS]:
        console.print(_table(standing, records, desync_report.paces(records, standing.group, standing.ranks)))
        table = _last_calls(standing, records, calls)
        if table.row_count:
            console.print(table)
    if len(standings) > _GROUPS:
        console.print(f"and {len(standings) - _GROUPS} more groups, which are not blocked for longer")


def _report(records: Sequence[TraceRecord]) -> dict[str, Any]:
    """Return the report of one world as JSON values, with the keys that docs/debugging.md documents."""
    from asyncdist.kernel.tracing import desync_report

    return {
        "world": records[0].world,
        "world_size": records[0].world_size,
        "report": list(desync_report.tell(records)),
        "late": [record.rank for record in desync_report.late_records(records)],
        "groups": [
            {
                "group": standing.group,
                "blocked_at": standing.number,
                "ranks": _rows(standing, records, desync_report.paces(records, standing.group, standing.ranks)),
            }
            for standing in desync_report.standings(records)
        ],
    }


def _rows(
    standing: RankPosition, records: Sequence[TraceRecord], paces: Mapping[int, RankPace]
) -> list[dict[str, Any]]:
    """Return where each rank of a group is; of a rank without a dump only its number."""
    by_rank, rows = {record.rank: record for record in records}, []
    for rank in standing.ranks:
        row: dict[str, Any] = {"rank": rank, "dump": rank in by_rank}
        if row["dump"]:
            record, pace = by_rank[rank], paces.get(rank)
            mine = record.collectives(standing.group)
            pending = [number for number, call in mine.items() if call.finished is None]
            oldest = min(pending, default=None)
            row |= {
                "host": record.host,
                "pid": record.pid,
                "waiting": record.waiting,
                "completed": next((at for at in range(record.last(standing.group), 0, -1) if at not in pending), None),
                "pending": oldest,
                "call": mine[oldest].call if oldest else None,
                "pending_seconds": record.written - mine[oldest].issued if oldest else None,
                "arrived_last": pace.last if pace else None,
                "behind_first_seconds": pace.lateness if pace else None,
                "call_seconds": pace.duration if pace else None,
            }
        rows.append(row)
    return rows


def _table(standing: RankPosition, records: Sequence[TraceRecord], paces: dict[int, RankPace]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    counted = next((pace.counted for pace in paces.values()), 0)
    table = Table(title=escape(f"group {standing.group!r}"), title_justify="left")
    for name in ("rank", "host", "process"):
        table.add_column(name, justify="right")
    waits = any(record.waiting for record in records)
    if waits:
        table.add_column("waits by")
    table.add_column("last completed")
    table.add_column("pending")
    for name in ("arrived last", "behind first", "call time"):
        table.add_column(name, justify="right", footer=f"of {counted}" if name == "arrived last" else "median")
    table.show_footer = bool(counted)
    by_rank = {record.rank: record for record in records}
    for row in _rows(standing, records, paces):
        if not row["dump"]:
            table.add_row(str(row["rank"]), "[red]no dump[/]")
            continue
        mine = by_rank[row["rank"]].collectives(standing.group)
        pending_for = f" for {row['pending_seconds']:.1f} s" if row["pending"] else ""
        timed = row["arrived_last"] is not None
        table.add_row(
            str(row["rank"]),
            escape(row["host"]),
            str(row["pid"]),
            *([_WAITS.get(row["waiting"], "")] if waits else []),
            _named(row["completed"], mine),
            f"[yellow]{_named(row['pending'], mine)}{pending_for}[/]",
            *([f"{row['arrived_last']:.0%}"] if timed else []),
            *(duration(row[name]) for name in ("behind_first_seconds", "call_seconds") if timed),
        )
    return table


def _last_calls(standing: RankPosition, records: Sequence[TraceRecord], count: int) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"the last calls in {standing.group!r}"), title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("call")
    members = [record for record in records if record.groups.get(standing.group) == standing.ranks]
    for record in members:
        table.add_column(f"rank {record.rank}", justify="right")
    calls = [record.collectives(standing.group) for record in members]
    numbers = sorted(set().union(*calls))[-count:] if count else []
    for number in numbers:
        row = [each.get(number) for each in calls]
        words = dict.fromkeys(call.call for call in row if call is not None)
        cells = [_cell(number, call, record, standing.group) for call, record in zip(row, members, strict=True)]
        table.add_row(str(number), escape(" / ".join(words)), *cells)
    return table


def _cell(number: int, call: TracedCall | None, record: TraceRecord, group: str) -> str:
    if call is None:
        return "[red]not called[/]" if record.last(group) < number else "overwritten"
    if call.finished is None:
        return f"[yellow]{'failed' if call.error else 'pending'} for {record.written - call.issued:.1f} s[/]"
    return duration(call.finished - call.issued)


def _named(number: int | None, calls: Mapping[int, TracedCall]) -> str:
    from rich.markup import escape

    if number is None:
        return ""
    return escape(f"#{number} {calls[number].op}") if number in calls else f"#{number}"
