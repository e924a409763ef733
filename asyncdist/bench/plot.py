"""Draw time against size: both axes logarithmic, one panel a collective, one line a contender."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncdist.bench.result import Report, Row
from asyncdist.bench.table import about, size
from asyncdist.errors import UsageError

# Contender: (label, colour, style, width, marker). Ours stands out, the limit stays in the background.
_LINES = {
    "raw": ("raw sockets (the limit)", "#9aa0a6", "--", 1.6, "."),
    "gloo": ("gloo", "#d9603b", "-", 1.8, "s"),
    "awaited": ("asyncdist, awaited", "#7fb3e6", "-", 1.8, "^"),
    "asyncdist": ("asyncdist", "#1a5fb4", "-", 2.6, "o"),
}
_INK, _GRID = "#333333", "#e4e4e4"


def require() -> None:
    """Raise UsageError, saying what to install, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("drawing needs matplotlib: pip install 'asyncdist[plot]'") from None


def draw(report: Report, path: Path) -> None:
    """Draw the report into a file whose name ends in png, svg or pdf. Collectives without sizes are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sized = [row for row in report.rows if row.nbytes]
    names = list(dict.fromkeys(row.collective for row in sized))
    columns = min(len(names), 3) or 1
    lines = -(-len(names) // columns) or 1
    figure = Figure(figsize=(1.6 + 6.4 * columns, 4.9 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel, name in zip(panels, names, strict=False):
        _panel(panel, name, [row for row in sized if row.collective == name])
    if names:
        panels[0].legend(frameon=False, fontsize=9, reverse=True)
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    figure.supxlabel(textwrap.fill(about(report), 110), fontsize=7, color="#777777")
    figure.savefig(path, dpi=150)


def _panel(panel: Any, name: str, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    for contender, (label, colour, style, width, marker) in _LINES.items():
        points = [(row.nbytes, row.timings[contender]) for row in rows if contender in row.timings]
        if points:
            sizes, timings = zip(*points, strict=True)
            medians = [timing.median for timing in timings]
            panel.plot(sizes, medians, style, color=colour, lw=width, marker=marker, ms=4.5, label=label)
            if contender == "asyncdist":
                panel.fill_between(sizes, medians, [timing.p99 for timing in timings], color=colour, alpha=0.12, lw=0)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks([row.nbytes for row in rows])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(round(value))))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    panel.xaxis.set_minor_locator(NullLocator())
    span = panel.get_ylim()[1] / panel.get_ylim()[0]
    panel.yaxis.set_major_locator(LogLocator(subs=(1,) if span > 300 else (1, 2, 5)))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_title(f"{name}, {rows[0].ranks} ranks", loc="left", color=_INK, fontweight="bold")
    panel.set_ylabel("median time of a call (band: to p99)", color=_INK, fontsize=9)
    panel.grid(color=_GRID, lw=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=_INK, labelsize=8.5, length=0, which="both")
    panel.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _tick(seconds: float) -> str:
    """Write a round time without superfluous digits: ``20 µs``."""
    unit, name = next(((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= unit), (1e-6, "µs"))
    return f"{seconds / unit:.3g} {name}"
