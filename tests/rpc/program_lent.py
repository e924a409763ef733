"""Processes with a pretended device that serve and call, for tests that kill them while tensors are lent."""

import asyncio

import torch

from asyncdist import rpc
from asyncdist.config import Config
from asyncdist.rpc import session as session_module
from tests.support.shared_device import SharedLending

LARGE = 40_000


class Keeper:
    """Has a tensor on its device, and takes tensors."""

    def __init__(self, test):
        self.test = test
        self.taken = 0

    def use(self, session):
        self.lending = session.lending
        self.weights = self.lending.driver.tensor(torch.arange(float(LARGE)))

    async def get(self):
        return self.weights

    async def take(self, value):
        self.taken += 1
        return float(value.sum())

    async def hold(self):
        """Let what this process computes from now on never be ready."""
        self.lending.driver.holds = True

    async def hold_copies(self):
        """Let the copies that this process begins from now on never be complete."""
        self.lending.stream.hold()

    async def state(self):
        return {
            "taken": self.taken,
            "mapped": len(self.lending.driver.mapped),
            "from host": self.lending.num_from_host,
            "tasks": len(self.lending._tasks),
        }


class Other:
    """An object whose calls wait for none of those of the keeper."""

    async def ping(self):
        return 1


def serve(test, job, heartbeat=60.0):
    """Serve a keeper and another object until the test kills this process."""

    async def main():
        session_module.DeviceLending = SharedLending  # type: ignore[misc]
        keeper = Keeper(test)
        config = Config(heartbeat=heartbeat, timeout=60.0)
        async with rpc.serve({"keeper": keeper, "other": Other()}, job, config=config) as session:
            keeper.use(session)
            test.send("serving")
            await asyncio.Event().wait()

    asyncio.run(main())


def call(test, job, moment):
    """Call the keeper with a tensor of this device that is not ready, or that is being copied, and be killed."""

    async def main():
        session_module.DeviceLending = SharedLending  # type: ignore[misc]
        async with rpc.connect(job, config=Config(timeout=60.0)) as session:
            keeper, other = await rpc.find("keeper"), await rpc.find("other")
            tensor = session.lending.driver.tensor(torch.ones(LARGE))
            loans = keeper._caller.loans
            while not loans.lends(tensor):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert await keeper.take(tensor) == LARGE
            if moment == "before":
                session.lending.driver.holds = True
            else:
                await keeper.hold_copies()
            calls = [keeper.take(tensor) for _ in range(3)]
            for _ in range(3):
                await other.ping()
            test.send("lent")
            await asyncio.gather(*calls)

    asyncio.run(main())
