"""`asyncdist.elastic`: sessions of one process each, as tasks of one loop, over a store server and the transport inproc."""

import asyncio
import contextlib

import pytest
import torch

from asyncdist.elastic import session as session_module
from asyncdist.elastic.errors import JobTimeoutError
from asyncdist.elastic.job import GenerationRecord, Job
from asyncdist.elastic.session import JobSession, join
from asyncdist.errors import GroupError, LoopThreadError, StoreConnectionError, UsageError
from asyncdist.groups.group import Group
from asyncdist.groups.members.training_state import State
from asyncdist.groups.world import World
from asyncdist.store import AsyncStore
from tests.elastic.conftest import enter


def new_state():
    return State(weights=torch.zeros(4), trace=[])


async def train(job, state, until, *, min_size=1, sizes=None, pace=None, begun=None):
    """Be a member until a number of steps is committed. Each step adds 1 to the weights."""
    async with enter(job, min_size=min_size, state=state) as session:
        async for group in session.generations():
            await group.adopt(state)
            if sizes is not None:
                sizes.append(group.size())
            while state.step < until and not group.changed:
                if pace is not None:
                    await pace.wait()
                async with group.step() as step:
                    gradient = torch.ones(4)
                    await group.all_reduce(gradient)
                    gradient /= group.size()
                if step.committed:
                    state.weights += gradient
                    state.step += 1
                    if begun is not None and state.step == 5:
                        begun.set()
    return state


async def test_founders_form_one_generation_and_end_together(job):
    sizes = []
    states = await asyncio.gather(*(train(job, new_state(), 5, min_size=3, sizes=sizes) for _ in range(3)))
    assert sizes == [3, 3, 3]
    assert [state.step for state in states] == [5, 5, 5]
    assert all(torch.equal(state.weights, torch.full((4,), 5.0)) for state in states)


async def waits_in_vain(job, min_size, words):
    """Join a job, and expect an error whose message matches ``words``."""
    async with enter(job, min_size=min_size, timeout=0.3) as session:
        with pytest.raises(JobTimeoutError, match=words) as raised:
            await anext(session.generations())
    assert isinstance(raised.value, TimeoutError)


async def test_error_says_how_many_processes_a_job_lacks(job):
    await waits_in_vain(job, 3, "in job 'test' 1 process is present, and a generation needs 3; start the others")


async def test_error_says_that_members_admit_nobody(job):
    words = "2 processes are present, .* 1 of them are members of generation 1, which have not begun another"
    async with enter(job) as session:
        await anext(session.generations())
        await waits_in_vain(job, 1, words)


async def test_error_says_that_a_job_may_have_ended(job):
    await train(job, new_state(), 2)
    await waits_in_vain(job, 2, "1 process is present, .* generation 1 has no member left: if the job has ended")


async def test_founders_wait_for_the_least_number_of_members(job, store):
    sizes = []
    first = asyncio.create_task(train(job, new_state(), 2, min_size=2, sizes=sizes))
    await store.wait(["elastic/test/waiting/1"])
    assert not first.done()
    await train(job, new_state(), 2, min_size=2, sizes=sizes)
    await first
    assert sizes == [2, 2]


async def test_newcomer_gets_the_state_and_all_continue(job, store):
    sizes = []
    pace, begun = asyncio.Event(), asyncio.Event()
    pace.set()
    states = [new_state() for _ in range(3)]
    founders = [
        asyncio.create_task(train(job, state, 60, min_size=2, sizes=sizes, pace=pace, begun=begun))
        for state in states[:2]
    ]
    await begun.wait()
    pace.clear()
    newcomer = asyncio.create_task(train(job, states[2], 60, sizes=sizes, pace=pace))
    await store.wait(["elastic/test/waiting/3"])
    pace.set()
    await asyncio.gather(*founders, newcomer)
    assert sizes == [2, 2, 3, 3, 3]
    assert all(state.step == 60 for state in states)
    assert all(torch.equal(state.weights, torch.full((4,), 60.0)) for state in states)


@pytest.mark.parametrize("fails", [False, True], ids=["unharmed", "after a loss"])
async def test_regroup_of_a_job_admits_who_waits(job, fails):
    """The iterator goes on from the group that `regroup` has returned."""
    here = asyncio.Barrier(2)
    newcomers = []

    async def founder(number):
        sizes, state = [], new_state()
        async with enter(job, min_size=2, state=state) as session:
            async for group in session.generations():
                await group.adopt(state)
                sizes.append(group.size())
                await here.wait()
                if number == 0:
                    newcomers.append(asyncio.create_task(newcomer()))
                async for change in group.watch_members():
                    if change.change == "waiting":
                        break
                if fails:
                    group.revoke("for the test")
                new = await group.regroup(min_size=3)
                assert new is session.group
                assert group.regroup().is_completed()
                await new.adopt(state)
                sizes.append(new.size())
                await new.barrier()
        return sizes

    async def newcomer():
        sizes, state = [], new_state()
        async with enter(job, state=state) as session:
            async for group in session.generations():
                await group.adopt(state)
                sizes.append(group.size())
                await group.barrier()
        return sizes

    assert await asyncio.gather(founder(0), founder(1)) == [[2, 3], [2, 3]]
    assert await newcomers[0] == [3]


async def test_process_that_was_passed_over_announces_again_that_it_waits(job, store):
    """The members may have named it while it was stopped, and wait for a sign of life since."""
    newcomer = asyncio.create_task(train(job, new_state(), 1, min_size=2))
    await store.wait(["elastic/test/waiting/1"])
    assert await store.get("elastic/test/waiting/1") == b"0"
    async with store.watch_keys() as changes:
        await store.set("elastic/test/generation", GenerationRecord(1, (9,)).encode())
        seen = []
        async for key, value in changes:
            seen += [value] * (key == "elastic/test/waiting/1")
            if len(seen) == 2:  # the first one is the value at the beginning
                break
        assert seen[-1] == b"1"
    newcomer.cancel()
    await asyncio.gather(newcomer, return_exceptions=True)


async def test_process_that_has_not_seen_the_last_generation_is_no_candidate(server):
    async with contextlib.AsyncExitStack() as stack:
        stores = [await AsyncStore.connect("127.0.0.1", server.port) for _ in range(2)]
        jobs = [Job(store, "test") for store in stores]
        for store, each in zip(stores, jobs, strict=True):
            stack.push_async_callback(store.close)
            stack.push_async_callback(each.close)
            await each.open()
        member, newcomer = jobs
        await newcomer.wait_to_join(0)
        await member.until(lambda: member.candidates() == [newcomer.id])
        assert await member.begin_generation(GenerationRecord(), 1, (member.id, newcomer.id), 0)
        assert member.candidates() == []
        await newcomer.wait_to_join(1)
        await member.until(lambda: member.candidates() == [newcomer.id])


async def test_process_that_has_become_a_member_waits_no_more_before_its_last_message_arrives(job, store):
    member = Job(store, "test")
    await member.open()
    try:
        for key in ("waiting/7", "member/7", "waiting/8"):
            await store.set(f"elastic/test/{key}", b"1")
        await member.until(lambda: 8 in member.waiting)
        assert member.candidates() == [8]
    finally:
        await member.close()


async def test_members_are_told_who_waits_to_join(job, store):
    """A stream of member changes has the processes that wait, also those that waited before it began."""
    pace, told = asyncio.Event(), []
    late = new_state()

    async def member(state, rank):
        async with enter(job, min_size=2, start_size=2, state=state) as session:
            async for group in session.generations():
                await group.adopt(state)
                watch = group.watch_members() if group.size() == 2 else None
                while not group.changed and group.size() == 2:
                    async with group.step():
                        await pace.wait()
                if watch is not None:
                    told.append((await anext(watch))[:2])
                    told.append((await anext(group.watch_members()))[:2])

    founders = [asyncio.create_task(member(new_state(), rank)) for rank in range(2)]
    await store.wait(["elastic/test/member/1", "elastic/test/member/2"])
    newcomer = asyncio.create_task(train(job, late, 0, min_size=2))
    await store.wait(["elastic/test/waiting/3"])
    pace.set()
    await asyncio.gather(*founders, newcomer)
    assert told == [(3, "waiting")] * 4


async def test_record_of_an_earlier_first_member_that_was_lost_is_replaced(job, monkeypatch, caplog):
    """The present one has not seen it yet when it writes its own."""
    begin, records = Job.begin_generation, []

    async def begin_late(self, after, number, members, begun):
        records.append(number)
        if number == 2:
            await self.store.set("generation", GenerationRecord(2, (*members, 99)).encode())
        return await begin(self, after, number, members, begun)

    monkeypatch.setattr(Job, "begin_generation", begin_late)
    failed = []

    async def member():
        async with enter(job, min_size=2) as session:
            async for group in session.generations():
                await group.barrier()
                if not failed:
                    failed.append(group)
                    group.revoke("test")
                with contextlib.suppress(GroupError):
                    await group.barrier()

    await asyncio.gather(member(), member())
    assert records == [1, 2, 3]
    assert "joins the job again" not in caplog.text


async def test_member_that_is_cancelled_between_two_worlds_leaves_neither_open(job, monkeypatch):
    first = []
    opened = []
    closed = []
    has_begun, is_leaving, close, open_world = asyncio.Event(), asyncio.Event(), World.close, session_module.open_world

    async def open_and_note(**options):
        world = await open_world(**options)
        opened.append(world)
        return world

    async def close_first_slowly(self):
        await close(self)
        closed.append(self)
        if self in first:
            is_leaving.set()
            await asyncio.Event().wait()

    async def founder():
        state = new_state()
        async with enter(job, state=state) as session:
            async for group in session.generations():
                await group.adopt(state)
                first.append(group.world)
                has_begun.set()
                async for _ in group.watch_members():
                    break
                async with group.step():
                    pass

    monkeypatch.setattr(World, "close", close_first_slowly)
    monkeypatch.setattr(session_module, "open_world", open_and_note)
    founding = asyncio.create_task(founder())
    await has_begun.wait()
    joining = asyncio.create_task(train(job, new_state(), 0))
    await is_leaving.wait()
    founding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await founding
    await joining
    assert set(map(id, opened)) == set(map(id, closed))
    assert len(opened) >= 3


@pytest.mark.parametrize("where", ["barrier", "announcement"])
async def test_member_whose_call_is_cancelled_while_it_enters_a_world_enters_it(job, where, monkeypatch):
    """The next call returns the group in which the others wait."""
    entering, may_enter, barrier, become_member = asyncio.Event(), asyncio.Event(), Group.barrier, Job.become_member

    async def slow_barrier(group):
        entering.set()
        await may_enter.wait()
        await barrier(group)

    def first_barrier_slowly(self, **options):
        is_slow = where == "barrier" and self is session.group and not may_enter.is_set()
        return slow_barrier(self) if is_slow else barrier(self, **options)

    async def become_member_slowly(self, record=b""):
        if where == "announcement" and self.id == session.id:
            entering.set()
            await may_enter.wait()
        await become_member(self, record)

    monkeypatch.setattr(Group, "barrier", first_barrier_slowly)
    monkeypatch.setattr(Job, "become_member", become_member_slowly)
    sizes = []
    async with enter(job, min_size=2) as session:
        other = asyncio.create_task(train(job, new_state(), 0, min_size=2, sizes=sizes))
        first = asyncio.create_task(session.next_group())
        await entering.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        may_enter.set()
        group = await session.next_group()
        assert group is session.group
        assert group is not None
        await group.adopt(new_state())
        await other
        assert await session.next_group() is None
    assert sizes == [2]


async def test_member_that_cannot_announce_that_it_has_entered_a_world_has_no_group(job, monkeypatch):
    become_member, errors = Job.become_member, [StoreConnectionError("the store has gone")]

    async def fail_once(self, record=b""):
        if errors:
            raise errors.pop()
        await become_member(self, record)

    monkeypatch.setattr(Job, "become_member", fail_once)
    async with join(job) as session:
        with pytest.raises(StoreConnectionError, match="the store has gone"):
            await session.next_group()
        assert session.group is None
        assert await session.next_group() is not None


async def test_session_of_a_blocking_program(job):
    def program():
        state = new_state()
        with enter(job, state=state) as session:
            for group in session.generations():
                group.adopt(state).wait()
                with group.step() as step:
                    group.all_reduce(torch.ones(1)).wait()
                assert step.committed
        return state.step

    assert await asyncio.to_thread(program) == 0


async def test_loop_of_the_other_kind_over_the_generations_is_refused(job):
    async with enter(job) as session:
        with pytest.raises(
            UsageError, match=r"entered with `async with`: write `async for group in .* instead of `for`"
        ):
            next(iter(session.generations()))
        group = await anext(session.generations())
        with pytest.raises(LoopThreadError, match=r"write `async with group\.step"), group.step():
            pass

    def program():
        with enter(job) as session, pytest.raises(UsageError, match="entered with `with`: write `for group"):
            asyncio.run(first(session))

    async def first(session):
        await anext(session.generations())

    await asyncio.to_thread(program)


@pytest.mark.parametrize(("where", "words"), [("tcp://127.0.0.1:1", "asyncdist://host:port/job"), ("x", "scheme")])
async def test_wrong_address_is_refused(where, words):
    with pytest.raises(UsageError, match=words):
        async with join(where):
            pass


async def test_session_that_is_not_open_says_so(job):
    session = join(job)
    with pytest.raises(UsageError, match="the session of the job is not open: use it inside"):
        await anext(session.generations())
    with pytest.raises(UsageError, match="is not open"):
        _ = session.id


def test_least_number_of_members_is_positive():
    with pytest.raises(UsageError, match="min_size"):
        JobSession("asyncdist://127.0.0.1:1/x", 0, None, None, None, None)
