"""The picture of a job in a terminal, drawn by ``asyncdist top`` from a `JobStatus`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncdist.kernel.tracing.job_status import JobStatus, RankStatus, quantity, stuck_first

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
_COLUMNS: dict[str, tuple[int, JustifyMethod]] = {
    "rank": (0, "right"), "host": (_WIDE, "left"), "pid": (_WIDE, "right"), "gen": (_WIDE, "right"), "state": (0, "left"),
    "operation": (0, "left"), "for": (0, "right"), "done": (_NARROW, "right"), "calls/s": (_NARROW, "right"),
    "bytes/s": (_NARROW, "right"), "heard": (_NARROW, "right"), "waits for": (0, "left"), "holds up": (_WIDE, "left"),
    "remarks": (_NARROW, "left"),
}  # fmt: skip
"""The titles of the columns: from which width on a table has the column, and on which side its text begins."""
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


def _table(rows: Sequence[RankStatus], width: int) -> Table:
    from rich import box
    from rich.table import Table

    titles = [title for title, (least_width, _) in _COLUMNS.items() if width >= least_width]
    lines = [_cells(row) for row in rows]
    widths = {title: max(len(title), *(line[title].cell_len for line in lines), 0) for title in titles}
    _fit(widths, width)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for title in titles:
        table.add_column(title, justify=_COLUMNS[title][1], no_wrap=True, width=widths[title], overflow="ellipsis")
    for row, line in zip(rows, lines, strict=True):
        table.add_row(*(line[title] for title in titles), style="" if row.is_member else "dim")
    return table


def _fit(widths: dict[str, int], width: int) -> None:
    """Narrow the operations and the remarks until the columns fit, operations last."""
    # Two spaces follow each column.
    spare = width - sum(widths.values()) - 2 * len(widths)
    for title, least in (("remarks", 12), ("operation", 8)):
        if title in widths and spare < 0:
            cut = min(-spare, max(0, widths[title] - least))
            widths[title] -= cut
            spare += cut


def _cells(row: RankStatus) -> dict[str, Text]:
    """Return the cells of a rank by the titles of `_COLUMNS`."""
    from rich.text import Text

    doing = "" if row.call is None else f"#{row.call.seq} {row.call.call}"
    if row.pending > 1:
        doing += f" +{row.pending - 1}"
    remarks = "; ".join([*([row.reason] if row.reason else []), *row.remarks])
    answers = row.state in ("pending", "idle", "failed")
    return {
        "rank": Text(f"{'▶ ' if row.culprit else ''}{row.rank}", style="bold red" if row.culprit else ""),
        "host": Text(row.host),
        "pid": Text(str(row.pid or "")),
        "gen": Text("" if row.generation is None else str(row.generation)),
        "state": Text(row.state, style=_STYLES[row.state]),
        # A completed call shows what the rank did last.
        "operation": Text(doing, style="" if row.state == "pending" else "dim"),
        "for": Text("" if row.seconds is None else _elapsed(row.seconds)),
        "done": Text("" if row.progress is None else f"{row.progress:.0%}"),
        "calls/s": Text(quantity(row.calls_per_second) if answers else ""),
        "bytes/s": Text(quantity(row.bytes_per_second, "B") if answers else ""),
        "heard": Text("" if row.last_heard is None else _elapsed(row.last_heard) if row.last_heard else "now"),
        "waits for": Text(_ranks(row.waits_for)),
        "holds up": Text(_ranks(row.waited_for_by)),
        "remarks": Text(remarks, style="red" if row.culprit or row.reason else "yellow"),
    }


def _elapsed(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_MOST_RANKS]))
    return f"{shown}, … ({len(ranks)})" if len(ranks) > _MOST_RANKS else shown
