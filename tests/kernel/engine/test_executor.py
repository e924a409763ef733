"""How the work of a driver's turn grows with the number of pending operations: thousands may have been issued at once."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

from asyncdist.kernel.engine import executor
from asyncdist.testing.cluster import world_of

COUNT = 300


@pytest.fixture
def resumed(monkeypatch):
    """Holds an item for each time that a task was resumed."""
    resumed, resume = [], executor.Executor.resume
    monkeypatch.setattr(executor.Executor, "resume", lambda self, task: resumed.append(1) or resume(self, task))
    return resumed


def issue(group, count=COUNT):
    return [group.all_reduce(torch.full((3,), float(number))) for number in range(count)]


@pytest.mark.parametrize("more", [0, 1], ids=["turn", "further call"])
async def test_turn_or_call_does_not_poll_each_of_the_collectives_that_wait_for_earlier_ones(resumed, more):
    async with world_of(2, transport="shm") as (first, second):
        works = issue(first)
        del resumed[:]
        works += issue(first, more)
        if not more:
            first.endpoint.progress.submit(lambda: None)
            assert resumed
        assert len(resumed) < COUNT / 4
        for together in zip(works, issue(second) + issue(second, more), strict=True):
            one, other = [await work for work in together]
            assert torch.equal(one, other)


@pytest.mark.parametrize("nbytes", [12, 400_000])
async def test_collectives_of_several_groups_that_wait_for_each_other_complete(nbytes):
    """The ranks call the groups in different orders, and each has far more calls pending than a turn polls."""
    async with world_of(2, transport="shm") as groups:
        others = [group.world.new_group(None) for group in groups]
        orders = [list(itertools.chain(*[[each] * 40 for each in both])) for both in zip(groups, others, strict=True)]
        orders[1].reverse()
        tensors = [[torch.ones(nbytes // 4) for _ in order] for order in orders]
        works = [
            each.all_reduce(tensor)
            for order, own in zip(orders, tensors, strict=True)
            for each, tensor in zip(order, own, strict=True)
        ]
        await asyncio.gather(*works)
        assert all(tensor.eq(2).all() for own in tensors for tensor in own)


async def test_deadlines_of_many_operations_are_not_all_looked_at_for_each_of_them():
    """Each look at the pending operations is followed by a pause in proportion to their number."""
    async with world_of(2, transport="shm") as (first, _):
        works = [first.recv(torch.zeros(1), 1, tag=tag) for tag in range(COUNT)]
        own = first.endpoint._executor
        now = min(operation.due for operation in own.operations.values())
        with first.endpoint.progress.turns.lock:
            own.expire(now)
        assert own.next_deadline > now + COUNT * 5e-6
        assert not any(work.is_completed() for work in works)


async def test_many_pending_receives_cost_no_look_at_each_in_each_call():
    async with world_of(2, transport="shm") as (first, _):
        first.recv(torch.zeros(1), 1)
        assert first.endpoint.only_receives()
        for tag in range(1, COUNT):
            first.recv(torch.zeros(1), 1, tag=tag)
        assert not first.endpoint.only_receives()
