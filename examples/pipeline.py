"""Cut a network into stages, one per rank, train it in a pipeline on handwritten digits, and plot the schedule.

    torchrun --nproc-per-node=2 examples/pipeline.py                    # 2 to 4 ranks
    torchrun --nproc-per-node=2 examples/pipeline.py --backend gloo     # the same over gloo, to compare

Only the backend's name belongs to asyncdist; the rest is stock torch. A batch goes through the stages in micro-batches:
activations are sent to the next rank, gradients back to the one before. GPipe does all forward passes first, then all
backward passes, and so keeps every micro-batch's activations; 1F1B turns back as soon as it can, and keeps no more than
there are stages. Either way (stages - 1) of (micro-batches + stages - 1) parts of the time pass idle.

The data are the 1,797 scans of 8×8 pixels that scikit-learn ships. Both schedules train from the same beginning. At the end
rank 0 compares their weights with those of a single process, prints what a step takes, and draws a step of each as it was
measured into out/pipeline.png: which rank works at which micro-batch when. It exits with 1 if any weight differs by more
than 1e-4.
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
from matplotlib.backend_bases import FigureCanvasBase
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import asyncdist.torch_backend  # noqa: F401  # registers the back end "asyncdist"

arguments = argparse.ArgumentParser(description="Train in a pipeline; see the head of this file.")
arguments.add_argument("--backend", default="asyncdist", help="of torch.distributed: asyncdist, or gloo to compare")
arguments.add_argument("--steps", type=int, default=100, help="steps with each schedule")
arguments.add_argument("--batch", type=int, default=256, help="digits a step")
arguments.add_argument("--micro-batches", type=int, default=8, help="parts of a batch")
arguments.add_argument("--width", type=int, default=512, help="features between layers")
arguments.add_argument("--lr", type=float, default=0.05)
arguments.add_argument("--seed", type=int, default=0, help="of the first weights and the batches")
arguments.add_argument("--out", type=Path, default=Path("out/pipeline.png"), help="where the picture goes")

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
LAYERS = 12  # shared out evenly: over 2, 3 or 4 ranks
HELD_OUT = 360  # digits that are not trained on

# -- the data: every rank draws the same batches, the first uses the scans and the last the labels -------------


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    mixed = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.data, dtype=torch.float32).sub(4.9).div(6.0)[mixed], torch.tensor(digits.target)[mixed]


def batch_of(options: argparse.Namespace, number: int, count: int) -> torch.Tensor:
    """Return which digits step ``number`` takes."""
    dice = torch.Generator().manual_seed(1_000_003 * options.seed + number)
    return torch.randint(HELD_OUT, count, (options.batch,), generator=dice)


# -- the model -------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.body(x)
        return out


def network(options: argparse.Namespace) -> nn.Sequential:
    """Return the whole network, the same on every rank; a stage is a slice of it."""
    torch.manual_seed(options.seed)
    layers = (Layer(options.width) for _ in range(LAYERS))
    return nn.Sequential(nn.Linear(64, options.width), *layers, nn.Linear(options.width, 10))


def cut(whole: nn.Sequential, stages: int) -> list[nn.Sequential]:
    """Cut a network into stages of as many layers each; the first also takes in scans, the last also answers."""
    share = LAYERS // stages
    ends = [0, *(1 + stage * share for stage in range(1, stages)), len(whole)]
    return [nn.Sequential(*list(whole)[first:last]) for first, last in pairwise(ends)]


def optimizer_of(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)


# -- a stage that notes when it computes ---------------------------------------------------------------------


@dataclass
class Span:
    """A pass of one micro-batch through this rank's stage, in seconds of the machine's clock."""

    kind: str
    micro_batch: int
    started: float
    finished: float


class TimedStage(PipelineStage):
    """A stage that remembers the spans of the step that goes on."""

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
    """What a rank keeps of its training with one schedule. Only the last stage knows losses."""

    stage: nn.Module
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    timelines: list[list[Span]] = field(default_factory=list)

    def most_held(self) -> int:
        """Return how many micro-batches' activations lay here at once, at most."""
        balance = most = 0
        for span in self.timelines[-1]:
            balance += 1 if span.kind == "forward" else -1
            most = max(most, balance)
        return most


def train(name: str, options: argparse.Namespace, console: Console) -> Run:
    """Train from the beginning with a schedule."""
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
            dist.barrier()  # so that what is measured begins at the same moment everywhere
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
    """Return a bar for rank 0's terminal."""
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
    """Train the whole network in this process, whole batches at once."""
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


# -- what all ranks have, on rank 0 -----------------------------------------------------------------------------


@dataclass
class Result:
    """A schedule's training, of all ranks."""

    name: str
    model: nn.Sequential
    losses: list[float]
    seconds: list[float]
    timelines: list[list[Span]]
    most_held: list[int]

    def idle(self) -> float:
        """Return the share of the ranks' time, from the first pass to the last, in which none was computed."""
        spans = [span for timeline in self.timelines for span in timeline]
        return 1 - sum(span.finished - span.started for span in spans) / (self.length() * len(self.timelines))

    def length(self) -> float:
        """Return the seconds from the first pass to the last."""
        spans = [span for timeline in self.timelines for span in timeline]
        return max(span.finished for span in spans) - min(span.started for span in spans)


def together(name: str, run: Run, options: argparse.Namespace) -> Result | None:
    """Bring to rank 0 what the ranks have: weights, losses, and the timeline of the step of median length."""
    by_length = sorted(range(len(run.seconds)), key=run.seconds.__getitem__)
    median = [by_length[len(by_length) // 2]]
    dist.broadcast_object_list(median, 0)  # rank 0 says which
    mine = (run.stage.state_dict(), run.losses, run.timelines[median[0]], run.most_held())
    ranks = dist.get_world_size()
    everyones: list[Any] | None = [None] * ranks if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyones, 0)
    if everyones is None:
        return None
    model = network(options)
    weights, losses, timelines, most_held = zip(*everyones, strict=True)
    for stage, part in zip(cut(model, ranks), weights, strict=True):
        stage.load_state_dict(part)
    return Result(name, model, losses[-1], run.seconds, list(timelines), list(most_held))


def accuracy_of(model: nn.Module) -> float:
    """Return the share of right answers on held-out digits."""
    scans, labels = read_digits()
    with torch.no_grad():
        return float((model(scans[:HELD_OUT]).argmax(dim=1) == labels[:HELD_OUT]).float().mean())


def difference_of(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of any weight."""
    return max(float((one.state_dict()[name] - each).abs().max()) for name, each in other.state_dict().items())


# -- what is seen of it ------------------------------------------------------------------------------------------


def report(results: list[Result], alone: Run, title: str, micro_batches: int, console: Console) -> None:
    """Print the table."""
    stages = len(results[0].timelines)
    everyone: list[Result | Run] = [*results, alone]
    table = Table("", *(result.name for result in results), "one process", title=title, title_justify="left")
    table.add_row("a step, median", *(f"{1000 * statistics.median(each.seconds):.1f} ms" for each in everyone))
    bubble = (stages - 1) / (micro_batches + stages - 1)
    table.add_row(f"idle (in theory {bubble:.0%})", *(f"{result.idle():.0%}" for result in results))
    table.add_row("micro-batches held", *(" ".join(map(str, result.most_held)) for result in results))
    table.add_row("loss", *(f"{each.losses[0]:.3f} to {each.losses[-1]:.3f}" for each in everyone))
    models = [*(result.model for result in results), alone.stage]
    table.add_row("test accuracy", *(f"{accuracy_of(model):.4f}" for model in models))
    table.add_row("largest difference", *(f"{difference_of(result.model, alone.stage):.1e}" for result in results))
    console.print(table)


def draw(results: list[Result], title: str, path: Path) -> None:
    """Draw a step of each schedule: a row a rank, a bar a pass, its number that of the micro-batch."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    stages = len(results[0].timelines)
    height = 1.6 + len(results) * (0.9 + 0.55 * stages)
    figure, panels = plt.subplots(len(results), figsize=(11, height), sharex=True, layout="constrained", squeeze=False)
    colours = {"forward": "#6baed6", "backward": "#fd8d3c"}
    wide_enough = 12 * max(
        result.length() for result in results
    )  # of a bar, in milliseconds, for a number of two digits
    for axes, result in zip(panels[:, 0], results, strict=True):
        begun = min(span.started for timeline in result.timelines for span in timeline)
        for rank, timeline in enumerate(result.timelines):
            for span in timeline:
                left, width = 1000 * (span.started - begun), 1000 * (span.finished - span.started)
                axes.barh(rank, width, left=left, height=0.8, color=colours[span.kind], edgecolor="white")
                if width > wide_enough:
                    axes.text(left + width / 2, rank, str(span.micro_batch), ha="center", va="center", fontsize=8)
        axes.set_yticks(range(stages), [f"rank {rank}" for rank in range(stages)])
        axes.invert_yaxis()
        axes.set_title(f"{result.name}: {result.idle():.0%} idle", loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("milliseconds since the first pass began")
    figure.legend(handles=[Patch(color=colour, label=kind) for kind, colour in colours.items()], loc="upper right")
    figure.suptitle(f"A median step of {title}", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


# -- from start to end --------------------------------------------------------------------------------------------


def check(options: argparse.Namespace) -> None:
    """Refuse what cannot work, and say what would."""
    for name in ("steps", "batch", "micro_batches", "width"):
        if getattr(options, name) < 1:
            arguments.error(f"--{name.replace('_', '-')} {getattr(options, name)}: one at least")
    ranks, least = int(os.environ.get("WORLD_SIZE", "1")), options.micro_batches
    if ranks < 2 or LAYERS % ranks:
        sys.exit(
            f"{ranks} rank(s) cannot share {LAYERS} layers as a pipeline: torchrun --nproc-per-node=2 (or 3, or 4)"
        )
    if options.batch % least:
        sys.exit(f"{least} micro-batches cannot share a batch of {options.batch}: pass a --batch that {least} divides")
    if least < ranks:
        sys.exit(f"1F1B needs as many micro-batches as ranks: pass --micro-batches {ranks} or more")
    if options.out.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        arguments.error(f"--out {options.out} cannot be drawn: its name must end in .png, .svg or .pdf")
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=options.out.parent).close()  # tried now, not after the training
    except OSError as cause:
        arguments.error(f"--out {options.out} cannot be written ({cause.strerror})")


def main() -> None:
    options = arguments.parse_args()
    check(options)
    torch.set_num_threads(1)  # ranks share this machine's cores
    dist.init_process_group(options.backend)
    console, results = Console(), []
    for name in SCHEDULES:
        run = train(name, options, console)
        if (result := together(name, run, options)) is not None:
            results.append(result)
    title = f"{dist.get_world_size()} ranks over {dist.get_backend()}, {options.micro_batches} micro-batches"
    dist.destroy_process_group()
    if not results:  # rank 0 has them
        return
    alone = train_alone(options, console)
    report(results, alone, title, options.micro_batches, console)
    draw(results, title, options.out)
    print(f"wrote {options.out}")
    if max(difference_of(result.model, alone.stage) for result in results) > 1e-4:
        sys.exit("the weights differ by more than 1e-4")


if __name__ == "__main__":
    main()
