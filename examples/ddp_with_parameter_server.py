"""Data parallel and parameter server in one model: an embedding on a server, and layers that trainers hold in common.

    python examples/ddp_with_parameter_server.py                  # a server and two trainers
    python examples/ddp_with_parameter_server.py --trainers 3

Tables of embeddings may be larger than the memory of a trainer, and a batch uses few of their rows. So the table is in the
memory of a server, and the trainers call it (`asyncdist.rpc`); the other layers are in a `DistributedDataParallel`, which
averages their gradients over the trainers (`asyncdist`). This is the division of torch's tutorial "Combining Distributed
DataParallel with Distributed RPC Framework".

The data are the 1,797 scans of 8×8 pixels that scikit-learn includes, each as 64 words: a word is a position with one of
three grey values. In a step a trainer

1. awaits the embeddings of its batch from the server,
2. runs its layers and awaits the backward: the gradients of the layers are averaged during it, and those of the embeddings
   go to the server, which computes the gradients of the rows,
3. steps its own optimizer, and lets the server step the one of the table.

The layers of all trainers are equal after every step. The table gets the updates of each trainer when they come.

At the end the program prints where the time of a step went, and plots loss and accuracy in
out/ddp_with_parameter_server.png. It exits with 1 if the accuracy on held-out digits is below 0.85, or if the layers of the
trainers differ.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import asyncdist.sync as dist
from asyncdist import rpc
from asyncdist.store import StoreServer

try:
    import matplotlib as mpl
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}; in the checkout: pip install '.[examples]'") from None

mpl.use("Agg")
import matplotlib.pyplot as plt

arguments = argparse.ArgumentParser(description="An embedding on a server, and DDP; see the first lines of this file.")
arguments.add_argument("--trainers", type=int, default=2, help="number of trainers, 2 by default")
arguments.add_argument("--steps", type=int, default=300, help="number of steps, 300 by default")
arguments.add_argument("--lr", type=float, default=0.05, help="learning rate, 0.05 by default")
arguments.add_argument("--out", type=Path, default=Path("out/ddp_with_parameter_server.png"), help="file of the plot")
arguments.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of a trainer, which the server starts
arguments.add_argument("--store", help=argparse.SUPPRESS)
options = arguments.parse_args()
if options.trainers < 1:
    arguments.error(f"--trainers {options.trainers}: must be at least 1")
if options.steps < 10:
    arguments.error(f"--steps {options.steps}: must be at least 10")
torch.set_num_threads(1)

BATCH, HELD_OUT = 64, 360
PIXELS, GREYS, WIDTH = 64, 3, 32
REPORTS = 30
PATIENCE = 120.0  # seconds without a report after which the training fails
PARTS = ("embeddings from the server", "forward and backward", "optimizers")

digits = load_digits()
words = torch.tensor(digits.images, dtype=torch.int64).flatten(1) // 6 + GREYS * torch.arange(PIXELS)
labels = torch.tensor(digits.target)


# -- a trainer --------------------------------------------------------------------------------------


class Trainer:
    """One trainer: its layers, which the group averages, and its use of the server's table."""

    def __init__(self, embedding: rpc.RemoteModule) -> None:
        torch.manual_seed(0)
        self._embedding = embedding
        layers = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 10))
        self.layers = dist.DistributedDataParallel(layers)
        self._optimizer = torch.optim.SGD(layers.parameters(), lr=options.lr, momentum=0.9)

    async def step(self, batch: torch.Tensor) -> tuple[float, list[float]]:
        """Train with a batch; return the loss, and the seconds that each of `PARTS` took."""
        times = [perf_counter()]
        embedded = await self._embedding(words[batch], timeout=60)
        times.append(perf_counter())
        loss = nn.functional.cross_entropy(self.layers(embedded), labels[batch])
        await rpc.backward(loss)
        times.append(perf_counter())
        self._optimizer.step()
        self._optimizer.zero_grad()
        await self._embedding.step(timeout=60)
        times.append(perf_counter())
        return loss.item(), [after - before for before, after in itertools.pairwise(times)]

    @torch.no_grad()
    async def accuracy(self) -> float:
        """Return the share of held-out digits that the model recognizes."""
        embedded = await self._embedding(words[:HELD_OUT], timeout=60)
        right = self.layers(embedded).argmax(1) == labels[:HELD_OUT]
        return float(right.float().mean())

    def differences(self) -> float:
        """Return by how much the layers of the trainers differ at most."""
        mine = nn.utils.parameters_to_vector(self.layers.parameters()).detach()
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float((most - least).max())


async def train(rank: int, store: str) -> None:
    """Train as one rank of the trainers; rank 0 reports to the server."""
    draws = torch.Generator().manual_seed(rank)
    # The blocking API, because backward blocks its thread until the gradients are averaged.
    dist.init_process_group(init_method=f"{store}/trainers", rank=rank, world_size=options.trainers)
    async with rpc.connect(f"{store}/digits"):
        trainer = Trainer(await rpc.RemoteModule.attach(await rpc.find("embedding", timeout=120)))
        monitor = await rpc.find("monitor")
        losses, times = [], []
        for step in range(1, options.steps + 1):
            batch = torch.randint(HELD_OUT, len(words), (BATCH,), generator=draws)
            loss, took = await trainer.step(batch)
            losses.append(loss)
            times.append(took)
            if rank == 0 and step % max(1, options.steps // REPORTS) == 0:
                await monitor.report(step, sum(losses) / len(losses), await trainer.accuracy())
                losses = []
        await monitor.finished(rank, trainer.differences(), times)
    dist.destroy_process_group()


# -- the server -------------------------------------------------------------------------------------


class Monitor:
    """Receives the reports of the trainers."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.accuracies: list[float] = []
        self.times: dict[int, list[list[float]]] = {}
        self.difference = 0.0
        self.changed = asyncio.Event()

    async def report(self, step: int, loss: float, accuracy: float) -> None:
        """Note the mean loss since the last report, and the accuracy on held-out digits."""
        self.steps.append(step)
        self.losses.append(loss)
        self.accuracies.append(accuracy)
        self.changed.set()

    async def finished(self, rank: int, difference: float, times: list[list[float]]) -> None:
        """Note that a trainer has finished: how much the layers differ, and the times of its steps."""
        self.times[rank] = times
        self.difference = max(self.difference, difference)
        self.changed.set()


async def serve(trainers: list[subprocess.Popen[bytes]]) -> Monitor:
    """Serve the table, and the store at which all meet, until all trainers have finished."""
    torch.manual_seed(1)
    table = nn.EmbeddingBag(PIXELS * GREYS, WIDTH, mode="sum", sparse=False)
    nn.init.normal_(table.weight, std=0.1)
    served = rpc.ServedModule(table, lambda parameters: torch.optim.Adagrad(parameters, lr=options.lr))
    monitor = Monitor()
    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=options.steps)
        async with (
            await StoreServer.start("127.0.0.1", 0) as store,
            rpc.serve({"embedding": served, "monitor": monitor}, f"asyncdist://127.0.0.1:{store.port}/digits"),
        ):
            trainers += [start_trainer(rank, f"asyncdist://127.0.0.1:{store.port}") for rank in range(options.trainers)]
            while len(monitor.times) < options.trainers:
                async with asyncio.timeout(PATIENCE):
                    await monitor.changed.wait()
                monitor.changed.clear()
                bar.update(task, completed=monitor.steps[-1] if monitor.steps else 0)
            await asyncio.gather(*[asyncio.to_thread(trainer.wait) for trainer in trainers])
    return monitor


# -- processes --------------------------------------------------------------------------------------


def start_trainer(rank: int, store: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--store", store]
    # Ctrl-C in the terminal is for this program, which ends the trainers.
    return subprocess.Popen(command, process_group=0)


if options.rank is not None:
    asyncio.run(train(options.rank, options.store))
    sys.exit()

options.out.parent.mkdir(parents=True, exist_ok=True)
trainers: list[subprocess.Popen[bytes]] = []
try:
    try:
        monitor = asyncio.run(serve(trainers))
    finally:
        for process in trainers:
            process.kill()
            process.wait()
except TimeoutError:
    sys.exit(f"no trainer has reported for {PATIENCE:.0f} s")
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(128 + signal.SIGINT)

# -- the table and the plot -------------------------------------------------------------------------

rows = [[median(took) for took in zip(*times, strict=True)] for _, times in sorted(monitor.times.items())]
table = Table(title=f"median of {options.steps:,} steps, in milliseconds")
for heading in ("trainer", *PARTS, "whole step"):
    table.add_column(heading, justify="right")
for rank, took in enumerate(rows):
    table.add_row(str(rank), *(f"{seconds * 1e3:.2f}" for seconds in (*took, sum(took))))
Console(width=100).print(table)
final = monitor.accuracies[-1]
print(f"accuracy on held-out digits {final:.4f}; the layers of the trainers differ by {monitor.difference:g}")

figure, (above, below) = plt.subplots(
    2, 1, figsize=(9, 5.5), layout="constrained", gridspec_kw={"height_ratios": [2, 1]}
)
above.plot(monitor.steps, monitor.losses, color="#d94801", linewidth=2, label="mean loss of trainer 0")
above.plot(monitor.steps, monitor.accuracies, color="#08519c", linewidth=2, label="accuracy on held-out digits")
above.set(xlabel="step", ylim=(0, max(1.05, *monitor.losses)))
above.set_title("An embedding on a server, and layers in DDP", loc="left", weight="bold")
above.legend(frameon=False)
begin = [0.0] * len(rows)
for part, colour in zip(range(len(PARTS)), ("#6baed6", "#74c476", "#fd8d3c"), strict=True):
    widths = [took[part] * 1e3 for took in rows]
    below.barh([f"trainer {rank}" for rank in range(len(rows))], widths, left=begin, color=colour, label=PARTS[part])
    begin = [left + width for left, width in zip(begin, widths, strict=True)]
below.set(xlabel="milliseconds of a step (median)")
below.invert_yaxis()
below.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
for axes in (above, below):
    axes.spines[["top", "right"]].set_visible(False)
figure.savefig(options.out, dpi=150)
print(f"wrote {options.out}")
if monitor.difference:
    sys.exit("the layers of the trainers differ")
if final < 0.85:
    sys.exit(f"the accuracy is {final:.4f} only")
