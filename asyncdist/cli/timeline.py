"""The calls of all ranks against time: as a picture, and as a file for a viewer of traces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncdist.bench.plot import require as require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from asyncdist.observe.story import Call, Record

# Okabe and Ito's colours, which the colour-blind can tell apart; what is commonest in training comes first.
_COLOURS = {
    "all_reduce": "#0072b2",
    "all_gather": "#009e73",
    "reduce_scatter": "#e69f00",
    "broadcast": "#56b4e9",
    "all_to_all": "#cc79a7",
    "barrier": "#999999",
    "send": "#f0e442",
    "recv": "#f0e442",
}
_OTHER = "#555555"
_STUCK = "#d55e00"
_BAR = 0.7  # of a rank's row


def draw(records: Sequence[Record], path: Path, seconds: float = 0.0) -> None:
    """Draw a row a rank into a file whose name ends in png, svg or pdf; only the last ``seconds``, if they are not 0."""
    figure_of(records, seconds).savefig(path, dpi=150)


def figure_of(records: Sequence[Record], seconds: float = 0.0) -> Figure:
    """Return the picture. What was not over when its rank wrote is red, and reaches as far as that."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    end = max(record.written for record in records)
    begin = max(end - seconds if seconds else 0.0, min((call.issued for _, call in _all(records)), default=end))
    figure = Figure(figsize=(12, 1.6 + 0.45 * len(records)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shown: dict[str, str] = {}
    for row, record in enumerate(records):
        bars: dict[str, list[tuple[float, float]]] = {}
        for call in record.calls:
            until = record.written if call.finished is None else call.finished
            if until < begin:
                continue
            name, colour = _look_of(call)
            shown[name] = colour
            start = max(call.issued, begin)
            bars.setdefault(colour, []).append((start - begin, max(until - start, (end - begin) / 2000)))
        for colour, spans in bars.items():
            axes.broken_barh(spans, (row - _BAR / 2, _BAR), facecolors=colour)
    axes.set_yticks(range(len(records)), [f"rank {record.rank}" for record in records])
    axes.invert_yaxis()
    axes.set_xlim(0, max(end - begin, 1e-6))
    axes.set_xlabel("seconds")
    axes.set_title("Operations of each rank, from its call until it was over there", loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e4e4e4")
    axes.set_axisbelow(True)
    handles = [Patch(color=colour, label=name) for name, colour in sorted(shown.items())]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def _all(records: Sequence[Record]) -> Iterator[tuple[Record, Call]]:
    return ((record, call) for record in records for call in record.calls)


def _look_of(call: Call) -> tuple[str, str]:
    """Return what a call is named in the picture, and its colour."""
    if call.finished is None:
        return "not over", _STUCK
    kind = next((kind for kind in _COLOURS if call.op.startswith(kind)), None)
    return (kind, _COLOURS[kind]) if kind else ("others", _OTHER)


def export(records: Sequence[Record], path: Path) -> None:
    """Write the calls in Chrome's trace event format: a process a rank, a row a group, microseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": record.rank, "args": {"name": f"rank {record.rank}, {record.host}"}}
        for record in records
    ]
    first = min((call.issued for _, call in _all(records)), default=0.0)
    for record, call in _all(records):
        until = record.written if call.finished is None else call.finished
        events.append(
            {
                "ph": "X",
                "name": call.op,
                "cat": call.group,
                "pid": record.rank,
                "tid": call.group,
                "ts": (call.issued - first) * 1e6,
                "dur": (until - call.issued) * 1e6,
                "args": {"call": call.words, "number": call.number, "bytes": call.nbytes, "error": call.error},
            }
        )
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
