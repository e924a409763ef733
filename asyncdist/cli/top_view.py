"""The picture of a job in a terminal, drawn by ``asyncdist top`` from a `JobStatus`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncdist.kernel.tracing.job_status import JobStatus, RankRow, stuck_first
from asyncdist.kernel.tracing.rank_status import quantity

if TYPE_CHECKING:
    from rich.console import Console, Group, JustifyMethod
    from rich.table import Table
    from rich.text import Text

_STYLES = {
    "lost": "bold red",
    "silent": "bold red",
    "failed": "red",
    "pending": "yellow",
    "idle": "green",
    "left": "dim",
}
_NARROW, _WIDE = 100, 130
"""Columns below which a table has only the most important columns, and from which it has all."""
_LINES = 12
"""Lines of a screen that are not rows of ranks."""
_STORY = 6
_NUMBERS = ("rank", "pid", "gen", "for", "done", "calls/s", "bytes/s", "heard")
_MOST_RANKS = 4
"""Ranks that a cell names."""


def picture(status: JobStatus, job: str, console: Console, *, limit: int | None = None) -> Group:
    """Return the header, the table of ranks, and the sentences about what is stuck.

    Args:
        status: The status.
        job: The address of the job.
        console: Where it is shown: narrow ones get fewer columns.
        limit: The largest number of rows. If there are more ranks, the stuck ones come first.
    """
    from rich.console import Group
    from rich.text import Text

    rows, hidden = status.rows, 0
    if limit is not None and len(rows) > limit:
        rows, hidden = stuck_first(rows)[:limit], len(rows) - limit
    parts: list[Text | Table] = [_header(status, job), _table(rows, console.width)]
    if hidden:
        parts.append(Text(f"and {hidden} more ranks (--ranks 0 shows all)", style="dim"))
    story = status.story if limit is None else status.story[:_STORY]
    parts += [Text(line, style="yellow" if line[:1] != " " else "") for line in story]
    return Group(*parts)


def rows_that_fit(console: Console) -> int:
    """Return the number of ranks that a live screen shows."""
    return max(4, console.height - _LINES)


def _header(status: JobStatus, job: str) -> Text:
    from rich.text import Text

    text = Text(f"{job}", style="bold")
    of = f" of {status.world_size}" if status.members != status.world_size else ""
    hosts = len({row.host for row in status.rows if row.generation is not None})
    facts = [
        f"{status.members}{of} rank{'s' * (status.members > 1)}",
        f"generation {status.generation}",
        f"{hosts} host{'s' * (hosts > 1)}",
        f"{quantity(sum(row.bytes_per_second for row in status.rows), 'B')}/s",
        f"answered by rank {status.answered_by}",
        time.strftime("%H:%M:%S", time.localtime(status.time)),
    ]
    text.append("  " + "  ".join(facts), style="not bold")
    text.append("  ok" if status.healthy else "  STUCK", style="green" if status.healthy else "bold red")
    return text


def _table(rows: Sequence[RankRow], width: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    titles = _titles(width)
    lines = [[Text(title) for title in titles], *[_cells(row, width) for row in rows]]
    widths = [max(text.cell_len for text in column) for column in zip(*lines, strict=True)]
    _fit(dict(zip(titles, range(len(titles)), strict=True)), widths, width)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for title, each in zip(titles, widths, strict=True):
        justify: JustifyMethod = "right" if title in _NUMBERS else "left"
        table.add_column(title, justify=justify, no_wrap=True, width=each, overflow="ellipsis")
    for row, line in zip(rows, lines[1:], strict=True):
        table.add_row(*line, style="" if row.is_member else "dim")
    return table


def _fit(places: dict[str, int], widths: list[int], width: int) -> None:
    """Narrow the operations and the remarks until the columns fit, operations last."""
    # Two spaces follow each column.
    spare = width - sum(widths) - 2 * len(widths)
    for title, least in (("remarks", 12), ("operation", 8)):
        if title in places and spare < 0:
            cut = min(-spare, max(0, widths[places[title]] - least))
            widths[places[title]] -= cut
            spare += cut


def _titles(width: int) -> list[str]:
    """Return the titles of the columns that a table of a width has."""
    titles = ["rank"]
    if width >= _WIDE:
        titles += ["host", "pid", "gen"]
    titles += ["state", "operation", "for"]
    if width >= _NARROW:
        titles += ["done", "calls/s", "bytes/s", "heard"]
    titles.append("waits for")
    if width >= _WIDE:
        titles.append("holds up")
    return [*titles, "remarks"] if width >= _NARROW else titles


def _cells(row: RankRow, width: int) -> list[Text]:
    from rich.text import Text

    mark = "▶ " if row.culprit else ""
    call = row.call
    doing = "" if call is None else f"#{call.seq} {call.call}"
    if row.pending > 1:
        doing += f" +{row.pending - 1}"
    remarks = "; ".join([*([row.reason] if row.reason else []), *row.remarks])
    cells = [Text(f"{mark}{row.rank}", style="bold red" if row.culprit else "")]
    if width >= _WIDE:
        cells += [Text(row.host), Text(str(row.pid or "")), Text("" if row.generation is None else str(row.generation))]
    cells += [
        Text(row.state, style=_STYLES[row.state]),
        # A completed call shows what the rank did last.
        Text(doing, style="" if row.state == "pending" else "dim"),
        Text("" if row.seconds is None else _elapsed(row.seconds)),
    ]
    if width >= _NARROW:
        progress, answers = row.progress, row.state in ("pending", "idle", "failed")
        cells += [
            Text("" if progress is None else f"{progress:.0%}"),
            Text(quantity(row.calls_per_second) if answers else ""),
            Text(quantity(row.bytes_per_second, "B") if answers else ""),
            Text("" if row.last_heard is None else _elapsed(row.last_heard) if row.last_heard else "now"),
        ]
    cells.append(Text(_ranks(row.waits_for)))
    if width >= _WIDE:
        cells.append(Text(_ranks(row.waited_for_by)))
    if width >= _NARROW:
        cells.append(Text(remarks, style="red" if row.culprit or row.reason else "yellow"))
    return cells


def _elapsed(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_MOST_RANKS]))
    return f"{shown}, … ({len(ranks)})" if len(ranks) > _MOST_RANKS else shown
