"""Split every layer of a small transformer over the ranks, train it on handwritten digits, and compare with one process.

    torchrun --nproc-per-node=2 examples/tensor_parallel.py                    # 1, 2 or 4 ranks
    torchrun --nproc-per-node=2 examples/tensor_parallel.py --backend gloo     # the same over gloo, to compare

Only the backend's name belongs to asyncdist; the rest is stock torch. All ranks see the same digits. Between layers each
holds some patches of each digit (sequence parallel); inside a layer each computes some heads and some
features of all patches (column-wise, then row-wise). So a layer needs two exchanges forward and two backward, small and
on the critical path: their latency matters.

The data are the 1,797 scans of 8×8 pixels that scikit-learn ships. At the end rank 0 trains once more alone, prints
how far the two are from each other, what a step takes and exchanges, and draws both losses into out/tensor_parallel.png.
It exits with 1 if any weight differs by more than 1e-4.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import asyncdist.torch_backend  # noqa: F401  # registers the back end "asyncdist"

arguments = argparse.ArgumentParser(description="Train with tensor parallelism; see the head of this file.")
arguments.add_argument("--backend", default="asyncdist", help="of torch.distributed: asyncdist, or gloo to compare")
arguments.add_argument("--steps", type=int, default=300)
arguments.add_argument("--batch", type=int, default=64, help="digits a step")
arguments.add_argument("--lr", type=float, default=0.03, help="peak learning rate")
arguments.add_argument("--seed", type=int, default=0, help="of the first weights and the batches")
arguments.add_argument("--out", type=Path, default=Path("out/tensor_parallel.png"), help="where the picture goes")

PATCHES, PIXELS = 16, 4  # a digit is cut into 16 patches of 2×2 pixels
WIDTH, HEADS, LAYERS = 64, 4, 2
WARMUP = 20  # steps in which the learning rate rises

# -- the data ---------------------------------------------------------------------------------------


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return patches (digit, patch, what is in it and where it lies) and labels, always in the same mixed order."""
    digits = load_digits()
    scans = torch.tensor(digits.images, dtype=torch.float32).sub(4.9).div(6.0)
    patches = scans.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, PATCHES, PIXELS)
    places = torch.eye(PATCHES).expand(len(patches), -1, -1)
    mixed = torch.randperm(len(patches), generator=torch.Generator().manual_seed(0))
    return torch.cat([patches, places], dim=2)[mixed], torch.tensor(digits.target)[mixed]


# -- the model: nothing in it knows of ranks --------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # As many heads as there are features here: all of them, or those of this rank.
        split = [each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in self.projections()]
        seen = nn.functional.scaled_dot_product_attention(*split)
        mixed: torch.Tensor = self.mix(seen.transpose(1, 2).flatten(2))
        return mixed

    def projections(self) -> list[nn.Module]:
        return [self.query, self.key, self.value]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_before_attention, self.norm_before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_before_attention(x))
        out: torch.Tensor = x + self.mlp(self.norm_before_mlp(x))
        return out


class Reader(nn.Module):
    """Reads digits: every patch votes for one, having looked at the others."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)  # every rank makes the same weights; parallelize_module keeps this rank's part of them
        super().__init__()
        self.embed = nn.Linear(PIXELS + PATCHES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        x = self.embed(patches)
        for block in self.blocks:
            x = block(x)
        votes: torch.Tensor = self.head(self.norm(x)).mean(dim=1)
        return votes


# -- how it is split ----------------------------------------------------------------------------------

BY_PATCH = Shard(1)  # of (digit, patch, feature)

BLOCK_PLAN: dict[str, ParallelStyle] = {
    "norm_before_attention": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=BY_PATCH, desired_input_layouts=Replicate()),  # an all-gather
    "attention.query": ColwiseParallel(),  # columns are features: whole heads
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.mix": RowwiseParallel(output_layouts=BY_PATCH),  # a reduce-scatter
    "norm_before_mlp": SequenceParallel(),
    "mlp.0": ColwiseParallel(input_layouts=BY_PATCH),  # an all-gather
    "mlp.2": RowwiseParallel(output_layouts=BY_PATCH),  # a reduce-scatter
}

PLAN: dict[str, ParallelStyle] = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=BY_PATCH),  # a reduce-scatter
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=BY_PATCH, output_layouts=Replicate()),
}


def divide(model: Reader, mesh: DeviceMesh) -> Reader:
    """Leave each rank its part of every layer."""
    for block in model.blocks:
        parallelize_module(block, mesh, BLOCK_PLAN)
    parallelize_module(model, mesh, PLAN)
    return model


# -- training: the same for the model in parts and the whole one -----------------------------------------


class Training:
    """A model, its optimizer, and the loss and time of every step."""

    def __init__(self, model: nn.Module, options: argparse.Namespace) -> None:
        self.model, self.options = model, options
        self.optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
        self.inputs, self.labels = read_digits()
        self.held_out = 360
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        """Take the next step; its batch depends on its number and the seed alone."""
        started, number = perf_counter(), len(self.losses)
        dice = torch.Generator().manual_seed(1_000_003 * self.options.seed + number)
        batch = torch.randint(self.held_out, len(self.inputs), (self.options.batch,), generator=dice)
        # Up, then down to nothing: a rate that stays high would let differences of one rounding grow without end.
        rate = min((number + 1) / WARMUP, 1 - number / self.options.steps)
        self.optimizer.param_groups[0]["lr"] = self.options.lr * max(0.0, min(1.0, rate))
        loss = nn.functional.cross_entropy(self.model(self.inputs[batch]), self.labels[batch])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(perf_counter() - started)

    def accuracy(self) -> float:
        """Return the share of right answers on held-out digits."""
        with torch.no_grad():
            right = self.model(self.inputs[: self.held_out]).argmax(dim=1) == self.labels[: self.held_out]
        return float(right.float().mean())


def train(training: Training, what: str, console: Console, shown: bool) -> None:
    """Take all steps, with a bar on the terminal."""
    steps = training.options.steps
    bar = Progress(
        TextColumn(f"[bold]{what:>14}"),
        BarColumn(bar_width=36),
        MofNCompleteColumn(),
        TextColumn("loss [cyan]{task.fields[loss]:.4f}[/]  [green]{task.fields[speed]:,.0f}[/] steps/s"),
        TimeElapsedColumn(),
        console=console,
        disable=not shown or not console.is_terminal,
    )
    with bar:
        task = bar.add_task("training", total=steps, loss=0.0, speed=0.0)
        for number in range(1, steps + 1):
            training.step()
            loss, seconds = statistics.fmean(training.losses[-20:]), statistics.median(training.seconds[-20:])
            bar.update(task, advance=1, loss=loss, speed=1 / seconds)
            if shown and not console.is_terminal and number % max(1, steps // 5) == 0:
                print(f"{what}, step {number:4d}  loss {loss:.4f}  {1 / seconds:,.0f} steps/s", flush=True)


# -- what is seen of it ------------------------------------------------------------------------------


def exchanges(training: Training) -> dict[str, int]:
    """Return how often a step calls each collective, by name: one more step, watched."""
    with warnings.catch_warnings(), CommDebugMode() as seen:
        warnings.simplefilter("ignore")  # the mode's hooks wonder that pixels get no gradient
        training.step()
    counts: dict[Any, int] = seen.get_comm_counts()
    return {str(kind).rpartition(".")[2]: count for kind, count in counts.items() if count}


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all weights, whole, on every rank."""
    parts = {name: part for name, part in model.named_parameters() if isinstance(part, DTensor)}
    return {name: part.full_tensor().detach().clone() for name, part in parts.items()}


def draw(split: Training, whole: Training, title: str, path: Path) -> None:
    """Draw both losses, and by how much they differ."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, gap) = plt.subplots(2, figsize=(10, 7), height_ratios=(2, 1), sharex=True, layout="constrained")
    steps = range(1, len(whole.losses) + 1)
    losses = split.losses[: len(whole.losses)]
    curves.plot(steps, losses, color="#9ecae1", linewidth=3, label=title)
    curves.plot(steps, whole.losses, color="#08519c", linewidth=1, linestyle="--", label="one process")
    curves.set(ylabel="cross-entropy loss", yscale="log")
    curves.set_title("Handwritten digits, every layer split over the ranks", loc="left", weight="bold")
    curves.legend(frameon=False)
    apart = [abs(one - other) for one, other in zip(losses, whole.losses, strict=True)]
    gap.plot(steps, apart, ".", markersize=3, color="#d94801")
    gap.set(
        xlabel="step", ylabel="difference of the losses", yscale="log" if any(apart) else "linear", xlim=(0, len(steps))
    )
    for axes in (curves, gap):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


# -- from start to end -------------------------------------------------------------------------------


def start(backend: str) -> DeviceMesh:
    """Join the other ranks, all in one mesh; without a launcher, be a world of one."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if HEADS % ranks:
        sys.exit(f"{ranks} ranks cannot share {HEADS} heads evenly: start 1, 2 or 4 ranks")
    torch.set_num_threads(1)  # ranks share this machine's cores
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))


def main() -> None:
    options = arguments.parse_args()
    for name in ("steps", "batch"):
        if getattr(options, name) < 1:
            arguments.error(f"--{name} {getattr(options, name)}: one at least")
    if options.out.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        arguments.error(f"--out {options.out} cannot be drawn: its name must end in .png, .svg or .pdf")
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=options.out.parent).close()  # tried now, not after the training
    except OSError as cause:
        arguments.error(f"--out {options.out} cannot be written ({cause.strerror})")
    mesh, console = start(options.backend), Console()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    split = Training(divide(Reader(options.seed), mesh["tensor"]), options)
    what = f"{ranks} rank{'s' * (ranks > 1)}"
    train(split, what, console, shown=rank == 0)
    weights, accuracy, title = gathered(split.model), split.accuracy(), f"{what} over {dist.get_backend()}"
    parts = sum(part.to_local().numel() for part in split.model.parameters() if isinstance(part, DTensor))
    counts = exchanges(split)
    dist.destroy_process_group()
    if rank != 0:
        return

    whole = Training(Reader(options.seed), options)
    train(whole, "one process", console, shown=True)
    difference = max(float((weights[name] - each).abs().max()) for name, each in whole.model.state_dict().items())
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_row("weights on rank 0", f"{parts:,} of {sum(each.numel() for each in weights.values()):,}")
    table.add_row("a step exchanges", ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing")
    table.add_row("a step, median", f"{1000 * statistics.median(split.seconds):.1f} ms")
    table.add_row("in one process", f"{1000 * statistics.median(whole.seconds):.1f} ms")
    table.add_row("loss", f"{split.losses[0]:.4f} to {split.losses[options.steps - 1]:.4f}")
    table.add_row("test accuracy", f"{accuracy:.4f}, of one process {whole.accuracy():.4f}")
    table.add_row("largest difference of a weight", f"{difference:.1e}")
    console.print(table)
    draw(split, whole, title, options.out)
    print(f"wrote {options.out}")
    if difference > 1e-4:
        sys.exit("the weights differ by more than 1e-4")


if __name__ == "__main__":
    main()
