"""Event loops that end, or are blocked, while operations are pending that they drive."""

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asyncdist.base.background_loop import background_loop
from asyncdist.errors import OperationTimeoutError
from asyncdist.groups.world import open_world
from asyncdist.store import HashStore
from tests.conftest import LOOPS

pytestmark = pytest.mark.each_loop
ESSENTIAL = {("inproc", "uvloop"), ("shm", "asyncio-debug"), ("tcp", "uvloop")}
"""The pairs of a transport and a loop that `make test` runs."""


class Two:
    """Two ranks: rank 0 runs in a loop of its own, ``home``, rank 1 in the background loop."""

    def __init__(self, transport, home):
        self.home = home
        self._where = {"backend": transport, "store": HashStore(), "world_size": 2}

    async def open(self):
        background = asyncio.to_thread(lambda: background_loop().run(open_world(rank=1, **self._where)))
        self.world, self.other = await asyncio.gather(open_world(rank=0, home=self.home, **self._where), background)

    def all_reduce(self, **how):
        return self.world.group.all_reduce(torch.ones(2), **how)

    def all_reduce_there(self):
        return self.other.group.all_reduce(torch.ones(2), background=False).result().tolist()

    def end_home(self):
        """End the loop as `asyncio.run` does, but do not close it: the world's connection to its store uses it."""
        self.home.run_until_complete(self.home.shutdown_asyncgens())

    def close(self):
        background_loop().run(self.other.close())
        self.home.run_until_complete(self.world.close())
        # Pytest would keep the worlds, and their mapped memory.
        del self.world, self.other


@pytest.fixture(
    params=[
        pytest.param(pair, id="-".join(pair), marks=() if pair in ESSENTIAL else pytest.mark.exhaustive)
        for pair in itertools.product(["inproc", "shm", "tcp"], LOOPS)
    ]
)
def two(request):
    transport, kind = request.param
    home = LOOPS[kind]()
    two = Two(transport, home)
    home.run_until_complete(two.open())
    yield two
    two.close()
    home.close()


def test_operation_continues_in_background_after_its_loop_ends(two, until):
    async def begin():
        return two.all_reduce()

    work = two.home.run_until_complete(begin())
    two.end_home()
    assert two.all_reduce_there() == [2.0, 2.0]
    until(work.is_completed)
    assert work.result().tolist() == [2.0, 2.0]


def test_operation_keeps_its_deadline_after_its_loop_ends(two, until):
    async def begin():
        return two.all_reduce(timeout=0.5)

    work = two.home.run_until_complete(begin())
    two.end_home()
    until(work.is_completed)
    assert isinstance(work.exception(), OperationTimeoutError)


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "stops"])
def test_waiter_on_another_loop_does_not_hang_when_driving_loop_ends(two, ends):
    works = []

    async def elsewhere():
        works.append(two.all_reduce())
        return (await works[0]).tolist()

    async def run_until_a_task_waits():
        while not (works and works[0]._callbacks):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(asyncio.run, elsewhere())
        two.home.run_until_complete(run_until_a_task_waits())
        if ends:
            two.end_home()
        assert two.all_reduce_there() == [2.0, 2.0]
        assert result.result() == [2.0, 2.0]


def test_waiter_on_another_loop_does_not_hang_while_driving_loop_is_blocked(two):
    async def await_one():
        waiting = asyncio.ensure_future(two.all_reduce())
        await asyncio.sleep(0)
        assert await asyncio.to_thread(two.all_reduce_there) == [2.0, 2.0]
        return (await waiting).tolist()

    for _ in range(2):
        assert asyncio.run(await_one()) == [2.0, 2.0]
        two.home.run_until_complete(asyncio.sleep(0))


def test_cancelled_waits_keep_no_threads_while_driving_loop_is_blocked(two):
    async def cancel_many():
        works = [two.all_reduce() for _ in range(50)]
        waiting = [asyncio.ensure_future(work) for work in works]
        await asyncio.sleep(0)
        for one in waiting[:-1]:
            one.cancel()
        await asyncio.wait(waiting[:-1])
        # Threads of the same pool complete the futures.
        futures = [work.get_future() for work in works]
        await asyncio.to_thread(lambda: [two.all_reduce_there() for _ in works])
        assert (await waiting[-1]).tolist() == [2.0, 2.0]
        return await asyncio.to_thread(lambda: [future.wait().tolist() for future in futures])

    assert asyncio.run(cancel_many()) == [[2.0, 2.0]] * 50
