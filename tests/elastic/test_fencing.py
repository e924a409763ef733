"""Two parts of a job never commit at the same time: a member whose lease at the store may have ended commits no step."""

import asyncio
import contextlib
import time

import pytest
import torch

from asyncdist.elastic import presence as presence_module
from asyncdist.elastic import session as session_module
from asyncdist.elastic.presence import Presence
from asyncdist.errors import StoreConnectionError, UsageError
from asyncdist.groups.members.training_state import State
from tests.elastic.conftest import enter
from tests.support.faults import Proxy

LEASE = 0.5


@pytest.fixture
def proxy(server, monkeypatch):
    """Return what is between some members and the store. The leases are short."""
    monkeypatch.setattr(session_module, "_LEASE", LEASE)
    proxy = Proxy("127.0.0.1", server.port)
    try:
        yield proxy
    finally:
        proxy.close()


class Story:
    """What the members of a job have seen, in order."""

    def __init__(self):
        self.events = []
        self.is_over = False
        self._told = asyncio.Event()

    def tell(self, *event):
        self.events.append(event)
        self._told.set()

    async def until(self, *event, count=1):
        """Wait until an event has happened ``count`` times from now on."""
        count += self.events.count(event)
        while self.events.count(event) < count:
            self._told.clear()
            await self._told.wait()

    async def both(self, kind):
        """Wait until an event of the members one and two of a generation of two."""
        await asyncio.gather(self.until(kind, "one", 2), self.until(kind, "two", 2))

    async def two_members_that_lose_the_store(self, proxy):
        tasks = [asyncio.create_task(self.member(name, proxy.address[1], 2)) for name in ("one", "two")]
        await self.both("commits")
        proxy.clog()
        proxy.cut()
        return tasks

    async def member(self, name, port, size):
        """Commit steps until the story is over."""
        state = State(weights=torch.zeros(1))
        job = f"asyncdist://127.0.0.1:{port}/test"
        async with enter(job, min_size=1, start_size=size, state=state) as session:
            async for group in session.generations():
                await group.adopt(state)
                self.tell("enters", name, group.size())
                ends = torch.zeros(1)
                while not ends and not group.changed:
                    async with group.step() as step:
                        ends.fill_(self.is_over)
                        await group.all_reduce(ends)
                        await asyncio.sleep(0.001)
                    if step.committed:
                        state.step += 1
                    self.tell("commits" if step.committed else "does not commit", name, group.size())
                    ends *= step.committed


async def test_members_that_lose_the_store_stop_before_a_newcomer_begins_and_join_it_later(server, proxy):
    story = Story()
    tasks = await story.two_members_that_lose_the_store(proxy)
    tasks.append(asyncio.create_task(story.member("newcomer", server.port, 1)))
    await story.until("enters", "newcomer", 1)
    begun = len(story.events)
    await story.until("commits", "newcomer", 1, count=20)
    assert {each for each in story.events[begun:] if each[0] == "commits"} == {("commits", "newcomer", 1)}
    proxy.unclog()
    await asyncio.gather(*(story.until("commits", name, 3) for name in ("one", "two", "newcomer")))
    story.is_over = True
    await asyncio.gather(*tasks)


async def test_members_go_on_together_after_an_outage_in_which_nobody_waits(proxy):
    story = Story()
    tasks = await story.two_members_that_lose_the_store(proxy)
    await story.both("does not commit")
    proxy.unclog()
    await story.both("commits")
    story.is_over = True
    await asyncio.gather(*tasks)
    assert story.events.count(("enters", "one", 2)) == story.events.count(("enters", "two", 2)) == 2


async def test_member_that_computes_on_its_loop_for_longer_than_the_lease_commits(proxy):
    async with enter(f"asyncdist://127.0.0.1:{proxy.address[1]}/test") as session:
        group = await anext(session.generations())
        while session._job.is_shown:
            # A loop that computes answers nothing.
            time.sleep(LEASE)  # noqa: ASYNC251
        async with group.step() as step:
            pass
        assert step.committed
        assert not group.changed


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_member_whose_store_is_lost_for_good_says_so_and_ends(job, server, is_blocking, caplog, monkeypatch):
    monkeypatch.setenv("ASYNCDIST_STORE_RECONNECT", "0")

    def program(loop):
        with enter(job) as session:
            for group in session.generations():
                while not group.changed:
                    with group.step() as step:
                        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
                assert not step.committed

    async def awaiting():
        async with enter(job) as session:
            async for group in session.generations():
                while not group.changed:
                    async with group.step() as step:
                        await server.close()
                assert not step.committed

    loop = asyncio.get_running_loop()
    with pytest.raises(StoreConnectionError):
        await (asyncio.to_thread(program, loop) if is_blocking else awaiting())
    assert "process 1 of job 'test' has lost the store for good" in caplog.text


class FakeStore:
    """A store of which a test says when it answers, on a clock of the test."""

    def __init__(self, lease=2.0):
        self.lease, self.expiries, self.is_there = lease, 0, True
        self.asked = asyncio.Queue()

    async def set(self, key, value, *, ephemeral):
        assert ephemeral

    def check(self, keys):
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(answer)
        return answer


@pytest.fixture
def clock(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(presence_module, "monotonic", lambda: clock[0])
    return clock


@contextlib.asynccontextmanager
async def claimed(store):
    presence = Presence(store, lambda: None)  # type: ignore[arg-type]
    await presence.announce("member/1", b"")
    assert not presence.is_shown
    presence.claim()
    keeping = asyncio.create_task(presence.keep())
    try:
        yield presence
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_lease_counts_from_the_moment_when_the_answered_request_was_sent(clock):
    store = FakeStore()
    async with claimed(store) as presence:
        answer = await store.asked.get()
        clock[0] += 1.0
        answer.set_result(True)
        await asyncio.sleep(0)
        assert presence.is_shown
        clock[0] += 0.49
        assert presence.is_shown
        # The last quarter of the lease is the margin.
        clock[0] += 0.02
        assert not presence.is_shown


async def test_answer_that_comes_late_is_followed_by_another_request_at_once(clock):
    store = FakeStore()
    async with claimed(store) as presence:
        answer = await store.asked.get()
        clock[0] += 7.0
        answer.set_result(True)
        answer = await store.asked.get()
        assert not presence.is_shown
        answer.set_result(True)
        await asyncio.sleep(0)
        assert presence.is_shown


async def test_key_that_the_store_has_deleted_must_be_claimed_again(clock):
    """The client has set it again. In between another process may have found it missing."""
    store = FakeStore()
    async with claimed(store) as presence:
        answer = await store.asked.get()
        store.expiries += 1
        answer.set_result(True)
        await asyncio.sleep(0)
        assert not presence.is_shown
        again = asyncio.create_task(presence.announce_again())
        (await store.asked.get()).set_result(True)
        await again
        assert not presence.is_shown
        presence.claim()
        assert presence.is_shown


async def test_store_that_keeps_no_keys_is_refused():
    with pytest.raises(UsageError, match="for 0 s"):
        Presence(FakeStore(0.0), lambda: None)  # type: ignore[arg-type]
