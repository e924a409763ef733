"""Reinforcement learning: actors play with the newest policy while a learner improves and publishes it.

    python examples/actor_learner.py                    # a learner and three actors; one is killed and replaced
    python examples/actor_learner.py --actors 8

The program starts the actors, serves the store, and is the learner. The task is CartPole: a pole on a cart, which falls
unless the cart is pushed to the right side in time (Barto, Sutton and Anderson, 1983); a round ends after 500 steps.

Each actor serves remote calls (`asyncdist.rpc`) and subscribes to the weights (`asyncdist.weights`). The learner awaits
rollouts of all actors at a time, and takes those that come first. From a few of them it computes an update (PPO) and
publishes the policy. An actor swaps a new version in while it plays: a rollout says which version it was played with. In
the middle an actor is killed with SIGKILL, and a new one takes its place.

At the end the program prints a table and plots the length of the rounds over time, with the death and the arrival, in
out/actor_learner.png if matplotlib is installed. It exits with 1 if the pole does not stay up for 150 steps on average.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from asyncdist import rpc, weights
from asyncdist.store import StoreServer

arguments = argparse.ArgumentParser(description="Actors and a learner; see the first lines of this file.")
arguments.add_argument("--actors", type=int, default=3, help="number of actors, 3 by default")
arguments.add_argument("--updates", type=int, default=120, help="number of updates of the policy, 120 by default")
arguments.add_argument("--out", type=Path, default=Path("out/actor_learner.png"), help="file of the plot")
arguments.add_argument("--actor", type=int, help=argparse.SUPPRESS)  # the number of an actor, which the learner starts
arguments.add_argument("--job", help=argparse.SUPPRESS)
options = arguments.parse_args()
if options.actors < 2:
    arguments.error(f"--actors {options.actors}: needs at least 2, or none is left when one is killed")
if options.updates < 10:
    arguments.error(f"--updates {options.updates}: must be at least 10")
torch.set_num_threads(1)

CARTS, STEPS = 32, 64  # carts of an actor, and steps of a rollout
PER_UPDATE = 2  # rollouts of an update
LONGEST = 500  # steps of a round
DISCOUNT, TRACE, CLIP = 0.99, 0.95, 0.2


class Policy(nn.Module):
    """The probabilities of a push to the left and to the right, and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(states).log_softmax(-1), self.critic(states).squeeze(-1)


# -- an actor ---------------------------------------------------------------------------------------


class Carts:
    """Several carts with poles. A state is the place and speed of a cart, and the angle and angular speed of its pole."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.states = self._fresh()
        self.ages = torch.zeros(CARTS)

    def _fresh(self) -> torch.Tensor:
        return torch.rand(CARTS, 4, generator=self._random) * 0.1 - 0.05

    def choose(self, log_probabilities: torch.Tensor) -> torch.Tensor:
        """Draw an action for each cart."""
        return torch.multinomial(log_probabilities.exp(), 1, generator=self._random).squeeze(-1)

    def push(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Push each cart for a fiftieth of a second; return which rounds have ended, and the lengths of these."""
        _, speed, angle, turning = self.states.unbind(-1)
        force = 20.0 * actions - 10.0
        sine, cosine = angle.sin(), angle.cos()
        # A pole of 0.1 kg and half a metre from its middle to the end, on a cart of 1 kg.
        pull = (force + 0.05 * turning**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * pull) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        drive = pull - 0.05 * turn * cosine / 1.1
        moves = torch.stack((speed, drive, turning, turn), -1)
        self.states = self.states + 0.02 * moves
        self.ages += 1
        fallen = (self.states[:, 0].abs() > 2.4) | (self.states[:, 2].abs() > 0.2095)
        ended = fallen | (self.ages >= LONGEST)
        lengths = self.ages[ended].clone()
        self.states = torch.where(ended[:, None], self._fresh(), self.states)
        self.ages[ended] = 0
        return ended, lengths


class Player:
    """What an actor serves."""

    def __init__(self, number: int, subscriber: weights.Subscriber) -> None:
        self._carts, self._subscriber = Carts(number), subscriber

    def rollout(self) -> dict[str, Any]:
        """Play with the newest policy. An ordinary method: it runs in a thread, while the loop swaps versions."""
        states, actions, chosen, ends, lengths = [], [], [], [], []
        with torch.inference_mode(), self._subscriber.reading() as (policy, version):
            for _ in range(STEPS):
                now = self._carts.states
                log_probabilities, _ = policy(now)
                action = self._carts.choose(log_probabilities)
                ended, length = self._carts.push(action)
                states.append(now)
                actions.append(action)
                chosen.append(log_probabilities.gather(-1, action[:, None]).squeeze(-1))
                ends.append(ended)
                lengths.append(length)
            states.append(self._carts.states)
            return {
                "states": torch.stack(states).clone(), "actions": torch.stack(actions).clone(),
                "chosen": torch.stack(chosen).clone(), "ends": torch.stack(ends).clone(),
                "lengths": torch.cat(lengths).tolist(), "version": version.number,
            }  # fmt: skip


async def act(number: int, job: str) -> None:
    """Serve rollouts until the learner ends this process."""
    async with weights.Subscriber(like=Policy(), job=job) as subscriber:
        async with subscriber.swap(await subscriber.next()):
            pass
        async with rpc.serve({"player": Player(number, subscriber)}, job=job, rank=number):
            async for version in subscriber:
                async with subscriber.swap(version):
                    pass


# -- the learner ------------------------------------------------------------------------------------


@dataclass
class History:
    """The events, by update. Times are seconds since the first actor has joined."""

    begun: float | None = None
    at: list[float] = field(default_factory=list)
    length: list[float] = field(default_factory=list)
    lag: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    rollouts: dict[int, int] = field(default_factory=dict)

    def now(self) -> float:
        if self.begun is None:
            self.begun = time.monotonic()
        return time.monotonic() - self.begun


class Learner:
    """Computes updates of the policy from rollouts, by proximal policy optimization (Schulman et al., 2017)."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy = Policy()
        self._optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-3)

    def update(self, rollouts: list[dict[str, Any]]) -> None:
        states, actions, chosen, ends = (
            torch.cat([rollout[name] for rollout in rollouts], 1) for name in ("states", "actions", "chosen", "ends")
        )
        with torch.no_grad():
            _, values = self.policy(states)
        going = 1.0 - ends.float()
        # A pole that stays up earns 1 a step: generalized advantage estimation from the last step to the first.
        surprise = 1.0 + DISCOUNT * values[1:] * going - values[:-1]
        advantages = torch.zeros_like(surprise)
        later = torch.zeros_like(surprise[0])
        for step in reversed(range(STEPS)):
            later = advantages[step] = surprise[step] + DISCOUNT * TRACE * going[step] * later
        targets = (advantages + values[:-1]).flatten()
        scaled = ((advantages - advantages.mean()) / (advantages.std() + 1e-6)).flatten()
        inputs, taken, before = states[:-1].flatten(0, 1), actions.flatten(), chosen.flatten()
        for _ in range(4):
            for part in torch.randperm(len(inputs)).split(1024):
                log_probabilities, estimates = self.policy(inputs[part])
                ratio = (log_probabilities.gather(-1, taken[part, None]).squeeze(-1) - before[part]).exp()
                gain = torch.min(ratio * scaled[part], ratio.clamp(1 - CLIP, 1 + CLIP) * scaled[part]).mean()
                entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
                error = nn.functional.smooth_l1_loss(estimates, targets[part])
                self._optimizer.zero_grad()
                (0.5 * error - gain - 0.01 * entropy).backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
                self._optimizer.step()


async def collect(number: int, rollouts: asyncio.Queue[dict[str, Any]], history: History) -> None:
    """Await one rollout of an actor after the other, until the actor dies."""
    try:
        player = await rpc.find("player", rank=number, timeout=120)
        history.events.append((history.now(), f"actor {number} joins"))
        while True:
            rollout = await player.rollout(timeout=60)
            history.rollouts[number] = history.rollouts.get(number, 0) + 1
            await rollouts.put(rollout)
    except rpc.CalleeLostError as error:
        history.events.append((history.now(), f"actor {number} is lost"))
        console.print(f"actor {number}: {error.summary}", markup=False, soft_wrap=True)


console = Console()
progress = Progress(
    TextColumn("update"),
    BarColumn(bar_width=36),
    MofNCompleteColumn(),
    TextColumn("rounds of [cyan]{task.fields[length]:.0f}[/] steps"),
    TimeElapsedColumn(),
    console=console,
    disable=not console.is_terminal,
)
bar = progress.add_task("", total=options.updates, length=0.0)


async def learn(job: str, actors: dict[int, subprocess.Popen[bytes]]) -> History:
    """Update the policy and publish it, with rollouts of whatever actors there are."""
    learner, history = Learner(), History()
    rollouts: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=PER_UPDATE)
    async with (
        weights.Publisher(learner.policy, job=job) as publisher,
        rpc.connect(job),
        asyncio.TaskGroup() as tasks,
    ):
        progress.start()
        newest = await publisher.publish(0)
        for number in range(options.actors):
            actors[number] = start_actor(number, job)
        collecting = [tasks.create_task(collect(number, rollouts, history)) for number in actors]
        update, added = 0, options.actors
        # Not before the actor that is added has played: on a busy machine it takes long to start.
        while update < options.updates or not history.rollouts.get(added):
            update += 1
            batch = [await rollouts.get() for _ in range(PER_UPDATE)]
            await asyncio.to_thread(learner.update, batch)
            history.lag += [newest.number - rollout["version"] for rollout in batch]
            newest = await publisher.publish(update)
            lengths = [length for rollout in batch for length in rollout["lengths"]]
            history.at.append(history.now())
            history.length.append(float(np.mean(lengths)) if lengths else LONGEST)
            history.steps.append(PER_UPDATE * STEPS * CARTS)
            total = max(update, options.updates)  # more, while the actor that is added has not played
            progress.update(bar, completed=update, total=total, length=history.length[-1])
            if update % 20 == 0 and not console.is_terminal:
                print(f"update {update:3d}/{options.updates}: rounds of {history.length[-1]:.0f} steps", flush=True)
            if update == options.updates // 2:
                actors[0].kill()
                actors[added] = start_actor(added, job)
                collecting.append(tasks.create_task(collect(added, rollouts, history)))
        for task in collecting:
            task.cancel()
        progress.stop()
    return history


# -- processes --------------------------------------------------------------------------------------


def start_actor(number: int, job: str) -> subprocess.Popen[bytes]:
    # Ctrl-C in the terminal is for this program, which ends the actors.
    command = [sys.executable, __file__, "--actor", str(number), "--job", job]
    return subprocess.Popen(command, process_group=0)


async def run() -> History:
    """Run the store of the job while the policy is learned, and end the actors."""
    actors: dict[int, subprocess.Popen[bytes]] = {}
    async with await StoreServer.start("127.0.0.1", 0) as store:
        try:
            return await learn(f"asyncdist://127.0.0.1:{store.port}/cartpole", actors)
        finally:
            for process in actors.values():
                process.kill()
                await asyncio.to_thread(process.wait)


if options.actor is not None:
    asyncio.run(act(options.actor, options.job))
    sys.exit()

options.out.parent.mkdir(parents=True, exist_ok=True)
try:
    history = asyncio.run(run())
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)

# -- the table and the plot -------------------------------------------------------------------------

table = Table(title=f"{len(history.at)} updates in {history.at[-1]:.1f} s, {sum(history.steps):,} steps")
for heading in ("updates", "length of a round", "steps per second"):
    table.add_column(heading, justify="right")
tenth = len(history.at) // 10
for first in range(0, tenth * 10, tenth):
    last = first + tenth - 1
    seconds = history.at[last] - (history.at[first - 1] if first else 0.0)
    table.add_row(
        f"{first + 1}-{last + 1}", f"{np.mean(history.length[first : last + 1]):.0f}",
        f"{sum(history.steps[first : last + 1]) / seconds:,.0f}",
    )  # fmt: skip
Console(width=100).print(table)
for number, count in sorted(history.rollouts.items()):
    print(f"actor {number}: {count} rollouts")
lags = np.bincount(history.lag)
print("versions between a rollout and its update: " + ", ".join(f"{lag}: {count}" for lag, count in enumerate(lags)))
final = float(np.mean(history.length[-tenth:]))
print(f"the pole stays up for {final:.0f} steps at the end")


def draw(path: Path) -> None:
    """Plot the length of the rounds over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    axes.plot(history.at, history.length, color="#08519c", linewidth=2)
    axes.set(xlabel="seconds", ylabel="steps of a round", xlim=(0, None), ylim=(0, LONGEST * 1.05))
    axes.set_title("The pole stays up longer while actors come and go", loc="left", weight="bold")
    for at, event in history.events:
        axes.axvline(at, color="#d94801" if "lost" in event else "#74c476", linewidth=1, linestyle=":")
        axes.text(at, LONGEST, f" {event}", rotation=90, va="top", fontsize=8, color="#525252")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if find_spec("matplotlib") is None:
    print("no plot: matplotlib is not installed; in the checkout: pip install '.[examples]'")
else:
    draw(options.out)
    print(f"wrote {options.out}")
if final < 150:
    sys.exit(f"the pole stays up for {final:.0f} steps only")
