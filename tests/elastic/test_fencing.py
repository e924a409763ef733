"""Two parts of a job never commit at the same time: a member whose lease at the store may have ended commits no step."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from asyncdist.elastic import presence as presence_module
from asyncdist.elastic import session as session_module
from asyncdist.elastic.presence import Presence
from asyncdist.elastic.session import join
from asyncdist.errors import StoreConnectionError, UsageError
from asyncdist.groups.members.training_state import State
from asyncdist.store import StoreServer
from asyncdist.testing.faults import Proxy

LEASE = 0.5


@pytest.fixture
async def server() -> AsyncIterator[StoreServer]:
    server = await StoreServer.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.close()


@pytest.fixture
def proxy(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    """Return what is between some members and the store. The leases are short."""
    monkeypatch.setattr(session_module, "_LEASE", LEASE)
    proxy = Proxy("127.0.0.1", server.port)
    try:
        yield proxy
    finally:
        proxy.close()


class Story:
    """What the members of a job have seen, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.is_over = False
        self._told = asyncio.Event()

    def tell(self, *event: Any) -> None:
        self.events.append(event)
        self._told.set()

    async def until(self, *event: Any, count: int = 1) -> None:
        """Wait until an event has happened ``count`` times from now on."""
        count += self.events.count(event)
        while self.events.count(event) < count:
            self._told.clear()
            await self._told.wait()

    async def member(self, name: str, port: int, size: int) -> None:
        """Commit steps until the story is over."""
        state = State(weights=torch.zeros(1))
        options: dict[str, Any] = {"min_size": 1, "start_size": size, "state": state, "backend": "inproc"}
        async with join(f"asyncdist://127.0.0.1:{port}/test", timeout=20.0, **options) as session:
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


async def test_members_that_lose_the_store_stop_before_a_newcomer_begins_and_join_it_later(
    server: StoreServer, proxy: Proxy
) -> None:
    story = Story()
    tasks = [asyncio.create_task(story.member(name, proxy.address[1], 2)) for name in ("one", "two")]
    await asyncio.gather(story.until("commits", "one", 2), story.until("commits", "two", 2))
    proxy.clog()
    proxy.cut()
    tasks.append(asyncio.create_task(story.member("newcomer", server.port, 1)))
    await story.until("enters", "newcomer", 1)
    begun = len(story.events)
    await story.until("commits", "newcomer", 1, count=20)
    assert {each for each in story.events[begun:] if each[0] == "commits"} == {("commits", "newcomer", 1)}
    proxy.unclog()
    await asyncio.gather(*(story.until("commits", name, 3) for name in ("one", "two", "newcomer")))
    story.is_over = True
    await asyncio.gather(*tasks)


async def test_members_go_on_together_after_an_outage_in_which_nobody_waits(proxy: Proxy) -> None:
    story = Story()
    tasks = [asyncio.create_task(story.member(name, proxy.address[1], 2)) for name in ("one", "two")]
    await asyncio.gather(story.until("commits", "one", 2), story.until("commits", "two", 2))
    proxy.clog()
    proxy.cut()
    await asyncio.gather(story.until("does not commit", "one", 2), story.until("does not commit", "two", 2))
    proxy.unclog()
    await asyncio.gather(story.until("commits", "one", 2), story.until("commits", "two", 2))
    story.is_over = True
    await asyncio.gather(*tasks)
    assert story.events.count(("enters", "one", 2)) == story.events.count(("enters", "two", 2)) == 2


async def test_member_that_computes_on_its_loop_for_longer_than_the_lease_commits(proxy: Proxy) -> None:
    async with join(f"asyncdist://127.0.0.1:{proxy.address[1]}/test", backend="inproc", timeout=20.0) as session:
        group = await anext(session.generations())
        while session._job.is_shown:
            # A loop that computes answers nothing.
            time.sleep(LEASE)  # noqa: ASYNC251
        async with group.step() as step:
            pass
        assert step.committed
        assert not group.changed


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_member_whose_store_is_lost_for_good_says_so_and_ends(
    server: StoreServer, is_blocking: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCDIST_STORE_RECONNECT", "0")
    url = f"asyncdist://127.0.0.1:{server.port}/test"

    def program(loop: asyncio.AbstractEventLoop) -> None:
        with join(url, backend="inproc", timeout=20.0) as session:
            for group in session.generations():
                while not group.changed:
                    with group.step() as step:
                        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
                assert not step.committed

    async def awaiting() -> None:
        async with join(url, backend="inproc", timeout=20.0) as session:
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

    def __init__(self, lease: float = 2.0) -> None:
        self.lease, self.expiries, self.is_there = lease, 0, True
        self.asked: asyncio.Queue[asyncio.Future[bool]] = asyncio.Queue()

    async def set(self, key: str, value: bytes, *, ephemeral: bool) -> None:
        assert ephemeral

    def check(self, keys: list[str]) -> asyncio.Future[bool]:
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(answer)
        return answer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(presence_module, "monotonic", lambda: clock[0])
    return clock


@contextlib.asynccontextmanager
async def claimed(store: FakeStore) -> AsyncIterator[Presence]:
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


async def test_lease_counts_from_the_moment_when_the_answered_request_was_sent(clock: list[float]) -> None:
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


async def test_answer_that_comes_late_is_followed_by_another_request_at_once(clock: list[float]) -> None:
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


async def test_key_that_the_store_has_deleted_must_be_claimed_again(clock: list[float]) -> None:
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


async def test_store_that_keeps_no_keys_is_refused() -> None:
    with pytest.raises(UsageError, match="for 0 s"):
        Presence(FakeStore(0.0), lambda: None)  # type: ignore[arg-type]
