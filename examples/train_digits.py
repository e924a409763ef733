"""Train a small convolutional network on handwritten digits, on any number of ranks.

    torchrun --nproc-per-node=2 examples/train_digits.py        # two processes on this machine
    python examples/train_digits.py                             # one process, no launcher
    torchrun --nproc-per-node=2 examples/train_digits.py --device cuda      # on GPUs, of which ranks may share one

The data are the 1,797 scans of 8×8 pixels that scikit-learn includes. Each rank computes the gradients of its share of
every batch. asyncdist averages them over the ranks during the backward pass, so every rank makes the same update. At the
end rank 0 prints the accuracy on held-out digits, trains once more alone on the same global batches, compares the weights,
and plots the loss in out/train_digits.png. On CPUs the plot begins with the timeline of one step of a larger network: over
TCP the all-reduces pass during backward; over shared memory they do so only if the ranks leave a core free. The program
exits with 1 if the accuracy is below 0.97, which takes at least five epochs, or if any weight differs by more than
1e-5.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

import asyncdist.sync as dist
from asyncdist.ddp import DistributedDataParallel, StepTimes
from asyncdist.ddp.sampler import DistributedSampler
from asyncdist.ddp.timeline import describe_step, draw_step

try:
    import matplotlib as mpl
    from matplotlib.backend_bases import FigureCanvasBase
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}; in the checkout: pip install '.[examples]'") from None

mpl.use("Agg")
import matplotlib.pyplot as plt

arguments = argparse.ArgumentParser(description="Train on handwritten digits; see the first lines of this file.")
arguments.add_argument("--epochs", type=int, default=15, help="15 by default; fewer than five miss the accuracy")
arguments.add_argument("--seed", type=int, default=0, help="seed of the initial weights, the batches and the shifts")
arguments.add_argument("--batch", type=int, default=64, help="samples per step on all ranks together")
arguments.add_argument("--lr", type=float, default=0.05, help="peak learning rate")
arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model is; cpu by default")
arguments.add_argument("--out", type=Path, default=Path("out/train_digits.png"), help="file of the plot")
options = arguments.parse_args()
if options.epochs < 1:
    arguments.error(f"--epochs {options.epochs}: must be at least 1")
if options.batch < int(os.environ.get("WORLD_SIZE", "1")):
    arguments.error(f"--batch {options.batch}: each rank needs at least one sample")
if options.device == "cuda" and not torch.cuda.is_available():
    arguments.error("--device cuda: torch sees no CUDA device")
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
device = torch.device(options.device)
if device.type == "cuda":
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = False  # its 10 bits of mantissa would dominate the difference to one process

# -- the data ---------------------------------------------------------------------------------------

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1)
labels = torch.tensor(digits.target, device=device)
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
    ).to(device)


share = options.batch // world_size  # samples per step on each rank
steps_per_epoch = -(-len(DistributedSampler(training)) // share)
total_steps = options.epochs * steps_per_epoch


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=total_steps, pct_start=0.2)


# -- training ---------------------------------------------------------------------------------------

model = DistributedDataParallel(network())
optimizer, schedule = optimizer_of(model)
sampler = DistributedSampler(training, seed=options.seed)
losses: list[float] = []

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

# -- one step of a larger network on the CPU, over shared memory and over TCP ----------------------------


def median_step(transport: str) -> tuple[StepTimes, list[list[str]]]:
    """Return the step of median length of an MLP, and the parameters in each bucket."""
    torch.manual_seed(options.seed)
    layers = [module for _ in range(8) for module in (nn.Linear(512, 512), nn.GELU())]
    with dist.process_group(transport) as group:
        larger = DistributedDataParallel(nn.Sequential(*layers), process_group=group, bucket_cap_mb=2.2)
        times = []
        for _ in range(30):
            larger(torch.randn(256, 512)).square().mean().backward()
            if larger.last_step is not None:
                times.append(larger.last_step)
        times = sorted(times[5:], key=lambda each: each.finished - each.forward_started)
        return times[len(times) // 2], larger.bucket_parameters


dist.destroy_process_group()
steps = {name: median_step(name) for name in ("shm", "tcp")} if world_size > 1 and device.type == "cpu" else {}
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

# The step whose all-reduces overlap most comes first, then the loss and the other one.
steps = dict(sorted(steps.items(), key=lambda item: -item[1][0].hidden_share))
figure = plt.figure(figsize=(10, 8.4 if steps else 4), layout="constrained")
grid = figure.add_gridspec(2, 2) if steps else figure.add_gridspec(1, 1)
curve = figure.add_subplot(grid[-1, 0])
epochs = [(step + 1) / steps_per_epoch for step in range(total_steps)]
smooth = [statistics.fmean(losses[max(0, step - 19) : step + 1]) for step in range(total_steps)]
curve.plot(epochs, losses, color="#9ecae1", linewidth=0.8, label="each step (rank 0's share)")
curve.plot(epochs, smooth, color="#08519c", linewidth=2, label="mean of 20 steps")
curve.set(xlabel="epoch", ylabel="cross-entropy loss", yscale="log", xlim=(0, options.epochs))
curve.set_title(f"Digits on {ranks}: {accuracy:.1%} right after {seconds:.1f} s", loc="left", weight="bold")
curve.legend(frameon=False)
curve.spines[["top", "right"]].set_visible(False)

for place, (transport, (step, names)) in zip((grid[0, :], grid[-1, -1]), steps.items(), strict=False):
    chart = figure.add_subplot(place)
    layers = [dict.fromkeys(name.partition(".")[0] for name in members) for members in names]
    draw_step(chart, step, [f"layer{'s' * (len(each) > 1)} {', '.join(each)}\n" for each in layers])
    over = {"shm": "shared memory", "tcp": "TCP"}[transport]
    title = f"A step over {over}: {step.hidden_share:.0%} of the all-reduces' time passed during backward"
    if transport == "shm" and not step.hidden_share:
        title = "Shared memory: they follow"
        reason = "They run on the cores that compute, and none is free:\nduring backward they would only slow it down."
        chart.text(0.03, 0.06, reason, transform=chart.transAxes, fontsize=8, color="0.35")
    chart.set_title(title, loc="left", weight="bold")
    print(f"one step of 2.1 M parameters over {over}: {describe_step(step, names)}")
figure.savefig(options.out, dpi=150)
print(f"wrote {options.out}")

if accuracy < 0.97:
    sys.exit("the accuracy is below 0.97: train for at least five --epochs")
if difference > 1e-5:
    sys.exit("the weights differ by more than 1e-5 from those of a single process")
