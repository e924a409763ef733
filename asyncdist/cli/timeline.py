"""Timelines of the calls of all ranks: a plot, and a file in Chrome's trace event format. Used by ``asyncdist trace``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncdist.kernel.tracing.desync_report import name_of
from asyncdist.kernel.tracing.plotting import require_matplotlib as require_matplotlib
from asyncdist.kernel.tracing.trace_record import TracedCall, TraceRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Worlds = Sequence[Sequence[TraceRecord]]

# Okabe and Ito's palette, which colour-blind readers can tell apart. It has eight colours, one of which marks
# calls that have not completed, so a receive gets a darker shade of its send.
_COLOURS = {
    "all_reduce": "#0072b2",
    "all_gather": "#009e73",
    "reduce_scatter": "#e69f00",
    "broadcast": "#56b4e9",
    "all_to_all": "#cc79a7",
    "barrier": "#999999",
    "send": "#f0e442",
    "recv": "#a59b00",
}
_OTHER = "#555555"
_STUCK = "#d55e00"
_BAR = 0.7
"""Height of a bar as a share of its rank's row."""
_COLUMNS = 1600
"""The resolution of the time axis, about that of the picture."""


def timeline_figure(worlds: Worlds, seconds: float = 0.0) -> Figure:
    """Return the plot, with one panel per world. Calls that had not completed when their rank wrote its dump are red."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    sizes = [len(records) for records in worlds]
    end = max(record.written for records in worlds for record in records)
    first = min((call.issued for records in worlds for record in records for call in record.calls), default=end)
    begin = max(end - seconds if seconds else 0.0, first)
    figure = Figure(figsize=(12, 0.7 + 0.9 * len(worlds) + 0.45 * sum(sizes)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(worlds), sharex=True, height_ratios=sizes, squeeze=False)[:, 0]
    shown: dict[str, str] = {}
    for axes, records in zip(panels, worlds, strict=True):
        shown |= _draw_world(axes, records, begin, end)
        title = "Operations of each rank, from the call to its completion on that rank"
        axes.set_title(f"{name_of(records)}: {title}" if len(worlds) > 1 else title, loc="left", weight="bold")
    axes.set_xlim(0, max(end - begin, 1e-6))
    axes.set_xlabel("seconds")
    handles = [Patch(color=colour, label=name) for name, colour in sorted(shown.items(), key=_legend_order)]
    panels[0].legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def _draw_world(axes: Axes, records: Sequence[TraceRecord], begin: float, end: float) -> dict[str, str]:
    """Draw the operations of one world between two times; return the colours of the legend by label."""
    shown: dict[str, str] = {}
    width = max(end - begin, 1e-6) / _COLUMNS
    for row, record in enumerate(records):
        calls = [call for call in record.calls if _until(call, record) >= begin]
        bars = _bars(calls, record, begin, width)
        shown |= dict(bars.keys())
        for (_, colour), columns in bars.items():
            spans = [(first * width, count * width) for first, count in columns]
            axes.broken_barh(spans, (row - _BAR / 2, _BAR), facecolors=colour)
    axes.set_yticks(range(len(records)), [f"rank {record.rank}" for record in records])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e4e4e4")
    axes.set_axisbelow(True)
    return shown


def _until(call: TracedCall, record: TraceRecord) -> float:
    return record.written if call.finished is None else call.finished


def _bars(
    calls: Sequence[TracedCall], record: TraceRecord, begin: float, width: float
) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Return the bars of each kind of operation as their first column and number of columns, each ``width`` seconds wide.

    A column has the kind that takes most of its time; of kinds that take all of it, the one with the longest call.
    """
    import numpy as np

    covered: dict[tuple[str, str], np.ndarray[Any, np.dtype[np.float64]]] = {}
    for call in sorted(calls, key=lambda call: (call.finished is not None, call.issued - _until(call, record))):
        taken = covered.setdefault(_label_and_colour(call), np.zeros(_COLUMNS))
        left = min(max(call.issued - begin, 0.0) / width, _COLUMNS - 1)
        right = min(max((_until(call, record) - begin) / width, left + 1e-6), _COLUMNS)
        first, last = int(left), int(min(right, _COLUMNS - 1))
        taken[first : last + 1] += 1.0
        taken[first] -= left - first
        taken[last] -= last + 1 - right
    if not covered:
        return {}
    shares = np.minimum(np.stack(list(covered.values())), 1.0)
    kinds = np.where(shares.max(0) > 0.0, shares.argmax(0), -1)
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1), _COLUMNS]
    bars: dict[tuple[str, str], list[tuple[int, int]]] = {}
    names = list(covered)
    for first, after in pairwise(edges):
        if kinds[first] >= 0:
            bars.setdefault(names[kinds[first]], []).append((first, after - first))
    return bars


def _label_and_colour(call: TracedCall) -> tuple[str, str]:
    if call.finished is None:
        return "not completed", _STUCK
    kind = next((kind for kind in _COLOURS if call.op.startswith(kind)), None)
    return (kind, _COLOURS[kind]) if kind else ("others", _OTHER)


def _legend_order(shown: tuple[str, str]) -> tuple[bool, bool, str]:
    """Sort operations by name, then "others", then "not completed"."""
    name, colour = shown
    return colour == _STUCK, colour == _OTHER, name


def export_trace_events(worlds: Worlds, path: Path) -> None:
    """Write the calls in Chrome's trace event format: one process per rank, one row per group, times in microseconds.

    The process number of a rank is the rank plus the sizes of the worlds before its own.
    """
    events: list[dict[str, Any]] = []
    first = min((call.issued for records in worlds for record in records for call in record.calls), default=0.0)
    offset = 0
    for records in worlds:
        world = f"{name_of(records)}, " if len(worlds) > 1 else ""
        for record in records:
            name = f"{world}rank {record.rank}, {record.host}"
            events.append({"ph": "M", "name": "process_name", "pid": offset + record.rank, "args": {"name": name}})
            events += [_event(offset + record.rank, record, call, first) for call in record.calls]
        offset += records[0].world_size
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def _event(process: int, record: TraceRecord, call: TracedCall, first: float) -> dict[str, Any]:
    until = record.written if call.finished is None else call.finished
    return {
        "ph": "X",
        "name": call.op,
        "cat": call.group,
        "pid": process,
        "tid": call.group,
        "ts": (call.issued - first) * 1e6,
        "dur": (until - call.issued) * 1e6,
        "args": {"call": call.call, "number": call.seq, "bytes": call.nbytes, "error": call.error},
    }
