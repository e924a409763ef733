"""Train a network on handwritten digits with pipeline parallelism, one stage per rank, and plot the schedule.

    torchrun --nproc-per-node=2 examples/pipeline.py                    # 2 to 4 ranks
    torchrun --nproc-per-node=2 examples/pipeline.py --backend gloo     # the same over gloo, to compare

Only the name of the back end is asyncdist's; the rest is stock torch. A batch passes the stages in micro-batches. Each rank
sends activations to the next rank and gradients to the previous one. GPipe runs all forward passes first, then all backward
passes, so a stage holds the activations of every micro-batch. 1F1B starts backward passes as early as possible, so a stage
holds the activations of at most as many micro-batches as there are stages. With both schedules a rank is idle for
(stages - 1) / (micro-batches + stages - 1) of the time.

The data are the 1,797 scans of 8×8 pixels that scikit-learn includes. Both schedules start from the same weights. At the
end rank 0 compares their weights with those of a single process, prints the times of a step, and plots one measured step of
each schedule in out/pipeline.png: when which rank computes which micro-batch. It exits with 1 if any weight differs by
more than 1e-4.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import asyncdist.torch_backend  # noqa: F401  # registers the back end "asyncdist"

try:
    from matplotlib.backend_bases import FigureCanvasBase
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}; in the checkout: pip install '.[examples]'") from None

arguments = argparse.ArgumentParser(description="Train with pipeline parallelism; see the first lines of this file.")
arguments.add_argument("--backend", default="asyncdist", help="back end of torch.distributed, for example gloo")
arguments.add_argument("--steps", type=int, default=100, help="steps with each schedule")
arguments.add_argument("--batch", type=int, default=256, help="digits per step")
arguments.add_argument("--micro-batches", type=int, default=8, help="micro-batches per batch")
arguments.add_argument("--width", type=int, default=512, help="features between layers")
arguments.add_argument("--lr", type=float, default=0.05)
arguments.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the batches")
arguments.add_argument("--out", type=Path, default=Path("out/pipeline.png"), help="file of the plot")

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
LAYERS = 12  # divisible by 2, 3 and 4 ranks
HELD_OUT = 360  # digits for testing

# -- the data: every rank draws the same batches; the first rank uses the scans, the last one the labels ----------


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.data, dtype=torch.float32).sub(4.9).div(6.0)[order], torch.tensor(digits.target)[order]


def batch_of(options: argparse.Namespace, number: int, count: int) -> torch.Tensor:
    """Return the indices of the digits in step ``number``."""
    generator = torch.Generator().manual_seed(1_000_003 * options.seed + number)
    return torch.randint(HELD_OUT, count, (options.batch,), generator=generator)


# -- the model -------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.body(x)
        return out


def network(options: argparse.Namespace) -> nn.Sequential:
    """Return the whole network, equal on every rank; a stage is a slice of it."""
    torch.manual_seed(options.seed)
    layers = (Layer(options.width) for _ in range(LAYERS))
    return nn.Sequential(nn.Linear(64, options.width), *layers, nn.Linear(options.width, 10))


def cut(whole: nn.Sequential, stages: int) -> list[nn.Sequential]:
    """Cut a network into stages of equally many layers; the first also has the input layer, the last the output layer."""
    share = LAYERS // stages
    ends = [0, *(1 + stage * share for stage in range(1, stages)), len(whole)]
    return [nn.Sequential(*list(whole)[first:last]) for first, last in pairwise(ends)]


def optimizer_of(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)


# -- a stage that records when it computes -------------------------------------------------------------------


@dataclass
class Span:
    """A forward or backward pass of one micro-batch on this rank, in seconds of the machine's monotonic clock."""

    kind: str
    micro_batch: int
    started: float
    finished: float


class TimedStage(PipelineStage):
    """A stage that records the spans of the current step."""

    spans: list[Span]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        started = perf_counter()
        out = super().forward_one_chunk(fwd_chunk_id, *args, **named)
        self.spans.append(Span("forward", fwd_chunk_id, started, perf_counter()))
        return out

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **named: Any) -> None:
        started = perf_counter()
        super().backward_one_chunk(bwd_chunk_id, *args, **named)
        self.spans.append(Span("backward", bwd_chunk_id, started, perf_counter()))


# -- training in a pipeline -----------------------------------------------------------------------------------


@dataclass
class Run:
    """One rank's training with one schedule. Only the last stage knows the losses."""

    stage: nn.Module
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    timelines: list[list[Span]] = field(default_factory=list)

    def most_held(self) -> int:
        """Return the largest number of micro-batches whose activations this rank held at the same time."""
        balance = most = 0
        for span in self.timelines[-1]:
            balance += 1 if span.kind == "forward" else -1
            most = max(most, balance)
        return most


def train(name: str, options: argparse.Namespace, console: Console) -> Run:
    """Train from the initial weights with a schedule."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Run(cut(network(options), ranks)[rank])
    stage = TimedStage(run.stage, rank, ranks, torch.device("cpu"))
    schedule = SCHEDULES[name](stage, options.micro_batches, loss_fn=nn.functional.cross_entropy)
    optimizer = optimizer_of(run.stage, options)
    scans, labels = read_digits()
    with bar_of(name, console) as bar:
        task = bar.add_task("training", total=options.steps, speed=0.0)
        for number in range(options.steps):
            batch = batch_of(options, number, len(scans))
            stage.spans = []
            losses: list[torch.Tensor] = []
            dist.barrier()  # so that all ranks start to measure at the same moment
            started = perf_counter()
            optimizer.zero_grad()
            if stage.is_first:
                schedule.step(scans[batch])
            elif stage.is_last:
                schedule.step(target=labels[batch], losses=losses)
            else:
                schedule.step()
            optimizer.step()
            run.seconds.append(perf_counter() - started)
            run.losses.append(sum(loss.item() for loss in losses) / options.micro_batches)
            run.timelines.append(stage.spans)
            bar.update(task, advance=1, speed=1 / statistics.median(run.seconds[-20:]))
    return run


def bar_of(name: str, console: Console) -> Progress:
    """Return a progress bar for rank 0's terminal."""
    return Progress(
        TextColumn(f"[bold]{name:>12}"),
        BarColumn(bar_width=36),
        MofNCompleteColumn(),
        TextColumn("[green]{task.fields[speed]:,.1f}[/] steps/s"),
        TimeElapsedColumn(),
        console=console,
        disable=os.environ["RANK"] != "0" or not console.is_terminal,
    )


def train_alone(options: argparse.Namespace, console: Console) -> Run:
    """Train the whole network in this process, without micro-batches."""
    run = Run(network(options))
    optimizer = optimizer_of(run.stage, options)
    scans, labels = read_digits()
    with bar_of("one process", console) as bar:
        task = bar.add_task("training", total=options.steps, speed=0.0)
        for number in range(options.steps):
            batch, started = batch_of(options, number, len(scans)), perf_counter()
            loss = nn.functional.cross_entropy(run.stage(scans[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.seconds.append(perf_counter() - started)
            run.losses.append(loss.item())
            bar.update(task, advance=1, speed=1 / statistics.median(run.seconds[-20:]))
    return run


# -- the results of all ranks, on rank 0 ------------------------------------------------------------------------


@dataclass
class Result:
    """The training of all ranks with one schedule."""

    name: str
    model: nn.Sequential
    losses: list[float]
    seconds: list[float]
    timelines: list[list[Span]]
    most_held: list[int]

    def idle(self) -> float:
        """Return the share of idle time in all ranks' time, from the first pass to the last."""
        spans = [span for timeline in self.timelines for span in timeline]
        return 1 - sum(span.finished - span.started for span in spans) / (self.length() * len(self.timelines))

    def length(self) -> float:
        """Return the seconds from the first pass to the last."""
        spans = [span for timeline in self.timelines for span in timeline]
        return max(span.finished for span in spans) - min(span.started for span in spans)


def gathered(name: str, run: Run, options: argparse.Namespace) -> Result | None:
    """Gather weights, losses and the timeline of the median step on rank 0; return None on the other ranks."""
    by_length = sorted(range(len(run.seconds)), key=run.seconds.__getitem__)
    median = [by_length[len(by_length) // 2]]
    dist.broadcast_object_list(median, 0)  # every rank returns the same step
    own = (run.stage.state_dict(), run.losses, run.timelines[median[0]], run.most_held())
    ranks = dist.get_world_size()
    of_ranks: list[Any] | None = [None] * ranks if dist.get_rank() == 0 else None
    dist.gather_object(own, of_ranks, 0)
    if of_ranks is None:
        return None
    model = network(options)
    weights, losses, timelines, most_held = zip(*of_ranks, strict=True)
    for stage, part in zip(cut(model, ranks), weights, strict=True):
        stage.load_state_dict(part)
    return Result(name, model, losses[-1], run.seconds, list(timelines), list(most_held))


def accuracy_of(model: nn.Module) -> float:
    """Return the share of correct answers on held-out digits."""
    scans, labels = read_digits()
    with torch.no_grad():
        return float((model(scans[:HELD_OUT]).argmax(dim=1) == labels[:HELD_OUT]).float().mean())


def difference_of(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of any weight."""
    return max(float((one.state_dict()[name] - each).abs().max()) for name, each in other.state_dict().items())


# -- the output --------------------------------------------------------------------------------------------------


def report(results: list[Result], alone: Run, title: str, micro_batches: int, console: Console) -> None:
    """Print the table."""
    stages = len(results[0].timelines)
    everyone: list[Result | Run] = [*results, alone]
    table = Table("", *(result.name for result in results), "one process", title=title, title_justify="left")
    table.add_row("median step", *(f"{1000 * statistics.median(each.seconds):.1f} ms" for each in everyone))
    bubble = (stages - 1) / (micro_batches + stages - 1)
    table.add_row(f"idle (in theory {bubble:.0%})", *(f"{result.idle():.0%}" for result in results))
    table.add_row("micro-batches held", *(" ".join(map(str, result.most_held)) for result in results))
    table.add_row("loss", *(f"{each.losses[0]:.3f} to {each.losses[-1]:.3f}" for each in everyone))
    models = [*(result.model for result in results), alone.stage]
    table.add_row("test accuracy", *(f"{accuracy_of(model):.4f}" for model in models))
    table.add_row("largest difference", *(f"{difference_of(result.model, alone.stage):.1e}" for result in results))
    console.print(table)


def draw(results: list[Result], title: str, path: Path) -> None:
    """Plot one step of each schedule: a row per rank, and a bar per pass with the number of its micro-batch."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    stages = len(results[0].timelines)
    height = 1.6 + len(results) * (0.9 + 0.55 * stages)
    figure, panels = plt.subplots(len(results), figsize=(11, height), sharex=True, layout="constrained", squeeze=False)
    colours = {"forward": "#6baed6", "backward": "#fd8d3c"}
    # Bars of fewer milliseconds have no room for a number of two digits.
    least_width = 12 * max(result.length() for result in results)
    for axes, result in zip(panels[:, 0], results, strict=True):
        begun = min(span.started for timeline in result.timelines for span in timeline)
        for rank, timeline in enumerate(result.timelines):
            for span in timeline:
                left, width = 1000 * (span.started - begun), 1000 * (span.finished - span.started)
                axes.barh(rank, width, left=left, height=0.8, color=colours[span.kind], edgecolor="white")
                if width > least_width:
                    axes.text(left + width / 2, rank, str(span.micro_batch), ha="center", va="center", fontsize=8)
        axes.set_yticks(range(stages), [f"rank {rank}" for rank in range(stages)])
        axes.invert_yaxis()
        axes.set_title(f"{result.name}: {result.idle():.0%} idle", loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("milliseconds since the start of the first pass")
    figure.legend(handles=[Patch(color=colour, label=kind) for kind, colour in colours.items()], loc="upper right")
    figure.suptitle(f"A median step of {title}", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


# -- main ---------------------------------------------------------------------------------------------------------


def check(options: argparse.Namespace) -> None:
    """Exit with advice if the arguments are impossible."""
    for name in ("steps", "batch", "micro_batches", "width"):
        if getattr(options, name) < 1:
            arguments.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    ranks, count = int(os.environ.get("WORLD_SIZE", "1")), options.micro_batches
    if ranks < 2 or LAYERS % ranks:
        sys.exit(f"{ranks} rank(s) cannot share {LAYERS} layers evenly: torchrun --nproc-per-node=2 (or 3, or 4)")
    if options.batch % count:
        sys.exit(
            f"{count} micro-batches cannot share a batch of {options.batch}: pass a multiple of {count} as --batch"
        )
    if count < ranks:
        sys.exit(f"1F1B needs as many micro-batches as ranks: pass --micro-batches {ranks} or more")
    if options.out.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        arguments.error(f"--out {options.out}: the name must end in .png, .svg or .pdf")
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=options.out.parent).close()  # fail before the training, not after it
    except OSError as cause:
        arguments.error(f"--out {options.out} cannot be written ({cause.strerror})")


def main() -> None:
    options = arguments.parse_args()
    check(options)
    torch.set_num_threads(1)  # the ranks share the cores of this machine
    dist.init_process_group(options.backend)
    console, results = Console(), []
    for name in SCHEDULES:
        run = train(name, options, console)
        if (result := gathered(name, run, options)) is not None:
            results.append(result)
    title = f"{dist.get_world_size()} ranks over {dist.get_backend()}, {options.micro_batches} micro-batches"
    dist.destroy_process_group()
    if not results:  # only rank 0 has results
        return
    alone = train_alone(options, console)
    report(results, alone, title, options.micro_batches, console)
    draw(results, title, options.out)
    print(f"wrote {options.out}")
    if max(difference_of(result.model, alone.stage) for result in results) > 1e-4:
        sys.exit("the weights differ by more than 1e-4")


if __name__ == "__main__":
    main()
