"""Train on handwritten digits with fewer and fewer exchanges between the ranks, and compare the accuracy with the bytes.

    torchrun --nproc-per-node=2 examples/few_exchanges.py

Each rank trains on its own share of the data. Every method begins with the same weights and takes the same number of
steps: data-parallel training exchanges gradients in each of them, the others rarely. Rank 0 prints a table and plots
out/few_exchanges.png: the held-out accuracy over the bytes that a rank has sent. It exits with 1 if a method ends more
than 0.03 below data-parallel training, as all may with fewer steps.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import asyncdist.sync as dist

try:
    import matplotlib as mpl
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}; in the checkout: pip install '.[examples]'") from None

mpl.use("Agg")
import matplotlib.pyplot as plt

arguments = argparse.ArgumentParser(description="Compare methods with few exchanges; see the first lines of this file.")
arguments.add_argument("--steps", type=int, default=600, help="steps of each method, 600 by default")
arguments.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches")
arguments.add_argument("--out", type=Path, default=Path("out/few_exchanges.png"), help="file of the plot")
options = arguments.parse_args()
if options.steps < 100:
    arguments.error(f"--steps {options.steps}: must be at least 100, for two exchanges of every method")

torch.set_num_threads(1)  # the ranks share the cores of this machine
if "RANK" in os.environ:
    dist.init_process_group()
else:
    dist.init_process_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
rank, world_size = dist.get_rank(), dist.get_world_size()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1)
images, labels = (images - images.mean()) / images.std(), torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
held_out, own = order[:360], order[360 + rank :: world_size]

METHODS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "LocalSGD, every 10": lambda model, inner: dist.LocalSGD(model, inner, every=10),
    "DiLoCo, every 25": lambda model, inner: dist.DiLoCo(model, inner, every=25),
    "DiLoCo, every 25, int8": lambda model, inner: dist.DiLoCo(model, inner, every=25, compress="int8"),
    "streaming, int4": lambda model, inner: dist.DiLoCo(
        model, inner, every=25, fragments=3, delay=5, alpha=0.5, compress="int4"
    ),
}


def accuracy_of(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model(images[held_out]).argmax(dim=1) == labels[held_out]).float().mean().item())


def train(method: str) -> tuple[list[float], list[float]]:
    """Train with a method; return the megabytes that this rank has sent and the accuracies, every 25 steps."""
    progress.update(bar, description=method)
    torch.manual_seed(options.seed)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    parallel = None if method in METHODS else dist.DistributedDataParallel(model)
    gradient_nbytes = sum(parameter.nbytes for parameter in model.parameters())
    choice = torch.Generator().manual_seed(options.seed + rank)
    sent, accuracies = [], []
    with nullcontext() if parallel is not None else METHODS[method](model, inner) as training:
        for step in range(1, options.steps + 1):
            batch = own[torch.randint(len(own), (32,), generator=choice)]
            inner.zero_grad()
            nn.functional.cross_entropy((parallel or model)(images[batch]), labels[batch]).backward()
            if training is None:
                inner.step()
            else:
                training.step()
            if step == options.steps and training is not None:
                training.synchronize()
            progress.advance(bar)
            if step % 50 == 0 or step == options.steps:
                whole = 2 * gradient_nbytes * (world_size - 1) // world_size * step
                sent.append((whole if training is None else training.savings.sent_nbytes) / 1e6)
                accuracies.append(accuracy_of(model))
    return sent, accuracies


console = Console()
columns = (TextColumn("{task.description:22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
with Progress(*columns, console=console, disable=rank != 0 or not console.is_terminal) as progress:
    bar = progress.add_task("", total=options.steps * (1 + len(METHODS)))
    results = {method: train(method) for method in ["data parallel", *METHODS]}
dist.destroy_process_group()
if rank:
    sys.exit(0)

table = Table("method", "held-out accuracy", "MB sent by a rank", "times fewer")
reference, best = results["data parallel"][0][-1], results["data parallel"][1][-1]
figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
for method, (sent, accuracies) in results.items():
    fewer = f"{reference / sent[-1]:,.0f}" if sent[-1] else "-"
    table.add_row(method, f"{accuracies[-1]:.3f}", f"{sent[-1]:,.2f}", fewer)
    axes.plot([max(each, 1e-3) for each in sent], accuracies, marker="o", markersize=3, label=method)
console.print(table)
axes.set(xscale="log", xlabel="MB sent by a rank", ylabel="held-out accuracy")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, loc="lower right")
axes.set_title(f"Handwritten digits on {world_size} ranks, {options.steps} steps", loc="left", weight="bold")
options.out.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(options.out, dpi=150)
print(f"wrote {options.out}")
if min(accuracies[-1] for _, accuracies in results.values()) < best - 0.03:
    sys.exit("a method ends more than 0.03 below data-parallel training")
