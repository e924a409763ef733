"""Train in one process while asyncio servers answer requests over HTTP, always with the newest weights.

    torchrun --nproc-per-node=3 examples/weight_sync.py                  # a trainer, its users, one server
    torchrun --nproc-per-node=4 examples/weight_sync.py --width 5000     # two servers, 97 MiB of parameters

Rank 0 trains on handwritten digits (scikit-learn ships them), in an ordinary blocking script. Every few steps it starts a
broadcast of its parameters and trains on. Ranks 2 and up are inference servers: one event loop each, which answers
requests and awaits the next broadcast side by side. They keep two copies of the parameters: requests are answered from
the one, the next version comes into the other, and no answer ever mixes two. Rank 1 is the users: it sends requests
with held-out digits at a fixed rate and checks the answers.

At the end rank 0 prints a row for each version: the duration of its broadcast, the requests answered during that time,
their latency, and the longest pause of a server's event loop. It draws the picture out/weight_sync.png. It exits with 1
if a request was not answered, an answer was mixed from two versions, or the answers did not get better.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import os
import sys
import time
from bisect import bisect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import aiohttp
import matplotlib as mpl
import numpy as np
import torch
from aiohttp import web
from matplotlib.backend_bases import FigureCanvasBase
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import asyncdist as dist
import asyncdist.sync as blocking

mpl.use("Agg")
import matplotlib.pyplot as plt

arguments = argparse.ArgumentParser(
    description="Pass weights to servers that go on answering; see the head of this file."
)
arguments.add_argument("--versions", type=int, default=20, help="how often the trainer passes its parameters")
arguments.add_argument("--steps", type=int, default=20, help="training steps between two versions")
arguments.add_argument("--width", type=int, default=1024, help="of the two hidden layers; 5000 makes 97 MiB")
arguments.add_argument("--rate", type=float, default=150.0, help="requests a second, all servers together")
arguments.add_argument("--lr", type=float, default=0.005, help="low, so that there is something to see")
arguments.add_argument("--out", type=Path, default=Path("out/weight_sync.png"), help="where the picture goes")
options = arguments.parse_args()
if options.versions < 2:
    arguments.error(f"--versions {options.versions}: two at least, to see that the answers get better")
if options.steps < 1 or options.width < 1:
    arguments.error("--steps and --width: one at least")
if not options.rate > 0:
    arguments.error(f"--rate {options.rate}: more than nothing")
if options.out.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
    arguments.error(f"--out {options.out} cannot be drawn: its name must end in .png, .svg or .pdf")
try:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=options.out.parent).close()  # tried now, not after the training
except OSError as cause:
    arguments.error(f"--out {options.out} cannot be written ({cause.strerror})")

TRAINER, USERS = 0, 1
BATCH = 32  # samples of a training step, and requests that a server answers together at most

digits = load_digits()
images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
labels = torch.tensor(digits.target)
shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
held_out, training = shuffled[:360], shuffled[360:]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    width = options.width
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))


def now() -> float:
    return time.monotonic()  # one clock for all processes of a host


def give_way() -> None:
    """Have this thread (where niceness is not a thread's, its process) compute only while no event loop wants the core.

    Where cores are fewer than who computes, a loop is held up by waiting for one, and hardly by anything that it does.
    """
    os.nice(10)


def give_way_as_a_process() -> None:
    """Have this process give way to others, also where Linux deals out cores by session, and every rank is one."""
    give_way()
    with contextlib.suppress(OSError):  # there are no such groups
        Path("/proc/self/autogroup").write_text("10")


# -- what is passed ---------------------------------------------------------------------------------


class Weights:
    """A copy of a model whose parameters are one tensor, in memory that every rank of the host sees.

    The number of their version stands in front of the parameters and again behind them, so that a mixture of two gives
    itself away; and in front, whether it is the last one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        parameters = list(self.model.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = dist.empty(2 + sum(sizes) + 1, shared=True).zero_()
        for parameter, part in zip(parameters, self.flat[2:-1].split(sizes), strict=True):
            parameter.data = part.view_as(parameter)
        self.readers = 0
        self.free = asyncio.Event()  # set while no request computes with them
        self.free.set()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the next version out while a request computes with this one."""
        self.readers += 1
        self.free.clear()
        try:
            yield
        finally:
            self.readers -= 1
            if not self.readers:
                self.free.set()

    def write(self, model: nn.Module, version: int, *, last: bool) -> None:
        """Take over the parameters that a model has now."""
        for ours, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs.detach())
        self.flat[0] = self.flat[-1] = version
        self.flat[1] = last

    def versions(self) -> set[int]:
        """Return the version's number: one, or something has gone wrong."""
        return {int(self.flat[0]), int(self.flat[-1])}


# -- the trainer: a blocking script -----------------------------------------------------------------


def train(group: dist.Group) -> dict[str, Any]:
    """Train, and start to pass the parameters every few steps; return when each version went off and was taken."""
    give_way_as_a_process()
    model, posted, taken = network(), [], []
    weights = Weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    dice = torch.Generator().manual_seed(1)
    console = Console()
    with Progress(
        TextColumn("[bold]training"), BarColumn(bar_width=36), MofNCompleteColumn(), TextColumn("versions passed"),
        TextColumn("loss [cyan]{task.fields[loss]:.4f}[/]"), TimeElapsedColumn(), console=console,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        bar = progress.add_task("", total=options.versions, loss=0.0)
        for version in range(options.versions):
            weights.write(model, version, last=version == options.versions - 1)
            posted.append(now())
            work = group.broadcast(weights.flat, TRAINER)  # a group's methods start, and return a handle
            work.add_done_callback(lambda _: taken.append(now()))
            losses = []
            for _ in range(options.steps):  # training continues: the servers read a copy
                batch = training[torch.randint(len(training), (BATCH,), generator=dice)]
                loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            work.wait()  # before the copy is written over
            progress.update(bar, advance=1, loss=np.mean(losses))
            if not console.is_terminal:
                print(f"version {version + 1:2d}/{options.versions}  loss {np.mean(losses):.4f}", flush=True)
    return {"posted": posted, "taken": taken, "nbytes": weights.flat.nbytes}


# -- a server ---------------------------------------------------------------------------------------


class Pulse:
    """Records every millisecond how late an event loop is: while it is late it answers no request."""

    INTERVAL = 1e-3

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.at: list[float] = []
        self.late: list[float] = []
        self._beat(self._loop.time())

    def _beat(self, due: float) -> None:
        there = self._loop.time()
        self.at.append(now())
        self.late.append(there - due)
        self._next = self._loop.call_at(there + self.INTERVAL, self._beat, there + self.INTERVAL)

    def stop(self) -> None:
        self._next.cancel()


class Server:
    """Answers requests with the newest weights there are, many at a time."""

    def __init__(self) -> None:
        self.current, self.spare = Weights(network()), Weights(network())
        self.arrived: list[float] = []
        self.processor = ThreadPoolExecutor(1, "forward", initializer=give_way)
        self._asked: asyncio.Queue[tuple[list[float], asyncio.Future[tuple[int, int]]]] = asyncio.Queue()

    async def follow(self, group: Any) -> None:
        """Take each version as the trainer passes it."""
        last = False
        while not last:
            await self.spare.free.wait()  # what was begun two versions ago may still be computed
            await dist.broadcast(self.spare.flat, src=TRAINER, group=group)
            self.arrived.append(now())
            self.current, self.spare = self.spare, self.current
            last = bool(self.current.flat[1])

    async def compute(self) -> None:
        """Answer all waiting requests at once, on another thread, so that the loop continues to run."""
        loop = asyncio.get_running_loop()
        while True:
            asked = [await self._asked.get()]
            while len(asked) < BATCH and not self._asked.empty():
                asked.append(self._asked.get_nowait())
            weights = self.current
            with weights.in_use():
                pixels = [pixels for pixels, _ in asked]
                found, versions = await loop.run_in_executor(self.processor, self._forward, weights, pixels)
            version, *others = versions
            for (_, answer), digit in zip(asked, found, strict=True):
                if answer.cancelled():
                    continue
                if not others:
                    answer.set_result((digit, version))
                else:
                    answer.set_exception(RuntimeError(f"computed with a mixture of versions {versions}"))

    @staticmethod
    def _forward(weights: Weights, pixels: list[list[float]]) -> tuple[list[int], set[int]]:
        before = weights.versions()
        found = weights.model(torch.tensor(pixels)).argmax(dim=1).tolist()
        return found, before | weights.versions()

    async def answer(self, request: web.Request) -> web.Response:
        """Handle ``POST /digit`` with ``{"pixels": [64 numbers]}``."""
        pixels = (await request.json())["pixels"]
        answer: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((pixels, answer))
        digit, version = await answer
        return web.json_response({"digit": digit, "version": version})


async def serve(group: Any) -> dict[str, Any]:
    """Answer until the users have enough; return when versions arrived and how late the loop was."""
    server = Server()
    application = web.Application()
    application.router.add_post("/digit", server.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await dist.all_gather_object([None] * dist.get_world_size(), f"http://127.0.0.1:{runner.addresses[0][1]}/digit")
    pulse, computing = Pulse(), asyncio.create_task(server.compute())
    try:
        await server.follow(group)
        await dist.barrier()  # the last version is everywhere
        await dist.barrier()  # and the users have seen it
    finally:
        pulse.stop()
        computing.cancel()
        await runner.cleanup()
        server.processor.shutdown()
    return {"arrived": server.arrived, "at": np.array(pulse.at), "late": np.array(pulse.late)}


# -- the users --------------------------------------------------------------------------------------


@dataclass
class Asked:
    """All requests, by number: their time, seconds until the answer, its version, and whether it was right."""

    at: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def ask(self, session: aiohttp.ClientSession, url: str, which: int) -> None:
        asked = now()
        try:
            async with session.post(url, json={"pixels": images[which].tolist()}) as response:
                response.raise_for_status()
                reply = await response.json()
        except aiohttp.ClientError as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            return
        self.at.append(asked)
        self.seconds.append(now() - asked)
        self.version.append(reply["version"])
        self.right.append(reply["digit"] == int(labels[which]))


async def use() -> dict[str, Any]:
    """Ask at random moments, ``--rate`` times a second, until all versions are passed and for a moment longer."""
    urls: list[Any] = [None] * dist.get_world_size()
    await dist.all_gather_object(urls, None)
    urls, asked, dice = urls[USERS + 1 :], Asked(), np.random.default_rng(0)
    passed = dist.barrier()  # goes on by itself; we look at it now and then
    until = None
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        due = now()
        while until is None or now() < until:
            due += dice.exponential(1 / options.rate)
            await asyncio.sleep(due - now())
            which = int(held_out[dice.integers(len(held_out))])
            tasks.create_task(asked.ask(session, urls[dice.integers(len(urls))], which))
            if until is None and passed.is_completed():
                until = now() + 0.5
    await passed  # raises what it failed with, if it did
    await dist.barrier()
    return asdict(asked)


# -- all ranks --------------------------------------------------------------------------------------


async def loop_main() -> None:
    await dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([TRAINER, *range(USERS + 1, world_size)])
    found = await (use() if rank == USERS else serve(group))
    await dist.gather_object(found, None, dst=TRAINER)
    await dist.destroy_process_group()


def trainer_main() -> list[dict[str, Any]]:
    blocking.init_process_group()
    world_size = blocking.get_world_size()
    group = blocking.new_group([TRAINER, *range(USERS + 1, world_size)])
    assert isinstance(group, dist.Group)
    found: list[Any] = [None] * world_size
    blocking.all_gather_object([None] * world_size, None)  # the addresses are for the users
    mine = train(group)
    blocking.barrier()
    blocking.barrier()
    blocking.gather_object(mine, found, dst=TRAINER)
    blocking.destroy_process_group()
    return found


if int(os.environ.get("WORLD_SIZE", "1")) < 3:
    sys.exit(
        "a trainer, its users and a server are three at least: torchrun --nproc-per-node=3 examples/weight_sync.py"
    )
torch.set_num_threads(1)  # ranks share this machine's cores
if os.environ["RANK"] != str(TRAINER):
    asyncio.run(loop_main())
    sys.exit(0)
trainer, users, *servers = trainer_main()

# -- the table --------------------------------------------------------------------------------------

posted = trainer["posted"]
order = np.argsort(users["at"])
at, seconds = np.array(users["at"])[order], np.array(users["seconds"])[order]
version, right = np.array(users["version"])[order], np.array(users["right"])[order]
arrived = np.max([server["arrived"] for server in servers], axis=0)  # everywhere
answered = at + seconds


def longest_pause(server: dict[str, Any], begin: float, end: float) -> float:
    """Return the longest time for which a server's loop stood still between two moments, in seconds."""
    first, last = bisect(server["at"], begin), bisect(server["at"], end)
    return float(max(server["late"][first : last + 1], default=0.0))


table = Table(title=f"{trainer['nbytes'] / 2**20:.1f} MiB of parameters, {len(servers)} server(s)")
for heading in ("version", "passed in", "answered during it", "longest pause", "answers", "right", "p50", "p99"):
    table.add_column(heading, justify="right")
accuracies, pauses = [], []
for number in range(len(posted)):
    own = version == number
    accuracies.append(float(right[own].mean()) if own.any() else float("nan"))
    pauses.append(max(longest_pause(server, posted[number], arrived[number]) for server in servers))
    meanwhile = int(((answered >= posted[number]) & (answered <= arrived[number])).sum())
    median, tail = np.percentile(seconds[own], [50, 99]) if own.any() else (float("nan"), float("nan"))
    table.add_row(
        str(number), f"{1e3 * (arrived[number] - posted[number]):.1f} ms", str(meanwhile), f"{1e3 * pauses[-1]:.1f} ms",
        str(int(own.sum())), f"{accuracies[-1]:.1%}", f"{1e3 * median:.1f} ms", f"{1e3 * tail:.1f} ms",
    )  # fmt: skip
Console(width=100).print(table)
median, tail = np.percentile(seconds, [50, 99])
ever = max(float(server["late"].max()) for server in servers)
print(f"{len(at)} requests answered, {len(users['failures'])} not; p50 {1e3 * median:.1f} ms, p99 {1e3 * tail:.1f} ms")
print(f"longest pause of a server's loop: {1e3 * max(pauses):.1f} ms while weights came, {1e3 * ever:.1f} ms ever")
print(f"answers right: {accuracies[0]:.1%} with version 0, {accuracies[-1]:.1%} with version {len(posted) - 1}")

# -- the picture ------------------------------------------------------------------------------------

figure, (above, below) = plt.subplots(2, figsize=(10, 6.4), sharex=True, layout="constrained")
start = at[0]
window = min(100, len(right))
rolling = np.convolve(right, np.ones(window) / window, mode="valid")
above.plot(answered[window - 1 :] - start, 100 * rolling, color="#08519c", linewidth=2)
above.set(ylabel="right, %", ylim=(0, 101))
above.set_title(f"Answers as weights arrive (mean of {window})", loc="left", weight="bold")
below.scatter(at - start, 1e3 * seconds, s=5, color="#9ecae1", linewidth=0)
below.axhline(1e3 * median, color="#08519c", linewidth=1, label=f"p50 {1e3 * median:.1f} ms")
below.axhline(1e3 * tail, color="#08519c", linewidth=1, linestyle=":", label=f"p99 {1e3 * tail:.1f} ms")
below.set(xlabel="seconds", ylabel="latency, ms", yscale="log")
below.set_title(
    f"Each request; longest pause of a loop while weights came: {1e3 * max(pauses):.1f} ms", loc="left", weight="bold"
)
below.legend(frameon=False, loc="upper right", ncols=2)
for axes in (above, below):
    for begin, end in zip(posted, arrived, strict=True):
        axes.axvspan(begin - start, end - start, color="#fdae6b", linewidth=1, alpha=0.6, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
figure.savefig(options.out, dpi=150)
print(f"wrote {options.out}")

if users["failures"]:
    sys.exit(f"{len(users['failures'])} requests were not answered, the first of them: {users['failures'][0]}")
if not accuracies[-1] > accuracies[0]:
    sys.exit("the answers did not get better")
