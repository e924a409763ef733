"""The founder of a generation is found, although processes are stopped, answers are lost, and jobs are named alike."""

import asyncio
import inspect

import pytest

from asyncdist.elastic import founding
from asyncdist.elastic import session as session_module
from asyncdist.elastic.errors import JobTimeoutError
from asyncdist.elastic.job import GenerationRecord, Job
from asyncdist.elastic.session import JobSession
from asyncdist.errors import StoreConnectionError
from asyncdist.rendezvous.init_method import InitMethod
from asyncdist.status import discovery
from asyncdist.store.prefix import AsyncPrefixStore
from tests.elastic.conftest import enter


async def wait_stopped(store):
    """Announce a process that waits, as if it were stopped at once; return its id."""
    process = await store.add("elastic/test/next_id", 1)
    await store.set(f"elastic/test/waiting/{process}", "0", ephemeral=True)
    return process


async def first_generation(job, size, start_size):
    """Be a member of one generation, and return the ids of its members."""
    async with enter(job, min_size=size, start_size=start_size) as session:
        group = await anext(session.generations())
        await group.barrier()
        assert group.size() == size
        return session._names


@pytest.mark.parametrize(("num_before", "num_after"), [(1, 0), (0, 1), (2, 2)])
async def test_stopped_processes_are_passed_over_before_a_job_begins(job, store, num_before, num_after, monkeypatch):
    monkeypatch.setattr(founding, "MEETING_TIMEOUT", 0.5)
    for _ in range(num_before):
        await wait_stopped(store)
    first = asyncio.create_task(first_generation(job, 2, 2))
    own = num_before + 1
    await store.wait([f"elastic/test/waiting/{own}"])
    for _ in range(num_after):
        await wait_stopped(store)
    second = first_generation(job, 2, 2)
    assert await asyncio.gather(first, second) == [(own, own + num_after + 1)] * 2


async def test_message_of_a_wait_among_enough_processes_does_not_contradict_itself(job, store):
    await wait_stopped(store)
    with pytest.raises(JobTimeoutError, match="2 processes are present, and a generation needs 2; they have not met"):
        async with enter(job, min_size=2, timeout=0.5) as session:
            await anext(session.generations())


async def test_waiting_processes_leave_a_generation_alone_whose_members_are_meeting(job, store, monkeypatch):
    meeting, may_meet, records, replace = asyncio.Event(), asyncio.Event(), [], Job._replace
    open_world = session_module.open_world

    async def open_slowly(**options):
        meeting.set()
        await may_meet.wait()
        return await open_world(**options)

    async def replace_and_note(self, record, desired):
        records.append((desired.number, desired.members, desired.begun))
        return await replace(self, record, desired)

    monkeypatch.setattr(session_module, "open_world", open_slowly)
    monkeypatch.setattr(Job, "_replace", replace_and_note)
    founder = asyncio.create_task(first_generation(job, 1, 1))
    await meeting.wait()
    other = asyncio.create_task(first_generation(job, 1, 1))
    await store.wait(["elastic/test/waiting/2"])
    await asyncio.sleep(2 * founding.SETTLE)
    may_meet.set()
    await founder
    await other
    assert records[:2] == [(1, (1,), 0), (1, (1,), 1)]


@pytest.mark.parametrize("is_applied", [True, False])
async def test_outcome_of_a_record_that_is_unknown_is_read_from_the_store(store, is_applied, monkeypatch):
    """The store was restarted, or has ended the lease, while the request was on its way."""
    failures = []

    def unknown_at_first(name):
        request = getattr(AsyncPrefixStore, name)

        async def fail(self, *arguments):
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


async def test_job_whose_name_is_a_path_below_another_one_keeps_its_keys(store):
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


async def test_many_newcomers_that_do_not_come_are_refused_at_one_depth(job, store, monkeypatch):
    depths = []

    async def meet_in_vain(self, group, record, deadline):
        depths.append(len(inspect.stack()))
        if len(depths) == 6:
            await store.delete_key("elastic/test/waiting/9")
            await self._job.until(lambda: not self._job.waiting)
        else:
            await store.set("elastic/test/waiting/9", str(record.number))
            await self._job.until(lambda: bool(self._job.candidates()))

    async with enter(job) as session:
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
