"""Plot time against size on logarithmic axes, with one panel per collective and one line per contender.

Called by `asyncdist.cli.bench`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncdist.cli.bench.plan import BenchPlan
from asyncdist.cli.bench.report.hosts_table import by_hosts, link_share
from asyncdist.cli.bench.report.tables import about_run
from asyncdist.cli.bench.result import Report, ResultRow
from asyncdist.cli.page import size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = tuple[str, str, str, float, str]

# Contender: (label, colour, style, width, marker). The colours are Okabe and Ito's, which colour-blind readers can tell
# apart. Markers and styles differ too.
_LINES = {
    "copy": ("memory copy (the limit)", "#111111", ":", 1.6, ""),
    "raw": ("raw sockets (TCP's limit)", "#9aa0a6", "--", 1.6, ""),
    "gloo": ("gloo", "#d55e00", "-", 1.8, "s"),
    "mpi": ("Open MPI", "#cc79a7", "-", 1.8, "D"),
    "awaited": ("asyncdist, awaited", "#56b4e9", "-", 1.4, "^"),
    "asyncdist": ("asyncdist", "#0072b2", "-", 2.6, "o"),
    "torch": ("asyncdist, through torch.distributed", "#e69f00", "-", 1.8, "P"),
    "idle": ("torch.distributed that does nothing", "#f0c000", ":", 1.4, ""),
    "registered": ("asyncdist, registered tensors", "#009e73", "-", 2.6, "v"),
}
_LINES_ON_DEVICES = {
    "copy": ("one process alone (the limit)", "#111111", ":", 1.6, ""),
    "gloo": _LINES["gloo"],
    "torch's nccl": ("torch's NCCL", "#e69f00", "-", 1.8, "P"),
    "staged": ("asyncdist, through the host", "#9aa0a6", "--", 1.4, "x"),
    "awaited": _LINES["awaited"],
    "nccl": ("asyncdist over NCCL", "#cc79a7", "-", 1.8, "D"),
    "cuda_ipc": ("asyncdist over mapped memory", "#009e73", "-", 1.8, "v"),
    "asyncdist": _LINES["asyncdist"],
}
_FURTHER = ("#56b4e9", "--", 1.4, "x")  # a further transport
_PANELS_ABREAST = 3
_INK, _GRID = "#333333", "#e4e4e4"


def benchmark_figure(report: Report) -> Figure:
    """Return the report as a figure. Collectives without sizes are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sized = [row for row in report.of_kind("rows") or report.of_kind("device_rows") if row.nbytes]
    names = list(dict.fromkeys(row.name for row in sized))
    between = by_hosts(report) if report.fewer_hosts and report.plan.link else {}
    count = len(names) + len(between)
    abreast = min(count, _PANELS_ABREAST) or 1
    lines = -(-count // abreast) or 1
    spare_width = 0.0 if count < lines * abreast else 2.6
    figure = Figure(figsize=(0.8 + 5.2 * abreast + spare_width, 0.6 + 4.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(lines, abreast, squeeze=False, sharey=not between).flat)
    drawn = _lines_on_devices(sized) if report.plan.device == "cuda" else _lines(report.plan)
    for panel, name in zip(panels, names, strict=False):
        _panel(panel, [row for row in sized if row.name == name], drawn)
    for panel, (name, points) in zip(panels[len(names) :], between.items(), strict=False):
        _hosts_panel(panel, name, points, drawn)
    spare = panels[count:]
    for panel in spare:
        panel.set_axis_off()
    if names:
        _legend(figure, panels[0], spare)
    columns = int(15 * figure.get_figwidth())
    about = "; ".join(filter(None, [sized[0].device if sized else "", about_run(report)]))
    figure.supxlabel(textwrap.fill(about, columns), fontsize=7.5, color="#666666")
    return figure


def _lines(plan: BenchPlan) -> dict[str, Line]:
    """Return how each contender of the plan is drawn, in the order of drawing."""
    further = {name: (f"asyncdist over {name}", *_FURTHER) for name in plan.transports[1:]}
    behind, front = ("copy", "idle", "raw", "gloo", "mpi"), ("awaited", "torch", "asyncdist", "registered")
    order = (*behind, *further, *front)
    return {name: {**_LINES, **further}[name] for name in order if name in plan.contenders}


def _lines_on_devices(rows: Sequence[ResultRow]) -> dict[str, Line]:
    """Return how each contender that was measured on devices is drawn, in the order of drawing."""
    return {name: line for name, line in _LINES_ON_DEVICES.items() if any(name in row.timings for row in rows)}


def _legend(figure: Any, panel: Any, spare: Sequence[Any]) -> None:
    """Draw one legend: in the place of a missing panel, or next to the panels if none is missing."""
    handles, labels = panel.get_legend_handles_labels()
    style = {"frameon": False, "fontsize": 9.5, "labelspacing": 0.9, "handlelength": 3}
    if spare:
        spare[0].legend(handles[::-1], labels[::-1], loc="center", **style)
    else:
        figure.legend(handles[::-1], labels[::-1], loc="outside right center", **style)


def _panel(panel: Any, rows: Sequence[ResultRow], lines: Mapping[str, Line]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    for contender, (label, colour, style, width, marker) in lines.items():
        points = [(row.nbytes, row.timings[contender]) for row in rows if contender in row.timings]
        sizes, medians = [nbytes for nbytes, _ in points], [timing.median for _, timing in points]
        panel.plot(sizes, medians, style, color=colour, lw=width, marker=marker, ms=4.5, label=label)
        if contender == "asyncdist":
            panel.fill_between(sizes, medians, [timing.p99 for _, timing in points], color=colour, alpha=0.12, lw=0)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks([row.nbytes for row in rows])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(round(value))))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    panel.xaxis.set_minor_locator(NullLocator())
    span = panel.get_ylim()[1] / panel.get_ylim()[0]
    panel.yaxis.set_major_locator(LogLocator(subs=(1,) if span > 300 else (1, 2, 5)))
    panel.yaxis.set_minor_formatter(NullFormatter())
    labels = "size of the tensor", "median time of a call (band: to p99)"
    ranks = f"{rows[0].ranks} rank{'s' * (rows[0].ranks > 1)}"
    _finish(panel, f"{rows[0].name}, {ranks}{', CUDA tensors' * bool(rows[0].device)}", *labels)


def _hosts_panel(
    panel: Any, name: str, points: Sequence[tuple[BenchPlan, ResultRow]], lines: Mapping[str, Line]
) -> None:
    from matplotlib.ticker import PercentFormatter

    hosts = [plan.hosts for plan, _ in points]
    for contender, (label, colour, style, width, marker) in lines.items():
        shares = [link_share(plan, row, contender) for plan, row in points]
        if None not in shares:
            panel.plot(hosts, shares, style, color=colour, lw=width, marker=marker, ms=4.5, label=label)
    panel.set_xticks(hosts)
    panel.set_ylim(0, 1.02)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    title = f"{name}, {size(points[-1][1].nbytes)}, links of {points[-1][0].link}"
    _finish(panel, title, "number of hosts", "share of the link")


def _finish(panel: Any, title: str, across: str, up: str) -> None:
    panel.set_title(title, loc="left", color=_INK, fontweight="bold")
    panel.set_xlabel(across, color=_INK, fontsize=9)
    if panel.get_subplotspec().is_first_col() or not panel.get_shared_y_axes().get_siblings(panel)[1:]:
        panel.set_ylabel(up, color=_INK, fontsize=9)
    panel.grid(color=_GRID, lw=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=_INK, labelsize=8.5, length=0, which="both")
    panel.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _short(nbytes: int) -> str:
    """Write a size briefly: ``64K``."""
    return size(nbytes).removesuffix("iB").replace(" ", "")


def _tick(seconds: float) -> str:
    """Write a round time without trailing digits: ``20 µs``."""
    unit, name = next(((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= unit), (1e-6, "µs"))
    return f"{seconds / unit:.3g} {name}"
