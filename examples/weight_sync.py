"""Train in one process while asyncio servers answer HTTP requests with the newest weights.

    torchrun --nproc-per-node=3 examples/weight_sync.py                  # a trainer, the clients, one server
    torchrun --nproc-per-node=4 examples/weight_sync.py --width 5000     # two servers, 97 MiB of parameters
    torchrun --nproc-per-node=3 examples/weight_sync.py --device cuda    # from GPU to GPU; ranks may share one

Rank 0 trains on handwritten digits (from scikit-learn) in a blocking script. Every few steps it publishes its parameters
(`asyncdist.weights`) and continues to train. Rank 1 runs the clients: it sends requests with held-out digits at a fixed
rate and checks the answers. Ranks 2 and up are inference servers: the event loop of each answers requests and swaps the
newest version in. A server keeps two copies of the model. It answers from one copy while the next version arrives in the
other, so no answer mixes two versions. Servers on other hosts would get only what has changed since the version before. The
ranks form a group only to exchange addresses and results.

At the end rank 0 prints a row for each version: the time until all servers used it, the requests answered during that
time, their latency, and the longest pause of a server's event loop. It plots the answers in out/weight_sync.png. It exits
with 1 if a request failed, an answer mixed two versions, a server's last parameters differ from the trainer's, or the
accuracy did not rise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import re
import subprocess
import sys
import time
from bisect import bisect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import asyncdist as dist
import asyncdist.sync as blocking
from asyncdist import weights
from asyncdist.sync import weights as blocking_weights

try:
    import aiohttp
    import matplotlib as mpl
    from aiohttp import web
    from matplotlib.backend_bases import FigureCanvasBase
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}; in the checkout: pip install '.[examples]'") from None

mpl.use("Agg")
import matplotlib.pyplot as plt

arguments = argparse.ArgumentParser(description="Send weights to running servers; see the first lines of this file.")
arguments.add_argument("--versions", type=int, default=20, help="number of versions of the parameters")
arguments.add_argument("--steps", type=int, default=20, help="training steps between two versions")
arguments.add_argument("--width", type=int, default=1024, help="width of the two hidden layers; 5000 makes 97 MiB")
arguments.add_argument("--rate", type=float, default=150.0, help="requests per second to all servers together")
arguments.add_argument("--lr", type=float, default=0.005, help="learning rate, low so that accuracy rises slowly")
arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the parameters are")
arguments.add_argument("--out", type=Path, default=Path("out/weight_sync.png"), help="file of the plot")
options = arguments.parse_args()
if options.versions < 2:
    arguments.error(f"--versions {options.versions}: must be at least 2, to compare the first with the last")
if options.steps < 1 or options.width < 1:
    arguments.error("--steps and --width: must be at least 1")
if not options.rate > 0:
    arguments.error(f"--rate {options.rate}: must be greater than 0")
if options.device == "cuda" and not torch.cuda.is_available():
    arguments.error("--device cuda: torch sees no CUDA device")
if options.out.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
    arguments.error(f"--out {options.out}: the name must end in .png, .svg or .pdf")
try:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=options.out.parent).close()  # fail before the training, not after it
except OSError as cause:
    arguments.error(f"--out {options.out} cannot be written ({cause.strerror})")

device = torch.device(options.device)
if device.type == "cuda":
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())

TRAINER, CLIENTS = 0, 1
BATCH = 32  # samples per training step, and the most requests that a server computes together

digits = load_digits()
images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
labels = torch.tensor(digits.target)
shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
held_out, training = shuffled[:360], shuffled[360:]


class Stamp(nn.Module):
    """The number of the version, before and after the parameters: two numbers mean a mixture of versions."""

    version: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("version", torch.zeros(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values


def network() -> nn.Sequential:
    torch.manual_seed(0)
    width = options.width
    layers = [nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10)]
    return nn.Sequential(Stamp(), *layers, Stamp()).to(device)


def stamps(model: nn.Sequential) -> set[int]:
    """Return the version numbers before and after the parameters."""
    return {int(stamp.version) for stamp in (model[0], model[-1]) if isinstance(stamp, Stamp)}


def digest(model: nn.Sequential) -> str:
    """Return a hash of the parameters and their version numbers."""
    hashed = hashlib.sha256()
    for tensor in model.state_dict().values():
        hashed.update(tensor.cpu().numpy().tobytes())
    return hashed.hexdigest()


def now() -> float:
    return time.monotonic()  # the same clock in all processes of a host


def lower_thread_priority() -> None:
    """Give event loops priority over the calling thread: with few cores a loop pauses mainly to wait for a core.

    On systems without priorities of threads this applies to the whole process.
    """
    os.nice(10)


def lower_process_priority() -> None:
    """Give other processes priority, also where Linux shares the cores among sessions: torchrun gives each rank one."""
    lower_thread_priority()
    with contextlib.suppress(OSError):  # the system has no autogroups
        Path("/proc/self/autogroup").write_text("10")


# -- the trainer: a blocking script -----------------------------------------------------------------


def start_store() -> tuple[subprocess.Popen[str], str]:
    """Start a store daemon for the job; return its process and the URL of the job."""
    command = [sys.executable, "-m", "asyncdist.cli", "store", "--host", "127.0.0.1", "--port", "0"]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    ready = re.search(r"tcp://(\S+) ", daemon.stdout.readline())
    if ready is None:
        sys.exit("the store did not start")
    return daemon, f"asyncdist://{ready[1]}/weight-sync"


def train(job: str) -> dict[str, Any]:
    """Train, and publish the parameters every few steps; return the times of the publications."""
    lower_process_priority()
    model, posted = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    inputs, targets = images.to(device), labels.to(device)
    console = Console()
    with blocking_weights.Publisher(model, job=job) as publisher, Progress(
        TextColumn("[bold]training"), BarColumn(bar_width=36), MofNCompleteColumn(), TextColumn("versions sent"),
        TextColumn("loss [cyan]{task.fields[loss]:.4f}[/]"), TimeElapsedColumn(), console=console,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        bar = progress.add_task("", total=options.versions, loss=0.0)
        for version in range(options.versions):
            for stamp in (model[0], model[-1]):
                assert isinstance(stamp, Stamp)
                stamp.version.fill_(version)
            posted.append(now())
            nbytes = publisher.publish(version).nbytes
            last = digest(model) if version == options.versions - 1 else ""
            if version == 0:  # the servers have something to answer with: the clients may get their addresses
                blocking.all_gather_object([None] * blocking.get_world_size(), None)
            losses = []
            for _ in range(options.steps):  # training continues, because a version is a copy
                batch = training[torch.randint(len(training), (BATCH,), generator=generator)]
                loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            progress.update(bar, advance=1, loss=np.mean(losses))
            if not console.is_terminal:
                print(f"version {version + 1:2d}/{options.versions}  loss {np.mean(losses):.4f}", flush=True)
        publisher.wait_for_readers()
    return {"posted": posted, "nbytes": nbytes, "digest": last}


# -- a server ---------------------------------------------------------------------------------------


class LoopMonitor:
    """Records every millisecond by how many seconds an event loop is late. A late loop answers no requests."""

    INTERVAL = 1e-3

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.at: list[float] = []
        self.late: list[float] = []
        self._measure(self._loop.time())

    def _measure(self, due: float) -> None:
        called = self._loop.time()
        self.at.append(now())
        self.late.append(called - due)
        self._next = self._loop.call_at(called + self.INTERVAL, self._measure, called + self.INTERVAL)

    def stop(self) -> None:
        self._next.cancel()


class Server:
    """Answers requests with the newest weights, many at a time."""

    def __init__(self, subscriber: weights.Subscriber) -> None:
        self.subscriber = subscriber
        self.arrived: list[float] = []
        self.can_answer = asyncio.Event()
        self.executor = ThreadPoolExecutor(1, "forward", initializer=lower_thread_priority)
        self._requests: asyncio.Queue[tuple[list[float], asyncio.Future[tuple[int, int]]]] = asyncio.Queue()

    async def receive(self) -> None:
        """Swap versions in up to the last one, and note when each, or a newer one, was in use."""
        while len(self.arrived) < options.versions:
            version = await self.subscriber.next()
            async with self.subscriber.swap(version):
                pass
            self.can_answer.set()
            assert version.step is not None
            self.arrived += [now()] * (version.step + 1 - len(self.arrived))

    async def compute(self) -> None:
        """Compute all waiting requests together, on another thread, so that the loop continues to run."""
        loop = asyncio.get_running_loop()
        while True:
            requests = [await self._requests.get()]
            while len(requests) < BATCH and not self._requests.empty():
                requests.append(self._requests.get_nowait())
            pixels = [pixels for pixels, _ in requests]
            found, versions = await loop.run_in_executor(self.executor, self._forward, pixels)
            version, *others = versions
            for (_, answer), digit in zip(requests, found, strict=True):
                if answer.cancelled():
                    continue
                if not others:
                    answer.set_result((digit, version))
                else:
                    answer.set_exception(RuntimeError(f"computed with a mixture of versions {versions}"))

    def _forward(self, pixels: Sequence[Sequence[float]]) -> tuple[list[int], set[int]]:
        with self.subscriber.reading() as (model, version):
            before = stamps(model)
            found = model(torch.tensor(pixels, device=device)).argmax(dim=1).tolist()
            return found, before | stamps(model) | {version.step or 0}

    async def answer(self, request: web.Request) -> web.Response:
        """Handle ``POST /digit`` with ``{"pixels": [64 numbers]}``."""
        pixels = (await request.json())["pixels"]
        answer: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((pixels, answer))
        digit, version = await answer
        return web.json_response({"digit": digit, "version": version})


async def serve(job: str) -> dict[str, Any]:
    """Answer requests until the clients stop; return when versions arrived and how late the loop was."""
    async with weights.Subscriber(like=network(), job=job) as subscriber:
        server = Server(subscriber)
        application = web.Application()
        application.router.add_post("/digit", server.answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/digit"
        receiving, monitor = asyncio.create_task(server.receive()), LoopMonitor()
        computing = asyncio.create_task(server.compute())
        try:
            await server.can_answer.wait()
            await dist.all_gather_object([None] * dist.get_world_size(), address)
            await receiving
            await dist.barrier()  # every server has the last version
            await dist.barrier()  # the clients have stopped
            with subscriber.reading() as (model, _):
                last = digest(model)
        finally:
            monitor.stop()
            receiving.cancel()
            computing.cancel()
            await runner.cleanup()
            server.executor.shutdown()
    return {"arrived": server.arrived, "at": np.array(monitor.at), "late": np.array(monitor.late), "digest": last}


# -- the clients ------------------------------------------------------------------------------------


@dataclass
class Answers:
    """All answers: the request's time, seconds until the answer, its version, and whether it was correct."""

    at: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    correct: list[bool] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def request(self, session: aiohttp.ClientSession, url: str, which: int) -> None:
        sent = now()
        try:
            async with session.post(url, json={"pixels": images[which].tolist()}) as response:
                response.raise_for_status()
                reply = await response.json()
        except aiohttp.ClientError as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            return
        self.at.append(sent)
        self.seconds.append(now() - sent)
        self.version.append(reply["version"])
        self.correct.append(reply["digit"] == int(labels[which]))


async def send_requests() -> dict[str, Any]:
    """Send ``--rate`` requests per second at random times, until half a second after the last version has arrived."""
    urls: list[Any] = [None] * dist.get_world_size()
    await dist.all_gather_object(urls, None)
    urls, answers, generator = urls[CLIENTS + 1 :], Answers(), np.random.default_rng(0)
    all_arrived = dist.barrier()  # runs in the background
    until = None
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        due = now()
        while until is None or now() < until:
            due += generator.exponential(1 / options.rate)
            await asyncio.sleep(due - now())
            which = int(held_out[generator.integers(len(held_out))])
            tasks.create_task(answers.request(session, urls[generator.integers(len(urls))], which))
            if until is None and all_arrived.is_completed():
                until = now() + 0.5
    await all_arrived  # raises the barrier's error if it failed
    await dist.barrier()
    return asdict(answers)


# -- all ranks --------------------------------------------------------------------------------------


async def loop_main() -> None:
    await dist.init_process_group()
    jobs: list[Any] = [None]
    await dist.broadcast_object_list(jobs, TRAINER)
    result = await (send_requests() if dist.get_rank() == CLIENTS else serve(jobs[0]))
    await dist.gather_object(result, None, dst=TRAINER)
    await dist.destroy_process_group()


def trainer_main() -> list[dict[str, Any]]:
    blocking.init_process_group()
    daemon, job = start_store()
    try:
        results: list[Any] = [None] * blocking.get_world_size()
        blocking.broadcast_object_list([job], TRAINER)
        own = train(job)
        blocking.barrier()
        blocking.barrier()
        blocking.gather_object(own, results, dst=TRAINER)
        blocking.destroy_process_group()
    finally:
        daemon.terminate()
        daemon.wait()
    return results


if int(os.environ.get("WORLD_SIZE", "1")) < 3:
    sys.exit("this example needs at least three ranks: torchrun --nproc-per-node=3 examples/weight_sync.py")
torch.set_num_threads(1)  # the ranks share the cores of this machine
if os.environ["RANK"] != str(TRAINER):
    asyncio.run(loop_main())
    sys.exit(0)
trainer, clients, *servers = trainer_main()

# -- the table --------------------------------------------------------------------------------------

posted = trainer["posted"]
order = np.argsort(clients["at"])
at, seconds = np.array(clients["at"])[order], np.array(clients["seconds"])[order]
version, correct = np.array(clients["version"])[order], np.array(clients["correct"])[order]
arrived = np.max([server["arrived"] for server in servers], axis=0)  # on all servers
answered = at + seconds


def longest_pause(server: dict[str, Any], begin: float, end: float) -> float:
    """Return the longest pause of a server's loop between two times, in seconds."""
    first, last = bisect(server["at"], begin), bisect(server["at"], end)
    return float(max(server["late"][first : last + 1], default=0.0))


table = Table(title=f"{trainer['nbytes'] / 2**20:.1f} MiB of parameters, {len(servers)} server(s)")
for heading in ("version", "arrival", "answered during it", "longest pause", "answers", "correct", "p50", "p99"):
    table.add_column(heading, justify="right")
accuracies, pauses = [], []
for number in range(len(posted)):
    own = version == number
    accuracies.append(float(correct[own].mean()) if own.any() else float("nan"))
    pauses.append(max(longest_pause(server, posted[number], arrived[number]) for server in servers))
    during = int(((answered >= posted[number]) & (answered <= arrived[number])).sum())
    median, tail = np.percentile(seconds[own], [50, 99]) if own.any() else (float("nan"), float("nan"))
    table.add_row(
        str(number), f"{1e3 * (arrived[number] - posted[number]):.1f} ms", str(during), f"{1e3 * pauses[-1]:.1f} ms",
        str(int(own.sum())), f"{accuracies[-1]:.1%}", f"{1e3 * median:.1f} ms", f"{1e3 * tail:.1f} ms",
    )  # fmt: skip
Console(width=100).print(table)
median, tail = np.percentile(seconds, [50, 99])
ever = max(float(server["late"].max()) for server in servers)
failures = clients["failures"]
print(f"{len(at)} requests answered, {len(failures)} failed; p50 {1e3 * median:.1f} ms, p99 {1e3 * tail:.1f} ms")
print(f"longest pause of a server's loop: {1e3 * max(pauses):.1f} ms during arrivals, {1e3 * ever:.1f} ms overall")
equal = all(server["digest"] == trainer["digest"] for server in servers)
print(f"the servers' last parameters {'equal' if equal else 'DIFFER FROM'} the trainer's")
print(f"correct answers: {accuracies[0]:.1%} with version 0, {accuracies[-1]:.1%} with version {len(posted) - 1}")

# -- the plot ---------------------------------------------------------------------------------------

figure, (above, below) = plt.subplots(2, figsize=(10, 6.4), sharex=True, layout="constrained")
start = at[0]
window = min(100, len(correct))
rolling = np.convolve(correct, np.ones(window) / window, mode="valid")
above.plot(answered[window - 1 :] - start, 100 * rolling, color="#08519c", linewidth=2)
above.set(ylabel="correct, %", ylim=(0, 101))
above.set_title(f"Answers as weights arrive (mean of {window})", loc="left", weight="bold")
below.scatter(at - start, 1e3 * seconds, s=5, color="#9ecae1", linewidth=0)
below.axhline(1e3 * median, color="#08519c", linewidth=1, label=f"p50 {1e3 * median:.1f} ms")
below.axhline(1e3 * tail, color="#08519c", linewidth=1, linestyle=":", label=f"p99 {1e3 * tail:.1f} ms")
below.set(xlabel="seconds", ylabel="latency, ms", yscale="log")
below.set_title(
    f"Each request; longest pause of a loop during arrivals: {1e3 * max(pauses):.1f} ms", loc="left", weight="bold"
)
below.legend(frameon=False, loc="upper right", ncols=2)
for axes in (above, below):
    for begin, end in zip(posted, arrived, strict=True):
        axes.axvspan(begin - start, end - start, color="#fdae6b", linewidth=1, alpha=0.6, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
figure.savefig(options.out, dpi=150)
print(f"wrote {options.out}")

if failures:
    sys.exit(f"{len(failures)} requests failed, the first one with {failures[0]}")
if not equal:
    sys.exit("a server's last parameters differ from the trainer's")
if not accuracies[-1] > accuracies[0]:
    sys.exit("the accuracy did not rise")
