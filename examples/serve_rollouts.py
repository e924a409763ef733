"""Replicas of an inference engine answer a trainer, as in SGLang or verl; one is killed and replaced, no prompt is lost.

    python examples/serve_rollouts.py

A replica is two processes with half of the model each, in a group of their own. Rank 0 is its scheduler: in every step it
broadcasts an order to the other rank, to compute a batch or to load new weights. The trainer sends prompts to whatever
replicas there are, compares each answer with the version of the weights that it names, and publishes the next version. In
the middle it kills one rank of replica 0. The other rank learns of it within milliseconds and ends, so the trainer sends
the open prompts to another replica. It exits with 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import Any

import torch
from torch import nn

import asyncdist as dist
from asyncdist import rpc, weights
from asyncdist.errors import PeerLostError
from asyncdist.store import StoreServer

arguments = argparse.ArgumentParser(
    description="Replicas that are killed and replaced; see the first lines of this file."
)
arguments.add_argument("--steps", type=int, default=30, help="versions of the weights, 30 by default")
arguments.add_argument(
    "--replica", type=int, nargs=2, help=argparse.SUPPRESS
)  # the number of a replica, and the rank in it
arguments.add_argument("--store", help=argparse.SUPPRESS)
options = arguments.parse_args()
if options.steps < 4:
    arguments.error(f"--steps {options.steps}: must be at least 4, to answer before and after the kill")
torch.set_num_threads(1)

WIDTH, VOCABULARY, RANKS, PROMPTS = 64, 32, 2, 16  # ranks of a replica, and prompts of a step

# -- a replica ----------------------------------------------------------------------------------------


def half(name: str, shape: tuple[int, ...]) -> slice | tuple[slice, slice]:
    """Return this rank's part: rows of the first layer, columns of the second."""
    part = slice(options.replica[1] * WIDTH // RANKS, (options.replica[1] + 1) * WIDTH // RANKS)
    return part if name == "0.weight" else (slice(None), part)


class Engine:
    """One rank of a replica."""

    def __init__(self, subscriber: weights.Subscriber) -> None:
        self.subscriber = subscriber

    async def load(self, _: None = None) -> None:
        """Swap in the newest version that all ranks have."""
        numbers = [0, 1]
        while len(set(numbers)) > 1:
            if self.subscriber.current is None or self.subscriber.current.number < max(numbers):
                async with self.subscriber.swap(await self.subscriber.next()):
                    pass
            assert self.subscriber.current is not None
            await dist.all_gather_object(numbers, self.subscriber.current.number)

    async def compute(self, prompts: list[int]) -> list[tuple[int, int]]:
        """Return the next token after each prompt, and the step of the weights."""
        with self.subscriber.reading() as (halves, version), torch.inference_mode():
            inputs = nn.functional.one_hot(torch.tensor(prompts), VOCABULARY).float()
            outputs = (inputs @ halves["0.weight"].T).relu() @ halves["2.weight"].T
            await dist.all_reduce(outputs)
            return [(token, version.step or 0) for token in outputs.argmax(1).tolist()]


class Scheduler:
    """Rank 0 of a replica, which the trainer calls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: asyncio.Queue[tuple[int, asyncio.Future[tuple[int, int]]]] = asyncio.Queue()

    async def answer(self, prompt: int) -> tuple[int, int]:
        answered: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((prompt, answered))
        return await answered

    async def run(self) -> None:
        """Give an order to all ranks in every step; the prompts that wait are a batch."""
        newest = asyncio.create_task(self._engine.subscriber.next())
        while True:
            batch = [await self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            if newest.done():
                await dist.broadcast_object_list([("load", None)])
                await self._engine.load()
                newest = asyncio.create_task(self._engine.subscriber.next())
            prompts = [prompt for prompt, _ in batch]
            await dist.broadcast_object_list([("compute", prompts)])
            for (_, answered), answer in zip(batch, await self._engine.compute(prompts), strict=True):
                if not answered.done():
                    answered.set_result(answer)


async def serve() -> None:
    number, rank = options.replica
    await dist.init_process_group(init_method=f"{options.store}/replica{number}", rank=rank, world_size=RANKS)
    like = {"0.weight": torch.empty(WIDTH // RANKS, VOCABULARY), "2.weight": torch.empty(VOCABULARY, WIDTH // RANKS)}
    async with AsyncExitStack() as stack:
        subscriber = weights.Subscriber(like=like, slices=half, job=f"{options.store}/rollouts")
        engine = Engine(await stack.enter_async_context(subscriber))
        await engine.load()
        if rank == 0:
            scheduler = Scheduler(engine)
            await stack.enter_async_context(
                rpc.serve({"scheduler": scheduler}, job=f"{options.store}/rollouts", rank=number)
            )
            await scheduler.run()
        while True:
            order: list[Any] = [None]
            await dist.broadcast_object_list(order)
            name, argument = order[0]
            await getattr(engine, name)(argument)


# -- the trainer --------------------------------------------------------------------------------------


class Router:
    """Sends each prompt to a replica, and to another one if that dies."""

    def __init__(self) -> None:
        self.schedulers: dict[int, Any] = {}
        self.answered: dict[int, int] = {}
        self.sent_again = 0

    async def add(self, number: int) -> None:
        self.schedulers[number] = await rpc.find("scheduler", rank=number, timeout=120)

    async def ask(self, prompt: int) -> tuple[int, int]:
        while True:
            number = min(self.schedulers, key=lambda each: self.answered.get(each, 0))
            self.answered[number] = self.answered.get(number, 0) + 1
            try:
                answer: tuple[int, int] = await self.schedulers[number].answer(prompt, timeout=60)
                return answer
            except rpc.CalleeLostError:
                self.sent_again += 1
                if self.schedulers.pop(number, None) is not None:
                    print(f"replica {number} is lost", flush=True)


def start(number: int, store: str) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, __file__, "--store", store, "--replica", str(number)]
    return [subprocess.Popen([*command, str(rank)], process_group=0) for rank in range(RANKS)]


async def train(store: str, replicas: list[list[subprocess.Popen[bytes]]]) -> Router:
    torch.manual_seed(0)
    model, router = (
        nn.Sequential(nn.Linear(VOCABULARY, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, VOCABULARY, bias=False)),
        Router(),
    )
    expected: list[list[int]] = []
    async with weights.Publisher(model, job=f"{store}/rollouts") as publisher, rpc.connect(f"{store}/rollouts"):
        replicas += [start(0, store), start(1, store)]
        for step in range(options.steps):
            with torch.no_grad():  # an update of the policy
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                expected.append(model(torch.eye(VOCABULARY)).argmax(1).tolist())
            await publisher.publish(step)
            if step == 0:
                await asyncio.gather(router.add(0), router.add(1))
            prompts = torch.randint(VOCABULARY, (PROMPTS,)).tolist()
            asking = [asyncio.create_task(router.ask(prompt)) for prompt in prompts]
            if step == options.steps // 2:
                replicas[0][1].kill()
                replicas.append(start(2, store))
                await router.add(2)
            for prompt, (token, version) in zip(prompts, await asyncio.gather(*asking), strict=True):
                if token != expected[version][prompt]:
                    raise SystemExit(f"{token} after {prompt} is not the answer of version {version}")
    return router


async def main() -> Router:
    replicas: list[list[subprocess.Popen[bytes]]] = []
    async with await StoreServer.start("127.0.0.1", 0) as store:
        try:
            return await train(f"asyncdist://127.0.0.1:{store.port}", replicas)
        finally:
            for process in itertools.chain.from_iterable(replicas):
                process.kill()
                process.wait()


if options.replica is not None:
    try:
        asyncio.run(serve())
    except PeerLostError as error:
        # The group of a replica does not outlive a rank: end, so that the trainer asks others.
        print(f"replica {options.replica[0]}: {error.summary}", flush=True)
        os._exit(1)
router = asyncio.run(main())
for number, count in sorted(router.answered.items()):
    print(f"replica {number}: {count} prompts")
print(f"all {options.steps * PROMPTS} answers are right; {router.sent_again} prompts were sent again")
