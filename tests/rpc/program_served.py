"""Processes that serve objects and call them, for tests that kill and stop them."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from asyncdist import rpc
from asyncdist.config import Config


class Worker:
    """Tells the test over a pipe what it does."""

    def __init__(self, test: Any) -> None:
        self.test = test
        self.cancelled = 0
        self.weights = torch.arange(4.0)

    async def echo(self, value: Any) -> Any:
        return value

    async def wait(self) -> None:
        self.test.send("waiting")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def wait_in_thread(self) -> None:
        self.test.send("waiting")
        self.test.recv()

    async def stream(self) -> Any:
        for number in range(10**9):
            yield number

    async def itself(self) -> rpc.RemoteReference:
        return rpc.refer(self)

    async def num_cancelled(self) -> int:
        return self.cancelled


def serve(test: Any, job: str, heartbeat: float, host: str | None, rank: int) -> None:
    """Serve a worker under the name "worker" until the test says so."""

    async def main() -> None:
        config = Config(heartbeat=heartbeat, host=host, timeout=60.0)
        async with rpc.serve({"worker": Worker(test)}, job, rank=rank, config=config):
            test.send("serving")
            await asyncio.Event().wait()

    asyncio.run(main())


def call(test: Any, job: str) -> None:
    """Call the worker, and be killed with the calls in flight."""

    async def main() -> None:
        async with rpc.connect(job):
            worker = await rpc.find("worker")
            calls = [worker.wait() for _ in range(10)]
            streams = [aiter(worker.stream()) for _ in range(3)]
            for stream in streams:
                await anext(stream)
            test.send("calling")
            await asyncio.gather(*calls)

    asyncio.run(main())
