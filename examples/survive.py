"""Train on handwritten digits while processes are killed and replaced. No checkpoint is written or read.

    python examples/survive.py                      # four processes; one is killed eight seconds after all have joined

The program serves the store, starts the processes, kills one of them with SIGKILL when all have been members for a while,
and starts another in its place. The others lose the step in progress, agree on who is left, and go on. The newcomer
receives the model and the optimizer from a member that has them. At the end the program prints how long the members took to
regroup after a kill, and how long they waited for a newcomer, and plots both with the loss over time in out/survive.png. It
exits with 1 if the accuracy on held-out digits is below 0.95.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

try:
    import matplotlib as mpl
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}; in the checkout: pip install '.[examples]'") from None

arguments = argparse.ArgumentParser(description="Train while processes are killed; see the first lines of this file.")
arguments.add_argument("--ranks", type=int, default=4, help="number of processes, 4 by default")
arguments.add_argument("--steps", type=int, default=2000, help="number of committed steps, 2,000 by default")
arguments.add_argument("--kill-every", type=float, default=8.0, help="seconds from the last join to a kill; 0: no kill")
arguments.add_argument("--seed", type=int, default=0, help="seed of the weights, the batches and the kills")
arguments.add_argument("--out", type=Path, default=Path("out/survive.png"), help="file of the plot")
arguments.add_argument("--job", help=argparse.SUPPRESS)  # given to the processes that train
options = arguments.parse_args()
if options.ranks < 2:
    arguments.error(f"--ranks {options.ranks}: needs at least 2, or no process is left to go on")

BATCH = 64
"""Samples of a step on all members together."""


# -- a process that trains ------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(options.seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GELU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.GroupNorm(8, 64), nn.GELU(),
        nn.Flatten(), nn.Linear(1024, 128), nn.GELU(), nn.Linear(128, 10),
    )  # fmt: skip


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return images and labels to train on, and those held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
    images, labels = (images - images.mean()) / images.std(), torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out, training = order[:360], order[360:]
    return images[training], labels[training], images[held_out], labels[held_out]


def report(**fields: Any) -> None:
    print(json.dumps({"time": time.time(), "pid": os.getpid(), **fields}), flush=True)


def train(job: str) -> None:
    import asyncdist.sync as dist

    torch.set_num_threads(1)  # the processes share the cores of this machine
    images, labels, held_out, answers = digits()
    model = network()
    state = dist.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9))
    with dist.join(job, min_size=2, start_size=options.ranks, state=state, timeout=60.0) as session:
        for group in session.generations():
            report(event="generation", number=group.generation, rank=group.rank(), size=group.size())
            if group.adopt(state).wait():
                report(event="adopted", step=state.step)
            with group.step() as start:
                parallel = dist.DistributedDataParallel(model, process_group=group)
            while start.committed and state.step < options.steps and not group.changed:
                with group.step() as step:
                    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(state.step))
                    own = order[:BATCH][group.rank() :: group.size()]
                    loss = nn.functional.cross_entropy(parallel(images[own]), labels[own])
                    state.optimizer.zero_grad()
                    loss.backward()  # averages the gradients over the members
                if step.committed:
                    state.optimizer.step()
                    state.step += 1
                    if group.rank() == 0:
                        report(
                            event="step",
                            step=state.step,
                            loss=loss.item(),
                            size=group.size(),
                            generation=group.generation,
                        )
    with torch.no_grad():
        accuracy = (model(held_out).argmax(dim=1) == answers).float().mean().item()
    report(event="done", accuracy=accuracy)


if options.job:
    train(options.job)
    sys.exit(0)

# -- the program that starts and kills --------------------------------------------------------------

mpl.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402

from asyncdist.store import TCPStore  # noqa: E402

events: list[dict[str, Any]] = []
console = Console()


def start(job: str) -> subprocess.Popen[str]:
    """Start a process that trains, and collect what it reports."""
    command = [sys.executable, __file__, "--job", job]
    for name in ("ranks", "steps", "seed"):
        command += [f"--{name}", str(getattr(options, name))]
    # Ctrl-C in the terminal is for this program, which ends the others.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)

    def collect() -> None:
        assert process.stdout is not None
        events.extend(map(json.loads, process.stdout))

    threading.Thread(target=collect, daemon=True).start()
    return process


def of(kind: str) -> list[dict[str, Any]]:
    return [event for event in list(events) if event["event"] == kind]


options.out.parent.mkdir(parents=True, exist_ok=True)
store = TCPStore("127.0.0.1", 0, is_master=True)
job = f"asyncdist://127.0.0.1:{store.port}/survive"
chance = random.Random(options.seed)
kills: list[float] = []
alive: list[subprocess.Popen[str]] = []
try:
    alive.extend(start(job) for _ in range(options.ranks))
    with Progress(
        TextColumn("[bold]{task.fields[size]} members"), BarColumn(bar_width=36), MofNCompleteColumn(),
        TextColumn("loss [cyan]{task.fields[loss]:.4f}[/]  [red]{task.fields[kills]} killed[/]"), TimeElapsedColumn(),
        console=console, disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        bar = progress.add_task("training", total=options.steps, size=0, loss=float("nan"), kills=0)
        next_kill = None
        while not of("done"):
            steps = of("step")
            # The state lives in the members, so the next one is killed after the replacement of the last one has joined.
            if not steps or steps[-1]["size"] < options.ranks or steps[-1]["time"] < (kills or [0.0])[-1]:
                next_kill = None
            elif next_kill is None and options.kill_every:
                next_kill = time.time() + options.kill_every
            elif next_kill is not None and time.time() >= next_kill and steps[-1]["step"] < 0.95 * options.steps:
                victim = alive.pop(chance.randrange(len(alive)))
                victim.send_signal(signal.SIGKILL)
                kills.append(time.time())
                next_kill = None
                victim.wait()
                alive.append(start(job))
            for process in alive:
                if process.poll():
                    sys.exit(f"process {process.pid} failed with exit code {process.returncode}")
            if steps:
                loss = statistics.fmean(event["loss"] for event in steps[-20:])
                progress.update(bar, completed=steps[-1]["step"], size=steps[-1]["size"], loss=loss, kills=len(kills))
            time.sleep(0.02)
    joined = {event["pid"] for event in of("generation")}
    for process in alive:
        if process.pid in joined:  # a replacement may have come too late
            process.wait(timeout=60)
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(128 + signal.SIGINT)
finally:
    for process in alive:
        process.kill()
        process.wait()
    store.close()

# -- what it cost -----------------------------------------------------------------------------------

steps = of("step")
times = [event["time"] for event in steps]
regroups: list[tuple[float, float]] = []
newcomers: list[tuple[float, float]] = []
"""From when to when no step was committed, because a member was lost or a newcomer was taken in or waited for."""
for before, after in itertools.pairwise(steps):
    if after["generation"] != before["generation"]:
        killed = [moment for moment in kills if moment < after["time"]]
        if after["size"] < before["size"]:
            regroups.append((killed[-1] if killed else before["time"], after["time"]))
        else:
            newcomers.append((before["time"], after["time"]))
accuracy = max(event["accuracy"] for event in of("done"))
sizes = sorted({event["size"] for event in steps})
print(
    f"{steps[-1]['step']} steps in {times[-1] - times[0]:.1f} s, {len(kills)} processes killed, "
    f"{sizes[0]} to {sizes[-1]} members, test accuracy {accuracy:.4f}"
)
for spans, text in ((regroups, "regrouped after a kill"), (newcomers, "waited for a newcomer")):
    if spans:
        pauses = [1000 * (end - begin) for begin, end in spans]
        print(f"{text}: {len(spans)} times, median {statistics.median(pauses):.0f} ms, longest {max(pauses):.0f} ms")

figure, (curve, count) = plt.subplots(2, figsize=(10, 6.4), height_ratios=(2.2, 1), sharex=True, layout="constrained")
origin = times[0]
seconds = [moment - origin for moment in times]
losses = [event["loss"] for event in steps]
smooth = [statistics.fmean(losses[max(0, place - 19) : place + 1]) for place in range(len(losses))]
curve.plot(seconds, losses, color="#9ecae1", linewidth=0.8, label="each step (rank 0's share)")
curve.plot(seconds, smooth, color="#08519c", linewidth=2, label="mean of 20 steps")
curve.set(ylabel="cross-entropy loss", yscale="log")
count.step(seconds, [event["size"] for event in steps], where="post", color="#08519c", linewidth=2)
count.set(xlabel="seconds", ylabel="members", ylim=(0, options.ranks + 0.6), yticks=range(options.ranks + 1))
for axes in (curve, count):
    for place, moment in enumerate(kills):
        axes.axvline(moment - origin, color="#cb181d", linewidth=1, linestyle="--", label="kill" if not place else None)
    for spans, color, text in ((regroups, "#fb6a4a", "regroups"), (newcomers, "#238b45", "waits for a newcomer")):
        for place, (begin, end) in enumerate(spans):
            label = text if not place else None
            axes.axvspan(begin - origin, end - origin, color=color, alpha=0.5, linewidth=1, label=label)
    axes.spines[["top", "right"]].set_visible(False)
curve.legend(framealpha=0.9, edgecolor="none")
curve.set_title(
    f"Digits on {options.ranks} processes, {len(kills)} killed: {accuracy:.1%} right, no checkpoint",
    loc="left",
    weight="bold",
)
figure.savefig(options.out, dpi=150)
print(f"wrote {options.out}")
if accuracy < 0.95:
    sys.exit("the accuracy is below 0.95")
