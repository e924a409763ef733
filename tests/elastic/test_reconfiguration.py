"""Groups of the processes that have certain handles; here each process is an object on one event loop."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from types import NoneType

import pytest
import torch

from asyncdist import HashStore
from asyncdist.elastic.reconfiguration import ProcessHandle, Reconfiguration
from asyncdist.errors import GroupError, RendezvousError, UsageError

LIMIT = 60.0


class Member:
    """A process: its part in reconfigurations, and its present group."""

    def __init__(self):
        self.part = Reconfiguration(HashStore())
        self.group = None

    async def handle(self):
        return await self.part.handle(self.group, LIMIT)

    async def form(self, uuid, handles, timeout=LIMIT):
        before = self.group
        formed = await self.part.form(before, uuid, handles, timeout)
        self.group = formed
        if before is not None:
            self.part.retire(before, formed, before.world if before.world is not formed.world else None)

    async def sum(self):
        assert self.group is not None
        tensor = torch.ones(1)
        await self.group.all_reduce(tensor)
        return tensor.item()

    async def leave(self):
        await self.part.close()
        if self.group is not None:
            await self.group.world.close()


@asynccontextmanager
async def members(number):
    async with AsyncExitStack() as stack:
        every = [Member() for _ in range(number)]
        stack.push_async_callback(lambda: asyncio.gather(*(each.leave() for each in every)))
        yield every


async def form(uuid, processes):
    handles = [await each.handle() for each in processes]
    await asyncio.gather(*(each.form(uuid, handles) for each in processes))
    assert [each.group.rank() for each in processes if each.group is not None] == list(range(len(processes)))
    assert await asyncio.gather(*(each.sum() for each in processes)) == [len(processes)] * len(processes)


async def test_members_of_one_world_keep_it_and_newcomers_open_another():
    async with members(4) as (a, b, c, d):
        await form(1, [a, b, c])
        assert a.group is not None
        first = a.group.world
        await form(2, [c, a])
        assert a.group.world is first
        # A member that was left out, and is still in the world.
        await form(3, [b, c, a])
        assert a.group.world is first
        await form(4, [d, a, b, c])
        assert a.group.world is not first
        assert first._left


async def test_two_halves_part_and_unite():
    async with members(4) as (a, b, c, d):
        await asyncio.gather(form(1, [a, b]), form(2, [c, d]))
        await form(3, [d, c, b, a])
        await asyncio.gather(form(4, [a, d]), form(5, [b, c]))
        await asyncio.gather(*(form(6 + number, [each]) for number, each in enumerate((a, b, c, d))))
        await form(10, [a, b, c, d])


@pytest.mark.parametrize("ended", [0, 1, 2])
async def test_end_of_a_process_fails_the_others_at_once_and_changes_nothing(ended):
    async with members(3) as every:
        others = [each for number, each in enumerate(every) if number != ended]
        await form(1, others)
        handles = [await each.handle() for each in every]
        before = [each.group for each in others]
        calls = [asyncio.create_task(each.form(2, handles)) for each in others]
        await every[ended].part.close()
        for call in calls:
            with pytest.raises(RendezvousError, match=rf"rank {ended} .* has ended"):
                await call
        assert [each.group for each in others] == before
        await form(3, others)


@pytest.mark.parametrize("steps", [0, 1, 10, 30, 100, pytest.param(300, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("are_connected", [False, True])
async def test_call_that_is_cancelled_at_any_step_can_be_repeated_by_all(steps, are_connected):
    async with members(3) as every:
        if are_connected:
            await form(1, every)
        handles = [await each.handle() for each in every]
        calls = [asyncio.create_task(each.form(2, handles, 1.0)) for each in every]
        for _ in range(steps):
            await asyncio.sleep(0)
        calls[1].cancel()
        # A call that is cancelled after the members have agreed is a member that ends afterwards.
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, NoneType | RendezvousError | GroupError | asyncio.CancelledError), outcome
        await form(3, every)


async def test_member_of_one_world_that_is_lost_fails_the_others_and_they_dial_again():
    async with members(3) as (a, b, c):
        await form(1, [a, b, c])
        assert a.group is not None
        assert c.group is not None
        world = a.group.world
        handles = [await each.handle() for each in (a, b, c)]
        await c.group.world.close()
        calls = [asyncio.create_task(each.form(2, handles)) for each in (a, b)]
        for call in calls:
            with pytest.raises((RendezvousError, GroupError)):
                await call
        await form(3, [b, a])
        assert a.group.world is not world


async def test_handles_that_differ_between_members_never_meet():
    async with members(2) as (a, b):
        handles = [await a.handle(), await b.handle()]
        with pytest.raises(RendezvousError, match="missing 1"):
            await asyncio.gather(a.form(1, handles, 0.3), b.form(1, handles[::-1], 0.3))
        await form(2, [a, b])


def test_handle_survives_its_text_and_other_texts_are_refused():
    handle = ProcessHandle("one", "::1", 29500, "secret", "world", 3, (1, 2))
    assert ProcessHandle.decode(handle.encode()) == handle
    assert str(handle) == "tcp://[::1]:29500"
    for text in ("", "asyncdist:", "asyncdist:AAAA", "gloo:0:1:2:", handle.encode()[:-4], None):
        with pytest.raises(UsageError, match="is not a handle of asyncdist"):
            ProcessHandle.decode(text)
