"""Tasks cancelled at every step: while a world opens, while it closes, while works are awaited."""

import asyncio
import gc
import itertools
import time

import pytest
import torch

import asyncdist
from asyncdist.store import HashStore, StoreServer
from asyncdist.testing.cluster import world_of
from tests.support.faults import cancelled_at
from tests.support.ports import free_port

pytestmark = pytest.mark.each_loop

PATIENCE = 60.0


async def steps(count):
    """Let the loop turn ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def use(rank, ready=None, **where):
    """Join a world of two ranks, run an all-reduce, and leave."""
    async with asyncdist.process_group("tcp", rank=rank, world_size=2, timeout=PATIENCE, **where) as group:
        if ready is not None:
            ready.set()
        tensor = torch.ones(10)
        await group.all_reduce(tensor)
        return tensor[0].item()


async def ended(task):
    """Return the result or the error of a task, or "cancelled"."""
    await asyncio.wait([task], timeout=PATIENCE)
    assert task.done()
    return "cancelled" if task.cancelled() else task.exception() or task.result()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("way", "victim"), [("file", 0), ("store", 1), ("tcp", 0), ("tcp", 1)])
async def test_opening_cancelled_at_any_step_leaks_nothing_and_can_be_retried(
    tmp_path, monkeypatch, caplog, way, victim
):
    # Works of other tests log their errors now.
    gc.collect()
    caplog.clear()
    monkeypatch.setattr("asyncdist.kernel.engine.group_failures.GRACE", 0.05)
    outcomes = set()
    for number in itertools.count():
        if way == "file":
            where = {"init_method": f"file://{tmp_path}/world{number}"}
        elif way == "store":
            where = {"store": HashStore()}
        else:
            where = {"init_method": f"tcp://127.0.0.1:{free_port()}"}
        other = asyncio.ensure_future(use(1 - victim, **where))
        entered = asyncio.Event()
        outcome = await ended(asyncio.ensure_future(cancelled_at(number, use(victim, entered, **where))))
        if outcome != "cancelled":
            assert [outcome, await ended(other)] == [2.0, 2.0]
            break
        # The other rank has joined the same world, and may have the data already.
        if entered.is_set():
            outcomes.add(summary(await ended(other)))
            continue
        # The other rank either learns that the world failed, or waits for a second attempt.
        again = asyncio.ensure_future(use(victim, **where))
        await asyncio.wait([again, other], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        joined = summary(await ended(other))
        if joined != 2.0:
            again.cancel()
        outcomes.add((joined, await ended(again)))
    assert number > 8
    assert "never retrieved" not in caplog.text
    failures = {("RendezvousError", "cancelled"), ("PeerLostError", "cancelled"), "PeerLostError"}
    assert {(2.0, 2.0)} < outcomes <= {(2.0, 2.0), 2.0} | failures


async def test_rank_that_finds_a_closing_store_uses_its_successor(monkeypatch):
    close = StoreServer.close

    async def close_while_a_client_connects(server):
        # The loop accepts no connection during this time, and one in the next turn.
        time.sleep(0.15)  # noqa: ASYNC251
        await asyncio.sleep(0)
        await close(server)

    where = {"init_method": f"tcp://127.0.0.1:{free_port()}"}
    other = asyncio.ensure_future(use(1, **where))
    with monkeypatch.context() as patched:
        patched.setattr(StoreServer, "close", close_while_a_client_connects)
        assert await ended(asyncio.ensure_future(cancelled_at(3, use(0, **where)))) == "cancelled"
    again = asyncio.ensure_future(use(0, **where))
    assert [await ended(other), await ended(again)] == [2.0, 2.0]


def summary(outcome):
    return type(outcome).__name__ if isinstance(outcome, Exception) else outcome


@pytest.mark.parametrize("victim", [0, 1])
async def test_leaving_cancelled_at_any_step_leaks_nothing(tmp_path, victim):
    for number in itertools.count():
        where = {"init_method": f"file://{tmp_path}/world{number}"}
        worlds = [asyncdist.process_group("tcp", rank=rank, world_size=2, **where) for rank in range(2)]
        await asyncio.gather(*(world.__aenter__() for world in worlds))
        leaving = [world.__aexit__(None, None, None) for world in worlds]
        leaving[victim] = cancelled_at(number, leaving[victim])
        outcomes = await asyncio.gather(*map(ended, map(asyncio.ensure_future, leaving)))
        assert outcomes[1 - victim] is None or outcomes[1 - victim] is False
        if outcomes[victim] != "cancelled":
            break
    assert number > 1


@pytest.mark.parametrize("count", [10, 500_000])
async def test_cancelled_waiter_does_not_cancel_the_operation(transport, count):
    async with world_of(2, transport=transport) as groups:
        for number in range(12):
            tensors = [torch.full((count,), rank + 1.0) for rank in range(2)]
            first = groups[0].all_reduce(tensors[0])
            waiters = [asyncio.ensure_future(wait_for(first)) for _ in range(3)]
            if number % 2:
                await steps(number)
                waiters[0].cancel()
                second = groups[1].all_reduce(tensors[1])
            else:
                second = groups[1].all_reduce(tensors[1])
                await steps(number // 2)
                waiters[0].cancel()
            assert await second is tensors[1]
            assert await first is tensors[0]
            assert [await waiter is tensors[0] for waiter in waiters[1:]] == [True, True]
            assert await ended(waiters[0]) in ("cancelled", tensors[0]) or waiters[0].result() is tensors[0]
            assert tensors[0][-1] == tensors[1][-1] == 3.0


async def wait_for(work):
    return await work
