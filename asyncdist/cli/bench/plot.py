"""Plot time against size on logarithmic axes, with one panel per collective and one line per contender.

Called by `asyncdist.cli.bench`, and by the benchmark of devices.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdist.cli.bench.plan import BenchPlan
from asyncdist.cli.bench.result import Report, by_name
from asyncdist.cli.bench.tables import about_run, by_hosts, link_share
from asyncdist.cli.page import size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = tuple[str, str, str, float, str]

# Contender: (label, colour, style, width, marker). The colours are Okabe and Ito's, which colour-blind readers can tell
# apart. Markers and styles differ too.
LINES = {
    "earlier": ("asyncdist, earlier", "#0072b2", ":", 1.4, "."),
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
_FURTHER = ("#56b4e9", "--", 1.4, "x")  # a further transport
_PANELS_ABREAST = 3
_INK, _GRID = "#333333", "#e4e4e4"


class Panel(NamedTuple):
    """One panel: for each contender its points (across, up, p99), of which `LINES` or the like has the looks.

    Attributes:
        hosts: Whether the points are shares of a link by numbers of hosts. Otherwise they are times by sizes.
    """

    title: str
    points: Mapping[str, Sequence[tuple[int, float, float]]]
    hosts: bool = False


def benchmark_figure(report: Report) -> Figure:
    """Return the report as a figure. Collectives without sizes are left out."""
    plan = report.plan
    panels = [
        Panel(
            f"{name}, {plan.ranks} ranks",
            {
                who: [(row.nbytes, (of := row.timings[who]).median, of.p99) for row in rows if who in row.timings]
                for who in plan.contenders
            },
        )
        for name, rows in by_name(row for row in report.rows if row.nbytes).items()
    ]
    for name, points in by_hosts(report).items():
        shares = {
            who: [(at.hosts, share, share) for at, row in points if (share := link_share(at, row, who)) is not None]
            for who in plan.contenders
        }
        title = f"{name}, {size(points[-1][1].nbytes)}, links of {plan.link}"
        panels.append(Panel(title, {who: each for who, each in shares.items() if len(each) == len(points)}, hosts=True))
    return figure_of(panels, _lines(plan), about_run(report))


def _lines(plan: BenchPlan) -> dict[str, Line]:
    """Return how each contender of the plan is drawn, in the order of drawing."""
    further = {name: (f"asyncdist over {name}", *_FURTHER) for name in plan.transports[1:]}
    behind, front = ("copy", "earlier", "idle", "raw", "gloo", "mpi"), ("awaited", "torch", "asyncdist", "registered")
    order = (*behind, *further, *front)
    return {name: {**LINES, **further}[name] for name in order if name in plan.contenders}


def figure_of(panels: Sequence[Panel], lines: Mapping[str, Line], about: str) -> Figure:
    """Return a figure with the panels, one legend, and a text about the run below them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(panels)
    abreast = min(count, _PANELS_ABREAST) or 1
    height = -(-count // abreast) or 1
    spare_width = 0.0 if count < height * abreast else 2.6
    figure = Figure(figsize=(0.8 + 5.2 * abreast + spare_width, 0.6 + 4.2 * height), layout="constrained")
    FigureCanvasAgg(figure)
    shared = not any(panel.hosts for panel in panels)
    all_axes = list(figure.subplots(height, abreast, squeeze=False, sharey=shared).flat)
    for axes, panel in zip(all_axes, panels, strict=False):
        _draw(axes, panel, lines)
    spare = all_axes[count:]
    for axes in spare:
        axes.set_axis_off()
    if panels:
        _legend(figure, all_axes[0], spare)
    figure.supxlabel(textwrap.fill(about, int(15 * figure.get_figwidth())), fontsize=7.5, color="#666666")
    return figure


def _legend(figure: Any, axes: Any, spare: Sequence[Any]) -> None:
    """Draw one legend: in the place of a missing panel, or next to the panels if none is missing."""
    handles, labels = axes.get_legend_handles_labels()
    style = {"frameon": False, "fontsize": 9.5, "labelspacing": 0.9, "handlelength": 3}
    if spare:
        spare[0].legend(handles[::-1], labels[::-1], loc="center", **style)
    else:
        figure.legend(handles[::-1], labels[::-1], loc="outside right center", **style)


def _draw(axes: Any, panel: Panel, lines: Mapping[str, Line]) -> None:
    from matplotlib.ticker import EngFormatter, PercentFormatter

    for contender, (label, colour, style, width, marker) in lines.items():
        if contender not in panel.points:
            continue
        across, up, p99 = zip(*panel.points[contender], strict=True) if panel.points[contender] else ((), (), ())
        axes.plot(across, up, style, color=colour, lw=width, marker=marker, ms=4.5, label=label)
        if contender == "asyncdist" and not panel.hosts:
            axes.fill_between(across, up, p99, color=colour, alpha=0.12, lw=0)
    ticks = sorted({point[0] for points in panel.points.values() for point in points})
    if panel.hosts:
        axes.set_xticks(ticks)
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        _finish(axes, panel.title, "number of hosts", "share of the link")
        return
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [size(nbytes).removesuffix("iB").replace(" ", "") for nbytes in ticks])
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    axes.minorticks_off()
    _finish(axes, panel.title, "size of the tensor", "median time of a call (band: to p99)")


def _finish(axes: Any, title: str, across: str, up: str) -> None:
    axes.set_title(title, loc="left", color=_INK, fontweight="bold")
    axes.set_xlabel(across, color=_INK, fontsize=9)
    if axes.get_subplotspec().is_first_col() or not axes.get_shared_y_axes().get_siblings(axes)[1:]:
        axes.set_ylabel(up, color=_INK, fontsize=9)
    axes.grid(color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=8.5, length=0, which="both")
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
