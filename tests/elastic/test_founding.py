"""The founder of a generation is found, although processes are stopped, answers are lost, and jobs are named alike."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from asyncdist.elastic import session as session_module
from asyncdist.elastic.errors import JobTimeoutError
from asyncdist.elastic.job import GenerationRecord, Job
from asyncdist.elastic.session import JobSession, join
from asyncdist.errors import StoreConnectionError
from asyncdist.groups.world import World
from asyncdist.rendezvous.init_method import InitMethod
from asyncdist.status import discovery
from asyncdist.store import AsyncStore, StoreServer
from asyncdist.store.prefix import AsyncPrefixStore


@pytest.fixture
async def store() -> AsyncIterator[AsyncStore]:
    server = await StoreServer.start("127.0.0.1", 0)
    store = await AsyncStore.connect("127.0.0.1", server.port)
    try:
        yield store
    finally:
        await store.close()
        await server.close()


def url_of(store: AsyncStore) -> str:
    return f"asyncdist://127.0.0.1:{store.port}/test"


async def wait_stopped(store: AsyncStore) -> int:
    """Announce a process that waits, as if it were stopped at once; return its id."""
    process = await store.add("elastic/test/next_id", 1)
    await store.set(f"elastic/test/waiting/{process}", "0", ephemeral=True)
    return process


async def first_generation(store: AsyncStore, size: int, start_size: int) -> tuple[int, ...]:
    """Be a member of one generation, and return the ids of its members."""
    async with join(url_of(store), min_size=size, start_size=start_size, backend="inproc", timeout=20.0) as session:
        group = await anext(session.generations())
        await group.barrier()
        assert group.size() == size
        return session._names


@pytest.mark.parametrize(("num_before", "num_after"), [(1, 0), (0, 1), (2, 2)])
async def test_stopped_processes_are_passed_over_before_a_job_begins(
    store: AsyncStore, num_before: int, num_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_ATTEMPT", 0.5)
    for _ in range(num_before):
        await wait_stopped(store)
    first = asyncio.create_task(first_generation(store, 2, 2))
    own = num_before + 1
    await store.wait([f"elastic/test/waiting/{own}"])
    for _ in range(num_after):
        await wait_stopped(store)
    second = first_generation(store, 2, 2)
    assert await asyncio.gather(first, second) == [(own, own + num_after + 1)] * 2


async def test_message_of_a_wait_among_enough_processes_does_not_contradict_itself(store: AsyncStore) -> None:
    await wait_stopped(store)
    with pytest.raises(JobTimeoutError, match="2 processes are present, and a generation needs 2; they have not met"):
        async with join(url_of(store), min_size=2, backend="inproc", timeout=0.5) as session:
            await anext(session.generations())


async def test_waiting_processes_leave_a_generation_alone_whose_members_are_meeting(
    store: AsyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting, may_meet, records, replace = asyncio.Event(), asyncio.Event(), [], Job._replace
    open_world = session_module.open_world

    async def open_slowly(**options: Any) -> World:
        meeting.set()
        await may_meet.wait()
        return await open_world(**options)

    async def replace_and_note(self: Job, record: GenerationRecord, desired: GenerationRecord) -> bool:
        records.append((desired.number, desired.members, desired.begun))
        return await replace(self, record, desired)

    monkeypatch.setattr(session_module, "open_world", open_slowly)
    monkeypatch.setattr(Job, "_replace", replace_and_note)
    founder = asyncio.create_task(first_generation(store, 1, 1))
    await meeting.wait()
    other = asyncio.create_task(first_generation(store, 1, 1))
    await store.wait(["elastic/test/waiting/2"])
    await asyncio.sleep(2 * session_module._SETTLE)
    may_meet.set()
    await founder
    await other
    assert records[:2] == [(1, (1,), 0), (1, (1,), 1)]


@pytest.mark.parametrize("is_applied", [True, False])
async def test_outcome_of_a_record_that_is_unknown_is_read_from_the_store(
    store: AsyncStore, is_applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was restarted, or has ended the lease, while the request was on its way."""
    failures: list[str] = []

    def unknown_at_first(name: str) -> None:
        request: Callable[..., Awaitable[Any]] = getattr(AsyncPrefixStore, name)

        async def fail(self: AsyncPrefixStore, *arguments: Any) -> Any:
            if name not in failures:
                failures.append(name)
                if is_applied:
                    await request(self, *arguments)
                raise StoreConnectionError(f"whether {name} was done is unknown")
            return await request(self, *arguments)

        monkeypatch.setattr(AsyncPrefixStore, name, fail)

    for name in ("add", "compare_set", "delete_key"):
        unknown_at_first(name)
    job = Job(store, "test")
    await job.open()
    try:
        await job.wait_to_join(0)
        assert await job.begin_generation(GenerationRecord(), 1, (job.id,), 0)
        await job.become_member()
        assert await job.confirm_generation(job.record)
        assert job.record == GenerationRecord(1, (job.id,), 1)
        assert not await job.begin_generation(GenerationRecord(), 1, (7,), 0)
    finally:
        await job.close()
    assert failures == ["add", "delete_key", "compare_set"]


async def test_job_whose_name_is_a_path_below_another_one_keeps_its_keys(store: AsyncStore) -> None:
    outer, inner = Job(store, "digits"), Job(store, "digits/world/1")
    for job in (outer, inner):
        await job.open()
    try:
        await inner.wait_to_join(0)
        await inner.begin_generation(GenerationRecord(), 1, (1,), 0)
        await outer.begin_generation(GenerationRecord(), 1, (1,), 1)
        await outer.begin_generation(outer.record, 2, (1,), 2)
        assert sorted(await inner.store.list_keys()) == ["generation", "next_id", "waiting/1"]
        assert outer.waiting == {}
        # `top` looks where the members announce themselves.
        await inner.become_member(b"record")
        prefixes = discovery._prefixes(InitMethod("daemon", 0, 1, path="digits/world/1"))
        assert any(key.startswith(prefixes) for key in await store.list_keys() if "/member/" in key)
    finally:
        for job in (outer, inner):
            await job.close()


async def test_many_newcomers_that_do_not_come_are_refused_at_one_depth(
    store: AsyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths: list[int] = []

    async def meet_in_vain(self: JobSession, group: object, record: GenerationRecord, deadline: object) -> None:
        depths.append(len(inspect.stack()))
        if len(depths) == 6:
            await store.delete_key("elastic/test/waiting/9")
            await self._job.until(lambda: not self._job.waiting)
        else:
            await store.set("elastic/test/waiting/9", str(record.number))
            await self._job.until(lambda: bool(self._job.candidates()))

    async with join(url_of(store), backend="inproc", timeout=20.0) as session:
        group = await anext(session.generations())
        monkeypatch.setattr(JobSession, "_meet_newcomers", meet_in_vain)
        await store.set("elastic/test/waiting/9", "1")
        async for _ in group.watch_members():
            break
        async with group.step():
            pass
        assert await anext(session.generations()) is group
    assert len(depths) == 6
    assert len(set(depths)) == 1
