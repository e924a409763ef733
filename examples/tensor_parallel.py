"""Train a small transformer on handwritten digits with tensor parallelism, and compare with a single process.

    torchrun --nproc-per-node=2 examples/tensor_parallel.py                    # 1, 2 or 4 ranks
    torchrun --nproc-per-node=2 examples/tensor_parallel.py --backend gloo     # the same over gloo, to compare

Only the name of the back end is asyncdist's; the rest is stock torch. All ranks train on the same digits. Between layers
each rank holds some patches of every digit (sequence parallel). Inside a layer each rank computes some heads and some
features of all patches (column-wise, then row-wise). A layer therefore needs two exchanges forward and two backward. They
are small and on the critical path, so their latency matters.

The data are the 1,797 scans of 8×8 pixels that scikit-learn includes. At the end rank 0 trains once more alone, prints the
difference of the weights and the time and collectives of a step, and plots both losses in out/tensor_parallel.png. It
exits with 1 if any weight differs by more than 1e-4.
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
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
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

try:
    from matplotlib.backend_bases import FigureCanvasBase
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}; in the checkout: pip install '.[examples]'") from None

arguments = argparse.ArgumentParser(description="Train with tensor parallelism; see the first lines of this file.")
arguments.add_argument("--backend", default="asyncdist", help="back end of torch.distributed, for example gloo")
arguments.add_argument("--steps", type=int, default=300)
arguments.add_argument("--batch", type=int, default=64, help="digits per step")
arguments.add_argument("--lr", type=float, default=0.03, help="peak learning rate")
arguments.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the batches")
arguments.add_argument("--out", type=Path, default=Path("out/tensor_parallel.png"), help="file of the plot")

PATCHES, PIXELS = 16, 4  # a digit consists of 16 patches of 2×2 pixels
WIDTH, HEADS, LAYERS = 64, 4, 2
WARMUP = 20  # steps during which the learning rate rises

# -- the data ---------------------------------------------------------------------------------------


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the patches, of shape (digit, patch, pixels and one-hot position), and the labels, in a fixed random order."""
    digits = load_digits()
    scans = torch.tensor(digits.images, dtype=torch.float32).sub(4.9).div(6.0)
    patches = scans.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, PATCHES, PIXELS)
    positions = torch.eye(PATCHES).expand(len(patches), -1, -1)
    order = torch.randperm(len(patches), generator=torch.Generator().manual_seed(0))
    return torch.cat([patches, positions], dim=2)[order], torch.tensor(digits.target)[order]


# -- the model: independent of the ranks ------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # With tensor parallelism the projections return only this rank's heads.
        projected = (layer(x) for layer in (self.query, self.key, self.value))
        by_head = [each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in projected]
        attended = nn.functional.scaled_dot_product_attention(*by_head)
        mixed: torch.Tensor = self.mix(attended.transpose(1, 2).flatten(2))
        return mixed


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


class Classifier(nn.Module):
    """A transformer over patches; the mean of the patches' outputs classifies the digit."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)  # every rank makes the same weights; parallelize_module keeps this rank's shard
        super().__init__()
        self.embed = nn.Linear(PIXELS + PATCHES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        x = self.embed(patches)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x)).mean(dim=1)
        return logits


# -- the plan: how each layer is split ----------------------------------------------------------------

BY_PATCH = Shard(1)  # dimension 1 of (digit, patch, feature)

BLOCK_PLAN: dict[str, ParallelStyle] = {
    "norm_before_attention": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=BY_PATCH, desired_input_layouts=Replicate()),  # an all-gather
    "attention.query": ColwiseParallel(),  # columns are features, so each rank has whole heads
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


def shard(model: Classifier, mesh: DeviceMesh) -> Classifier:
    """Shard every layer over the ranks of a mesh."""
    for block in model.blocks:
        parallelize_module(block, mesh, BLOCK_PLAN)
    parallelize_module(model, mesh, PLAN)
    return model


# -- training: the same for the sharded model and the whole one ------------------------------------------


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
        """Train one step; its batch depends only on its number and the seed."""
        started, number = perf_counter(), len(self.losses)
        generator = torch.Generator().manual_seed(1_000_003 * self.options.seed + number)
        batch = torch.randint(self.held_out, len(self.inputs), (self.options.batch,), generator=generator)
        # The rate rises, then falls to 0. With a rate that stays high, rounding differences would grow without bound.
        rate = min((number + 1) / WARMUP, 1 - number / self.options.steps)
        self.optimizer.param_groups[0]["lr"] = self.options.lr * max(0.0, min(1.0, rate))
        loss = nn.functional.cross_entropy(self.model(self.inputs[batch]), self.labels[batch])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(perf_counter() - started)

    def accuracy(self) -> float:
        """Return the share of correct answers on held-out digits."""
        with torch.no_grad():
            correct = self.model(self.inputs[: self.held_out]).argmax(dim=1) == self.labels[: self.held_out]
        return float(correct.float().mean())


def train(training: Training, title: str, console: Console, shown: bool) -> None:
    """Train all steps, with a progress bar on the terminal."""
    steps = training.options.steps
    bar = Progress(
        TextColumn(f"[bold]{title:>14}"),
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
                print(f"{title}, step {number:4d}  loss {loss:.4f}  {1 / seconds:,.0f} steps/s", flush=True)


# -- the output --------------------------------------------------------------------------------------


def count_collectives(training: Training) -> dict[str, int]:
    """Train one more step; return how often it calls each collective, by name."""
    with warnings.catch_warnings(), CommDebugMode() as mode:
        warnings.simplefilter("ignore")  # the mode's hooks warn that the inputs get no gradient
        training.step()
    counts: dict[Any, int] = mode.get_comm_counts()
    return {str(kind).rpartition(".")[2]: count for kind, count in counts.items() if count}


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all weights, gathered on every rank."""
    shards = {name: each for name, each in model.named_parameters() if isinstance(each, DTensor)}
    return {name: each.full_tensor().detach().clone() for name, each in shards.items()}


def draw(split: Training, whole: Training, title: str, path: Path) -> None:
    """Plot both losses and their difference."""
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
    differences = [abs(one - other) for one, other in zip(losses, whole.losses, strict=True)]
    gap.plot(steps, differences, ".", markersize=3, color="#d94801")
    scale = "log" if any(differences) else "linear"
    gap.set(xlabel="step", ylabel="difference of the losses", yscale=scale, xlim=(0, len(steps)))
    for axes in (curves, gap):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


# -- main --------------------------------------------------------------------------------------------


def start(backend: str) -> DeviceMesh:
    """Join the other ranks and return a mesh of all; without a launcher, make a world of one rank."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if HEADS % ranks:
        sys.exit(f"{ranks} ranks cannot share {HEADS} heads evenly: start 1, 2 or 4 ranks")
    torch.set_num_threads(1)  # the ranks share the cores of this machine
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))


def main() -> None:
    options = arguments.parse_args()
    for name in ("steps", "batch"):
        if getattr(options, name) < 1:
            arguments.error(f"--{name} {getattr(options, name)}: must be at least 1")
    if options.out.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        arguments.error(f"--out {options.out}: the name must end in .png, .svg or .pdf")
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=options.out.parent).close()  # fail before the training, not after it
    except OSError as cause:
        arguments.error(f"--out {options.out} cannot be written ({cause.strerror})")
    mesh, console = start(options.backend), Console()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    split = Training(shard(Classifier(options.seed), mesh["tensor"]), options)
    size = f"{ranks} rank{'s' * (ranks > 1)}"
    train(split, size, console, shown=rank == 0)
    weights, accuracy, title = gathered(split.model), split.accuracy(), f"{size} over {dist.get_backend()}"
    local = sum(each.to_local().numel() for each in split.model.parameters() if isinstance(each, DTensor))
    counts = count_collectives(split)
    dist.destroy_process_group()
    if rank != 0:
        return

    whole = Training(Classifier(options.seed), options)
    train(whole, "one process", console, shown=True)
    difference = max(float((weights[name] - each).abs().max()) for name, each in whole.model.state_dict().items())
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_row("weights on rank 0", f"{local:,} of {sum(each.numel() for each in weights.values()):,}")
    table.add_row("collectives per step", ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none")
    table.add_row("median step", f"{1000 * statistics.median(split.seconds):.1f} ms")
    table.add_row("median step of one process", f"{1000 * statistics.median(whole.seconds):.1f} ms")
    table.add_row("loss", f"{split.losses[0]:.4f} to {split.losses[options.steps - 1]:.4f}")
    table.add_row("test accuracy", f"{accuracy:.4f}, one process {whole.accuracy():.4f}")
    table.add_row("largest difference of a weight", f"{difference:.1e}")
    console.print(table)
    draw(split, whole, title, options.out)
    print(f"wrote {options.out}")
    if difference > 1e-4:
        sys.exit("the weights differ by more than 1e-4")


if __name__ == "__main__":
    main()
