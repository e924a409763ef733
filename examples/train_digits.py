"""Train a small convolutional network on handwritten digits, on any number of ranks.

    torchrun --nproc-per-node=2 examples/train_digits.py        # two processes on this machine
    python examples/train_digits.py                             # one process, no launcher

The data are the 1,797 scans of 8×8 pixels that scikit-learn includes. Each rank computes the gradients of its share of
every batch. asyncdist averages them over the ranks during the backward pass, so every rank makes the same update. At the
end rank 0 prints the accuracy on held-out digits, trains once more alone on the same global batches, compares the weights,
and plots the loss and the timeline of one step in out/train_digits.png. It exits with 1 if the accuracy is below 0.97,
which takes at least five epochs, or if any weight differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter

import matplotlib as mpl
import torch
from matplotlib.backend_bases import FigureCanvasBase
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import nn

import asyncdist.sync as dist
from asyncdist.ddp import DistributedDataParallel, StepTimes
from asyncdist.ddp.sampler import DistributedSampler

mpl.use("Agg")
import matplotlib.pyplot as plt

arguments = argparse.ArgumentParser(description="Train on handwritten digits; see the first lines of this file.")
arguments.add_argument("--epochs", type=int, default=15, help="15 by default; fewer than five miss the accuracy")
arguments.add_argument("--seed", type=int, default=0, help="seed of the initial weights, the batches and the shifts")
arguments.add_argument("--batch", type=int, default=64, help="samples per step on all ranks together")
arguments.add_argument("--lr", type=float, default=0.05, help="peak learning rate")
arguments.add_argument("--out", type=Path, default=Path("out/train_digits.png"), help="file of the plot")
options = arguments.parse_args()
if options.epochs < 1:
    arguments.error(f"--epochs {options.epochs}: must be at least 1")
if options.batch < int(os.environ.get("WORLD_SIZE", "1")):
    arguments.error(f"--batch {options.batch}: each rank needs at least one sample")
if options.out.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
    arguments.error(f"--out {options.out}: the name must end in .png, .svg or .pdf")
try:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=options.out.parent).close()  # fail before the training, not after it
except OSError as cause:
    arguments.error(f"--out {options.out} cannot be written ({cause.strerror})")

# -- the world --------------------------------------------------------------------------------------

torch.set_num_threads(1)  # the ranks share the cores of this machine
if "RANK" in os.environ:
    dist.init_process_group()  # reads rank, world size and rank 0's address from torchrun's variables
else:
    dist.init_process_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
rank, world_size = dist.get_rank(), dist.get_world_size()
ranks = f"{world_size} rank{'s' * (world_size > 1)}"

# -- the data ---------------------------------------------------------------------------------------

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits.target)
shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
held_out, training = shuffled[:360], shuffled[360:]
mean, std = images[training].mean(), images[training].std()
images = (images - mean) / std
background = -float(mean / std)  # the normalised value of an empty pixel


def shifted(epoch: int) -> torch.Tensor:
    """Return the training images, each shifted by up to a pixel; the shifts depend only on the epoch and the seed."""
    generator = torch.Generator().manual_seed(1000 * options.seed + epoch)
    down, right = torch.randint(3, (2, len(training)), generator=generator)
    windows = nn.functional.pad(images[training], (1, 1, 1, 1), value=background).unfold(2, 8, 1).unfold(3, 8, 1)
    return windows[torch.arange(len(training)), 0, down, right].unsqueeze(1)


# -- the model --------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    # GroupNorm instead of BatchNorm: the result for a sample does not depend on the other samples of the rank's batch.
    # GELU instead of ReLU: the function is smooth, so the rounding errors of the two compared runs stay small.
    torch.manual_seed(options.seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.GroupNorm(8, 64),
        nn.GELU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.GroupNorm(8, 64),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.GELU(),
        nn.Linear(128, 10),
    )


share = options.batch // world_size  # samples per step on each rank
steps_per_epoch = -(-len(DistributedSampler(training)) // share)
total_steps = options.epochs * steps_per_epoch


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=total_steps, pct_start=0.2)


# -- training ---------------------------------------------------------------------------------------

# Buckets of 4 KiB instead of 25 MiB: about one per layer, so that the timeline of this small network shows several.
model = DistributedDataParallel(network(), bucket_cap_mb=1 / 256)
optimizer, schedule = optimizer_of(model)
sampler = DistributedSampler(training, seed=options.seed)
losses: list[float] = []
timelines: list[StepTimes] = []

console = Console()
progress = Progress(
    TextColumn("[bold]epoch {task.fields[epoch]:>2}"),
    BarColumn(bar_width=36),
    MofNCompleteColumn(),
    TextColumn("loss [cyan]{task.fields[loss]:.4f}[/]  [green]{task.fields[speed]:,.0f}[/] samples/s"),
    TimeElapsedColumn(),
    console=console,
    disable=rank != 0 or not console.is_terminal,
)
started = perf_counter()
with progress:
    bar = progress.add_task("training", total=total_steps, epoch=1, loss=0.0, speed=0.0)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        inputs, epoch_started = shifted(epoch), perf_counter()
        for batch in torch.tensor(list(sampler)).split(share):
            loss = nn.functional.cross_entropy(model(inputs[batch]), labels[training[batch]])
            optimizer.zero_grad()
            loss.backward()  # returns with gradients averaged over the ranks
            optimizer.step()
            schedule.step()

            losses.append(loss.item())
            if model.last_step is not None:
                timelines.append(model.last_step)
            speed = len(losses) * share * world_size / (perf_counter() - started)
            progress.update(bar, advance=1, epoch=epoch + 1, loss=statistics.fmean(losses[-20:]), speed=speed)
        if rank == 0 and not console.is_terminal:
            mean_loss = statistics.fmean(losses[-steps_per_epoch:])
            speed = len(sampler) * world_size / (perf_counter() - epoch_started)
            print(f"epoch {epoch + 1:2d}/{options.epochs}  loss {mean_loss:.4f}  {speed:,.0f} samples/s", flush=True)
seconds = perf_counter() - started

# -- testing: every rank classifies its share of the held-out digits -----------------------------------

with torch.no_grad():
    own = held_out[rank::world_size]
    correct = (model.module(images[own]).argmax(dim=1) == labels[own]).sum()
dist.all_reduce(correct)
accuracy = correct.item() / len(held_out)
dist.destroy_process_group()
if rank != 0:
    sys.exit(0)
print(f"{ranks}, {total_steps} steps of {share * world_size} samples in {seconds:.1f} s")
print(f"test accuracy {accuracy:.4f} ({int(correct)} of {len(held_out)} digits)")

# -- the same in a single process: rank 0 trains on the global batches, without communication -----------

alone = network()
optimizer, schedule = optimizer_of(alone)
samplers = [DistributedSampler(training, world_size, each, seed=options.seed) for each in range(world_size)]
for epoch in range(options.epochs):
    inputs, shares = shifted(epoch), []
    for each in samplers:
        each.set_epoch(epoch)
        shares.append(torch.tensor(list(each)).split(share))
    for parts in zip(*shares, strict=True):
        batch = torch.cat(parts)
        loss = nn.functional.cross_entropy(alone(inputs[batch]), labels[training[batch]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
weights = model.module.state_dict()
difference = max(float((weights[name] - each).abs().max()) for name, each in alone.state_dict().items())
print(f"largest difference to the weights of a single process: {difference:.1e}")

# -- the plot -------------------------------------------------------------------------------------------

figure, (curve, chart) = plt.subplots(2, figsize=(10, 8.4), height_ratios=(1, 1.25), layout="constrained")

epochs = [(step + 1) / steps_per_epoch for step in range(total_steps)]
smooth = [statistics.fmean(losses[max(0, step - 19) : step + 1]) for step in range(total_steps)]
curve.plot(epochs, losses, color="#9ecae1", linewidth=0.8, label="each step (rank 0's share)")
curve.plot(epochs, smooth, color="#08519c", linewidth=2, label="mean of 20 steps")
curve.set(xlabel="epoch", ylabel="cross-entropy loss", yscale="log", xlim=(0, options.epochs))
curve.set_title(f"Handwritten digits on {ranks}: {accuracy:.1%} right after {seconds:.1f} s", loc="left", weight="bold")
curve.legend(frameon=False)

# The step of median length, without the first epoch. Each bucket has a colour for its gradients and its all-reduce.
by_length = sorted(timelines[steps_per_epoch:] or timelines, key=lambda times: times.finished - times.backward_started)
step = by_length[len(by_length) // 2]


def at(moment: float) -> float:
    return 1000.0 * (moment - step.backward_started)


computed, ended = at(step.backward_finished), at(step.finished)
colours = plt.get_cmap("viridis")([0.1 + 0.75 * place / len(step.buckets) for place in range(len(step.buckets))])
rows, previous = ["backward"], step.backward_started
chart.axvspan(0, computed, color="0.93", zorder=0)
for row, (times, names, colour) in enumerate(zip(step.buckets, model.bucket_parameters, colours, strict=True), 1):
    layers = dict.fromkeys(type(model.module.get_submodule(name.rpartition(".")[0])).__name__ for name in names)
    rows.append(f"{', '.join(layers)}\n{times.nbytes / 1024:,.1f} KiB")
    chart.barh(0, at(times.ready) - at(previous), left=at(previous), height=0.6, color=colour, edgecolor="white")
    chart.barh(row, at(times.finished) - at(times.started), left=at(times.started), height=0.6, color=colour)
    chart.plot([at(times.ready)] * 2, [0.3, row - 0.3], color=colour, linewidth=1, linestyle=":", zorder=1)
    previous = times.ready
chart.barh(0, ended - computed, left=computed, height=0.6, color="0.85", hatch="///", edgecolor="white")
chart.text(computed / 2, -0.42, "autograd computes", ha="center", color="0.35")
if ended - computed > 0.15 * ended:
    chart.text((computed + ended) / 2, -0.42, "waits for all-reduces", ha="center", color="0.35")
hidden = sum(max(0.0, min(times.finished, step.backward_finished) - times.started) for times in step.buckets)
hidden /= sum(times.finished - times.started for times in step.buckets)
chart.set(xlabel="milliseconds since the start of backward", xlim=(0, 1.02 * ended), ylim=(len(rows) - 0.5, -0.8))
chart.set_yticks(range(len(rows)), rows)
chart.set_ylabel("all-reduce of each bucket", y=0.42)
chart.set_title(
    f"A median step on rank 0: {hidden:.0%} of all-reduce time overlaps backward", loc="left", weight="bold"
)
for axes in (curve, chart):
    axes.spines[["top", "right"]].set_visible(False)
figure.savefig(options.out, dpi=150)
print(f"wrote {options.out}")

if accuracy < 0.97:
    sys.exit("the accuracy is below 0.97: train for at least five --epochs")
if difference > 1e-5:
    sys.exit("the weights differ by more than 1e-5 from those of a single process")
