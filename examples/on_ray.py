"""Train on a Ray cluster. Each rank is an async actor, which answers calls while its collectives run.

    pip install ray
    python examples/on_ray.py                             # two ranks; starts Ray on this machine
    python examples/on_ray.py --ranks 8 --address auto    # on the cluster whose head this machine can reach

Ray places each actor on a free core of the cluster. The first actor serves a store on a free port, and all ranks rendezvous
there. Every rank computes the gradients of its share of each batch of handwritten digits (from scikit-learn) and awaits
their average in its event loop. It can therefore answer the driver at any time, which asks for the progress of rank 0.

At the end a table shows where each rank ran. The program exits with 1 if the accuracy on held-out digits is below 0.95,
or if the weights of the ranks differ.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import asyncdist as dist
from asyncdist.store import StoreServer

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}; in the checkout: pip install '.[examples]'") from None

try:
    import ray
except ModuleNotFoundError:
    ray = None  # `main` reports it after parsing the options

HELD_OUT = 360  # digits for testing
BATCH = 64  # samples per step on all ranks together


@dataclass(frozen=True)
class Report:
    """Results of one rank: where it ran, for how long, the calls it answered, and its correct test digits."""

    host: str
    pid: int
    seconds: float
    answered: int
    correct: int
    checksum: float


class Rank:
    """One rank of the job. Its methods are coroutines: Ray runs another call while one awaits."""

    def __init__(self, rank: int, world_size: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)  # the same initial weights on every rank
        self.rank, self.world_size = rank, world_size
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.server: StoreServer | None = None
        self.steps, self.loss, self.answered = 0, 0.0, 0

    async def serve(self) -> str:
        """Serve the store for the rendezvous; return its URL."""
        host = ray.util.get_node_ip_address()
        config = dist.Config.from_environment()
        self.server = await StoreServer.start(host, 0, token=config.token, config=config)
        return f"asyncdist://{host}:{self.server.port}/digits"

    async def join(self, url: str) -> None:
        """Rendezvous with the other ranks."""
        await dist.init_process_group(init_method=url, rank=self.rank, world_size=self.world_size)

    async def train(self, steps: int) -> Report:
        """Train with gradients averaged over all ranks, then classify this rank's share of the held-out digits."""
        digits = load_digits()
        images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        held_out, training = order[:HELD_OUT], order[HELD_OUT:]
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        started = time.perf_counter()
        for self.steps in range(1, steps + 1):
            batch = training[torch.randint(len(training), (BATCH,), generator=generator)][self.rank :: self.world_size]
            loss = nn.functional.cross_entropy(self.model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            gradients = [weights.grad for weights in self.model.parameters() if weights.grad is not None]
            await dist.all_reduce_coalesced(gradients, op=dist.ReduceOp.AVG)
            optimizer.step()
            self.loss = loss.item()
        seconds = time.perf_counter() - started
        share = held_out[self.rank :: self.world_size]
        correct = int((self.model(images[share]).argmax(dim=1) == labels[share]).sum())
        checksum = sum(float(weights.detach().double().sum()) for weights in self.model.parameters())
        return Report(ray.util.get_node_ip_address(), os.getpid(), seconds, self.answered, correct, checksum)

    async def progress(self) -> tuple[int, float]:
        """Return the number of the current step, and the last loss."""
        self.answered += 1
        return self.steps, self.loss

    async def leave(self) -> None:
        """Destroy the process group, and close the store if this rank serves it."""
        await dist.destroy_process_group()
        if self.server is not None:
            await self.server.close()


async def run(world_size: int, steps: int, console: Console) -> list[Report]:
    """Start the ranks, and show the progress of rank 0 until all have finished."""
    actor = ray.remote(num_cpus=1)(Rank)
    ranks = [actor.remote(rank, world_size) for rank in range(world_size)]
    url = await ranks[0].serve.remote()
    await asyncio.gather(*[rank.join.remote(url) for rank in ranks])
    training = asyncio.gather(*[rank.train.remote(steps) for rank in ranks])
    columns = (
        TextColumn("[bold]training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("training", total=steps, loss=0.0)
        while not training.done():
            done, loss = await ranks[0].progress.remote()
            progress.update(bar, completed=done, loss=loss)
            await asyncio.wait([training], timeout=0.1)
    reports = await training
    await asyncio.gather(*[rank.leave.remote() for rank in ranks])
    return list(reports)


def main() -> None:
    arguments = argparse.ArgumentParser(description="Train on a Ray cluster; see the first lines of this file.")
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=600)
    arguments.add_argument("--address", help="address of the cluster; auto means the cluster of this machine")
    options = arguments.parse_args()
    if ray is None:
        sys.exit("Ray is not installed: pip install ray")

    # Without a token the ranks would listen only to their own host.
    variables = {"ASYNCDIST_TOKEN": secrets.token_hex(16)}
    ray.init(address=options.address, runtime_env={"env_vars": variables}, log_to_driver=False)
    console = Console()
    reports = asyncio.run(run(options.ranks, options.steps, console))
    ray.shutdown()

    table = Table(title=f"{options.ranks} ranks, {options.steps} steps")
    for title in ("rank", "host", "process", "seconds", "calls answered"):
        table.add_column(title, justify="right")
    for rank, report in enumerate(reports):
        table.add_row(str(rank), report.host, str(report.pid), f"{report.seconds:.2f}", str(report.answered))
    console.print(table)
    accuracy = sum(report.correct for report in reports) / HELD_OUT
    equal = len({report.checksum for report in reports}) == 1
    print(f"test accuracy {accuracy:.4f}; the weights of the ranks {'are equal' if equal else 'DIFFER'}")
    sys.exit(0 if equal and accuracy >= 0.95 else 1)


if __name__ == "__main__":
    main()
