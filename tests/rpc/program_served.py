"""Processes that serve objects and call them, for tests that kill and stop them."""

import asyncio

import torch

from asyncdist import rpc
from asyncdist.config import Config


class Worker:
    """Tells the test over a pipe what it does."""

    def __init__(self, test):
        self.test = test
        self.cancelled = 0
        self.weights = torch.arange(4.0)

    async def echo(self, value):
        return value

    async def wait(self):
        self.test.send("waiting")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def wait_in_thread(self):
        self.test.send("waiting")
        self.test.recv()

    async def stream(self):
        for number in range(10**9):
            yield number

    async def itself(self):
        return rpc.refer(self)

    async def num_cancelled(self):
        return self.cancelled


def serve(test, job, heartbeat, host, rank):
    """Serve a worker under the name "worker" until the test says so."""

    async def main():
        config = Config(heartbeat=heartbeat, host=host, timeout=60.0)
        async with rpc.serve({"worker": Worker(test)}, job, rank=rank, config=config):
            test.send("serving")
            await asyncio.Event().wait()

    asyncio.run(main())


def call(test, job):
    """Call the worker, and be killed with the calls in flight."""

    async def main():
        async with rpc.connect(job):
            worker = await rpc.find("worker")
            calls = [worker.wait() for _ in range(10)]
            streams = [aiter(worker.stream()) for _ in range(3)]
            for stream in streams:
                await anext(stream)
            test.send("calling")
            await asyncio.gather(*calls)

    asyncio.run(main())
