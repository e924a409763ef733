"""The times of one training step and of its buckets, and a picture of them for `DistributedDataParallel.timeline`.

`reducer` records them. `draw_step` draws into axes of the caller's, to compare several steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from asyncdist.errors import UsageError
from asyncdist.kernel.tracing.plotting import require_matplotlib


@dataclass(slots=True)
class BucketTimes:
    """Times of one bucket in a step, on the clock of `time.perf_counter` (seconds).

    Attributes:
        index: Place of the bucket in the order of the all-reduces.
        nbytes: Bytes of its gradients.
        ready: When its last gradient arrived.
        started: When its all-reduce started.
        finished: When its all-reduce was complete.
    """

    index: int
    nbytes: int
    ready: float = 0.0
    started: float = 0.0
    finished: float = 0.0

    def stop(self, _: object) -> None:
        """Record the end of the all-reduce."""
        self.finished = perf_counter()


@dataclass(slots=True)
class StepTimes:
    """Times of one forward and backward with communication, on the clock of `time.perf_counter` (seconds).

    Attributes:
        forward_started: When the forward of the wrapper began.
        backward_started: When autograd computed the gradient of the module's output.
        backward_finished: When autograd had computed all gradients.
        finished: When all all-reduces were complete and ``backward()`` returned.
        buckets: Times of each bucket, in the order of the all-reduces.
    """

    backward_started: float
    backward_finished: float = 0.0
    finished: float = 0.0
    buckets: list[BucketTimes] = field(default_factory=list)
    forward_started: float = 0.0

    @property
    def hidden_share(self) -> float:
        """The share of the all-reduces' time that passed while autograd computed; 1 without all-reduces."""
        total = sum(bucket.finished - bucket.started for bucket in self.buckets)
        hidden = sum(max(0.0, min(each.finished, self.backward_finished) - each.started) for each in self.buckets)
        return hidden / total if total > 0.0 else 1.0


if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NAMES = 3
_MOST_ROWS = 16
"""The number of buckets with a label of their own."""


def describe_step(step: StepTimes, names: Sequence[Sequence[str]]) -> str:
    """Return a sentence with the times of a step, how much communication was hidden, and which parameters came last.

    ``names`` are those of the parameters in each bucket.
    """
    last = max(step.buckets, key=lambda bucket: bucket.ready, default=None)
    late = "" if last is None else f"; the last gradients were those of {_some(names[last.index])}"
    return (
        f"forward {_ms(step.backward_started - step.forward_started)}, "
        f"backward {_ms(step.backward_finished - step.backward_started)}, "
        f"wait for all-reduces {_ms(step.finished - step.backward_finished)}: "
        f"{step.hidden_share:.0%} of the all-reduces' time passed during backward{late}"
    )


def timeline_of(step: StepTimes | None, names: Sequence[Sequence[str]], path: str | PathLike[str] | None) -> str:
    """Draw a step into a file, unless that is None, and return its description.

    Raises:
        UsageError: There is no step, matplotlib is not installed, or it cannot write a file with this name.
    """
    if step is None:
        raise UsageError("no backward has averaged gradients yet: call timeline() after one")
    if path is not None:
        _write(step, names, Path(path))
    return describe_step(step, names)


def _write(step: StepTimes, names: Sequence[Sequence[str]], path: Path) -> None:
    require_matplotlib(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.8 + 0.34 * min(len(step.buckets), _MOST_ROWS)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw_step(axes, step, [f"{_some(members)}\n" for members in names])
    axes.set_title(
        f"{step.hidden_share:.0%} of the all-reduces' time passed during backward", loc="left", weight="bold"
    )
    figure.savefig(path, dpi=150)


def draw_step(axes: Axes, step: StepTimes, labels: Sequence[str]) -> None:
    """Draw a step: the first row is what this rank computes, the others are the all-reduces of the buckets.

    Each bucket has a colour, for the time in which its gradients were computed and for its all-reduce.

    Args:
        axes: Axes of matplotlib.
        step: The times of the step.
        labels: The beginning of the label of each bucket; its size follows.
    """
    from matplotlib import colormaps

    begun = step.forward_started or step.backward_started

    def at(moment: float) -> float:
        return 1000.0 * (moment - begun)

    count = len(step.buckets)
    colours = colormaps["viridis"]([0.1 + 0.75 * place / max(count, 1) for place in range(count)])
    computed, ended = at(step.backward_finished), at(step.finished)
    axes.axvspan(0.0, computed, color="0.95", zorder=0)
    axes.barh(0, at(step.backward_started), height=0.6, color="0.6", edgecolor="white")
    previous = step.backward_started
    for bucket in sorted(step.buckets, key=lambda bucket: bucket.ready):
        colour = colours[bucket.index]
        axes.barh(0, at(bucket.ready) - at(previous), left=at(previous), height=0.6, color=colour, edgecolor="white")
        previous = bucket.ready
    for row, bucket in enumerate(step.buckets, 1):
        colour = colours[bucket.index]
        axes.barh(row, at(bucket.finished) - at(bucket.started), left=at(bucket.started), height=0.6, color=colour)
        axes.plot([at(bucket.ready)] * 2, [0.3, row - 0.3], color=colour, linewidth=1, linestyle=":", zorder=1)
    axes.barh(0, ended - computed, left=computed, height=0.6, color="0.88", hatch="///", edgecolor="white")
    if step.forward_started:
        axes.text(at(step.backward_started) / 2, -0.42, "forward", ha="center", color="0.35")
    axes.text((at(step.backward_started) + computed) / 2, -0.42, "backward", ha="center", color="0.35")
    end = 1.02 * ended
    if ended - computed > 0.1 * end:
        axes.text((computed + ended) / 2, -0.42, "waits", ha="center", color="0.35")
    axes.set(xlabel="milliseconds since the start of the step", xlim=(0, end), ylim=(count + 0.5, -0.85))
    rows = [
        "this rank",
        *(f"{label}{_size(bucket.nbytes)}" for label, bucket in zip(labels, step.buckets, strict=True)),
    ]
    every = -(-len(rows) // _MOST_ROWS)
    axes.set_yticks(range(0, len(rows), every), rows[::every])
    axes.spines[["top", "right"]].set_visible(False)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def _ms(seconds: float) -> str:
    return f"{1000.0 * seconds:.2f} ms"


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:,.1f} KiB"
