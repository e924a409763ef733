"""Asynchronous SGD: a parameter server, and workers that come and go while it trains.

    python examples/parameter_server.py                     # a server and three workers; one is killed, one is added
    python examples/parameter_server.py --workers 6

The program starts the workers, and is the server and the store of the job. The data are the 1,797 scans of 8×8 pixels that
scikit-learn includes. A worker computes the gradients of a batch and calls the server (`asyncdist.rpc`), which applies them
at once and answers with the newest parameters. No worker waits for another one, so gradients may belong to parameters that
others have changed since (Dean et al., 2012). After a third of the updates a worker is killed with SIGKILL, and another
one is started. The training ends after the given number of updates, and not before the new worker has made some.

At the end the program prints a table and plots the accuracy over time, with the death and the arrival, in
out/parameter_server.png. It exits with 1 if the accuracy on held-out digits is below 0.93.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from asyncdist import rpc
from asyncdist.store import StoreServer

try:
    import matplotlib as mpl
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}; in the checkout: pip install '.[examples]'") from None

mpl.use("Agg")
import matplotlib.pyplot as plt

arguments = argparse.ArgumentParser(description="A parameter server and workers; see the first lines of this file.")
arguments.add_argument("--workers", type=int, default=3, help="number of workers, 3 by default")
arguments.add_argument("--updates", type=int, default=1500, help="number of updates of the parameters, 1500 by default")
arguments.add_argument("--lr", type=float, default=0.1, help="learning rate, 0.1 by default")
arguments.add_argument("--out", type=Path, default=Path("out/parameter_server.png"), help="file of the plot")
arguments.add_argument("--worker", type=int, help=argparse.SUPPRESS)  # the number of a worker, which the server starts
arguments.add_argument("--job", help=argparse.SUPPRESS)
options = arguments.parse_args()
if options.workers < 2:
    arguments.error(f"--workers {options.workers}: needs at least 2, or none is left when one is killed")
if options.updates < 100:
    arguments.error(f"--updates {options.updates}: must be at least 100")
torch.set_num_threads(1)

BATCH, HELD_OUT = 32, 360
EVALUATIONS = 60
LEAST_OF_ADDED = 50  # updates by the worker that is added, before the training ends
PATIENCE = 120.0  # seconds without an update after which the training fails

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


# -- a worker ---------------------------------------------------------------------------------------


async def work(number: int, job: str) -> None:
    """Compute gradients until the server ends this process."""
    model, draws = new_model(), torch.Generator().manual_seed(number)
    parameters = list(model.parameters())
    async with rpc.connect(job):
        server = await rpc.find("parameters", timeout=120)
        version, values = await server.pull()
        while True:
            nn.utils.vector_to_parameters(values, parameters)
            drawn = torch.randint(HELD_OUT, len(images), (BATCH,), generator=draws)
            loss = nn.functional.cross_entropy(model(images[drawn]), labels[drawn])
            gradient = nn.utils.parameters_to_vector(torch.autograd.grad(loss, parameters))
            version, values = await server.push(number, version, gradient, timeout=60)


# -- the server -------------------------------------------------------------------------------------


class ParameterServer:
    """The object on the server. Methods that are coroutines run on the loop, one after the other unless they await."""

    def __init__(self) -> None:
        self._model = new_model()
        self._parameters = list(self._model.parameters())
        self.version = 0
        self.by_worker: Counter[int] = Counter()
        self.staleness: Counter[int] = Counter()
        self.advanced = asyncio.Event()

    async def pull(self) -> tuple[int, torch.Tensor]:
        """Return the number of updates so far, and the parameters in one tensor."""
        return self.version, nn.utils.parameters_to_vector(self._parameters).detach()

    async def push(self, worker: int, version: int, gradient: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Apply a gradient that belongs to a version of the parameters; return the newest ones."""
        with torch.no_grad():
            values = nn.utils.parameters_to_vector(self._parameters) - options.lr * gradient
            nn.utils.vector_to_parameters(values, self._parameters)
        self.staleness[self.version - version] += 1
        self.by_worker[worker] += 1
        self.version += 1
        self.advanced.set()
        return self.version, values

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the share of held-out digits that the parameters recognize."""
        right = self._model(images[:HELD_OUT]).argmax(1) == labels[:HELD_OUT]
        return float(right.float().mean())

    async def reaches(self, version: int) -> None:
        """Wait for a number of updates."""
        while self.version < version:
            self.advanced.clear()
            await self.advanced.wait()


class History:
    """What happened, in seconds since the first update."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.accuracy: list[tuple[float, float]] = []
        self.events: list[tuple[float, str]] = []

    def now(self) -> float:
        return time.monotonic() - self._begun


async def run() -> tuple[ParameterServer, History]:
    """Run the store of the job during the training, until the workers have ended."""
    workers: dict[int, subprocess.Popen[bytes]] = {}
    async with await StoreServer.start("127.0.0.1", 0) as store:
        try:
            return await train(f"asyncdist://127.0.0.1:{store.port}/digits", workers)
        finally:
            for process in workers.values():
                process.kill()
                await asyncio.to_thread(process.wait)


async def train(job: str, workers: dict[int, subprocess.Popen[bytes]]) -> tuple[ParameterServer, History]:
    """Serve the parameters until enough gradients have come, with whatever workers there are."""
    server = ParameterServer()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("updates", total=options.updates)
        async with rpc.serve({"parameters": server}, job):
            for number in range(options.workers):
                workers[number] = start_worker(number, job)
            added = options.workers
            async with asyncio.timeout(PATIENCE):
                await server.reaches(1)
            history = History()
            while server.version < options.updates or server.by_worker[added] < LEAST_OF_ADDED:
                async with asyncio.timeout(PATIENCE):
                    await server.reaches(server.version + options.updates // EVALUATIONS)
                history.accuracy.append((history.now(), server.accuracy()))
                what = f"updates, {server.by_worker[added]:,} by worker {added}"
                # More than the total, while the worker that is added has not made enough.
                bar.update(task, completed=server.version, total=max(server.version, options.updates), description=what)
                if workers[0].returncode is None and server.version >= options.updates // 3:
                    workers[0].kill()
                    workers[0].wait()
                    history.events.append((history.now(), "worker 0 is killed"))
                    workers[added] = start_worker(added, job)
                if server.by_worker[added] and len(history.events) == 1:
                    history.events.append((history.now(), f"worker {added} joins"))
            for process in workers.values():
                process.kill()  # before the session ends, which would refuse their calls
    return server, history


# -- processes --------------------------------------------------------------------------------------


def start_worker(number: int, job: str) -> subprocess.Popen[bytes]:
    # Ctrl-C in the terminal is for this program, which ends the workers.
    command = [sys.executable, __file__, "--worker", str(number), "--job", job]
    return subprocess.Popen(command, process_group=0)


if options.worker is not None:
    with contextlib.suppress(rpc.CalleeLostError):
        asyncio.run(work(options.worker, options.job))
    sys.exit()

options.out.parent.mkdir(parents=True, exist_ok=True)
try:
    server, history = asyncio.run(run())
except TimeoutError:
    sys.exit(f"no worker has sent a gradient for {PATIENCE:.0f} s")
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(128 + signal.SIGINT)

# -- the table and the plot -------------------------------------------------------------------------

final, seconds = server.accuracy(), history.accuracy[-1][0]
table = Table(title=f"{server.version:,} updates in {seconds:.1f} s")
for heading in ("worker", "updates", "share"):
    table.add_column(heading, justify="right")
for number, count in sorted(server.by_worker.items()):
    table.add_row(str(number), f"{count:,}", f"{count / server.version:.0%}")
Console(width=100).print(table)
late = ", ".join(f"{age}: {count / server.version:.0%}" for age, count in sorted(server.staleness.items())[:8])
print(f"updates by others between a gradient's parameters and its use: {late}")
print(f"accuracy on held-out digits {final:.4f}")

figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
axes.plot(*zip(*history.accuracy, strict=True), color="#08519c", linewidth=2)
axes.set(xlabel="seconds", ylabel="accuracy on held-out digits", xlim=(0, None), ylim=(0, 1))
axes.set_title("Training continues while workers come and go", loc="left", weight="bold")
for at, event in history.events:
    axes.axvline(at, color="#d94801" if "killed" in event else "#238b45", linewidth=1, linestyle=":")
    axes.text(at, 0.03, f" {event}", rotation=90, va="bottom", fontsize=8, color="#525252")
axes.spines[["top", "right"]].set_visible(False)
figure.savefig(options.out, dpi=150)
print(f"wrote {options.out}")
if final < 0.93:
    sys.exit(f"the accuracy is {final:.4f} only")
