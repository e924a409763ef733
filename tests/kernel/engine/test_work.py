"""The handle of an operation: any loop, thread and number of waiters; a waiter that gives up does not cancel it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch

from asyncdist.errors import GroupAbortedError, GroupError, LoopThreadError, MismatchError, UsageError, WaitTimeoutError
from asyncdist.kernel.engine import work as work_module
from asyncdist.kernel.engine.work import Work, completed, joined
from asyncdist.testing.cluster import world_of

pytestmark = pytest.mark.each_loop

LARGE = 300_000


def ones(count=4):
    return torch.ones(count)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(12) as executor:
        yield executor


async def in_another_loop(executor, new_loop, make_coroutine):
    """Run a coroutine to its end on a new loop of another thread."""

    def main():
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(make_coroutine())

    return await asyncio.get_running_loop().run_in_executor(executor, main)


# -- one at a time -----------------------------------------------------------------------------------


async def test_await_returns_the_value_of_the_operation(transport):
    """The value of an operation is its output; that of a receive is the sender, that of a barrier None."""
    async with world_of(2, transport=transport) as (zero, one):
        tensors = ones(), ones()
        works = zero.all_reduce(tensors[0]), one.all_reduce(tensors[1])
        assert [(await work) is tensor for work, tensor in zip(works, tensors, strict=True)] == [True, True]
        works = zero.barrier(), one.barrier()
        assert [await work for work in works] == [None, None]
        lists = [[ones(), ones()] for _ in range(2)]
        works = zero.all_gather(lists[0], ones()), one.all_gather(lists[1], ones())
        assert [await work for work in works] == lists
        assert (await works[0]) is lists[0]
        works = zero.send(ones(), 1), one.recv(ones(), 0)
        assert [await work for work in works] == [None, 0]
        for work in works:
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
            with pytest.raises(LoopThreadError):
                work.wait()


async def test_pending_work_has_no_result(transport):
    async with world_of(2, transport=transport) as (zero, one):
        work = zero.all_reduce(ones())
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        with pytest.raises(UsageError, match="is pending: await it"):
            work.result()
        await one.all_reduce(ones())
        await work
        assert repr(work).startswith("<Work that is completed: ")
        assert work.result().eq(2).all()


async def test_work_can_be_awaited_repeatedly_and_by_many_tasks(transport):
    async with world_of(2, transport=transport) as (zero, one):
        work = zero.all_reduce(ones())

        async def waiter():
            return await work

        waiters = [asyncio.ensure_future(waiter()) for _ in range(5)]
        await asyncio.sleep(0)
        await one.all_reduce(ones())
        results = await asyncio.gather(*waiters, work, waiter())
        assert all(result is results[0] for result in results)


def test_completed_work_has_its_value():
    work = completed(5)
    assert work.is_success()
    assert work.wait(0)
    assert work.result() == 5
    assert work.get_future().done()
    assert work.get_future().value() == 5
    assert asyncio.run(_await(work)) == 5


async def _await(work):
    return await work


# -- asyncio around it -------------------------------------------------------------------------------


async def test_cancelled_or_timed_out_waiter_does_not_cancel_the_operation(transport):
    """A waiter is a coroutine that awaits the work, or a task of the work itself."""
    async with world_of(2, transport=transport) as (zero, one):
        for count in (4, LARGE):
            works = first, second, third, fourth = [zero.all_reduce(ones(count)) for _ in range(4)]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(first, 0.01)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await second
            other = asyncio.create_task(fourth)
            for task in (asyncio.ensure_future(_await(third)), asyncio.create_task(fourth)):
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert not any(work.is_completed() for work in works)
            for _ in works:
                await one.all_reduce(ones(count))
            for work in works:
                assert (await work).eq(2).all()
            assert (await other) is fourth.result()
            results = await asyncio.gather(zero.all_reduce(ones()), one.all_reduce(ones()))
            assert all(result.eq(2).all() for result in results)


async def test_asyncio_functions_accept_works(transport):
    async with world_of(3, transport=transport) as groups:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(_await(group.all_reduce(ones()))) for group in groups]
        assert all(task.result().eq(3).all() for task in started)
        results = await asyncio.gather(*(group.all_reduce(ones()) for group in groups))
        assert all(result.eq(3).all() for result in results)
        for finished in asyncio.as_completed([_await(group.all_reduce(ones())) for group in groups]):
            assert (await finished).eq(3).all()
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(group.all_reduce(ones())) for group in groups]
        assert all(task.result().eq(3).all() for task in started)
        named = [asyncio.create_task(group.all_reduce(ones()), name=f"sum {group.rank()}") for group in groups]
        assert [task.get_name() for task in named] == ["sum 0", "sum 1", "sum 2"]
        assert all(result.eq(3).all() for result in await asyncio.gather(*named))
        for count in (4, LARGE):
            works = {group.all_reduce(ones(count)) for group in groups}
            assert await asyncio.wait(works) == (works, set())
            assert all(work.result().eq(3).all() for work in works)
            assert await asyncio.wait(works) == (works, set())
        failed = [group.all_reduce(ones(3 + group.rank())) for group in groups]
        with pytest.raises(MismatchError):
            await asyncio.gather(*failed)
        for work in failed:
            assert isinstance(work.exception(), MismatchError)


async def test_asyncio_wait_divides_works_into_done_and_pending(transport):
    async with world_of(2, transport=transport) as (zero, one):
        pending, done = zero.recv(ones(), 1, tag=1), zero.recv(ones(), 1, tag=2)
        assert await asyncio.wait({pending, done}, timeout=0.01) == (set(), {pending, done})
        await one.send(ones(), 0, tag=2)
        waited = await asyncio.wait([pending, done], return_when=asyncio.FIRST_COMPLETED)
        assert waited == ({done}, {pending})
        assert (done.done(), pending.done(), pending.cancelled()) == (True, False, False)
        await one.send(ones(), 0, tag=1)
        assert await asyncio.wait([pending]) == ({pending}, set())
        failed, other = zero.all_reduce(ones(3)), one.all_reduce(ones(4))
        waited = await asyncio.wait([failed, zero.recv(ones(), 1)], return_when=asyncio.FIRST_EXCEPTION)
        assert failed in waited[0]
        for work in (failed, other):
            with pytest.raises(MismatchError):
                await work


async def test_asyncio_wait_in_another_loop_and_of_a_work_that_a_thread_completes(transport, threads, new_loop):
    async with world_of(2, transport=transport) as (zero, one):
        work = zero.all_reduce(ones())

        async def wait_for_it():
            return await asyncio.wait({work})

        waiting = asyncio.ensure_future(in_another_loop(threads, new_loop, wait_for_it))
        here = asyncio.create_task(asyncio.wait({work}))
        await asyncio.get_running_loop().run_in_executor(threads, lambda: one.all_reduce(ones()).wait())
        assert await waiting == await here == ({work}, set())


async def test_task_group_raises_the_failure_of_a_work(transport):
    async with world_of(2, transport=transport) as (zero, one):

        async def both():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(zero.all_reduce(ones(3)))
                tasks.create_task(one.all_reduce(ones(4)))

        with pytest.raises(ExceptionGroup) as caught:
            await both()
        assert caught.group_contains(MismatchError)


async def test_work_that_a_task_group_refuses_continues(transport):
    """From Python 3.13, the group closes what it refuses."""
    async with world_of(2, transport=transport) as (zero, one):
        async with asyncio.TaskGroup() as finished:
            pass
        work = zero.all_reduce(ones())
        for tasks in (asyncio.TaskGroup(), finished):
            with pytest.raises(RuntimeError, match="TaskGroup"):
                tasks.create_task(work)
        work.close()
        assert not work.is_completed()
        await one.all_reduce(ones())
        assert (await work).eq(2).all()


async def test_loop_has_its_own_task_factory_while_no_world_is_open(transport):
    loop = asyncio.get_running_loop()
    made = []

    def factory(loop, coroutine, **options):
        made.append(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    for own in (None, factory):
        loop.set_task_factory(own)
        async with world_of(2, transport=transport) as (zero, one):
            assert loop.get_task_factory() is not own
            made.clear()
            await asyncio.gather(asyncio.create_task(zero.barrier()), one.barrier())
            assert bool(made) == (own is factory)
            work = completed(1)
        assert loop.get_task_factory() is own
    loop.set_task_factory(None)
    with pytest.raises(TypeError, match="got <Work that is completed: await it as it is, it needs no task>"):
        await asyncio.create_task(work)


# -- other loops, and threads ------------------------------------------------------------------------


async def test_work_can_be_awaited_in_another_loop(transport, threads, new_loop):
    async with world_of(2, transport=transport) as (zero, one):
        for count in (4, LARGE):
            works = zero.all_reduce(ones(count)), one.all_reduce(ones(count))

            async def both(works=works):
                return await asyncio.gather(*works)

            results = await in_another_loop(threads, new_loop, both)
            assert all(result.eq(2).all() for result in results)

            async def start_both(count=count):
                return await asyncio.gather(zero.all_reduce(ones(count)), one.all_reduce(ones(count)))

            results = await in_another_loop(threads, new_loop, start_both)
            assert all(result.eq(2).all() for result in results)

            pending = zero.all_reduce(ones(count))

            async def time_out(pending=pending):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(_await(pending), 0.01)

            await in_another_loop(threads, new_loop, time_out)
            await one.all_reduce(ones(count))
            assert (await pending).eq(2).all()


async def test_threads_can_wait_while_the_loop_continues(transport, threads):
    async with world_of(2, transport=transport) as (zero, one):
        loop = asyncio.get_running_loop()
        for count in (4, LARGE):
            works = [group.all_reduce(ones(count)) for _ in range(4) for group in (zero, one)]
            waits = [loop.run_in_executor(threads, work.wait, 30) for work in works]
            later = [group.all_reduce(ones(count)) for group in (zero, one)]
            await asyncio.gather(*later)
            assert all(await asyncio.gather(*waits))
            assert all(work.result().eq(2).all() for work in works + later)


async def test_operations_can_be_started_in_threads(transport, threads):
    async with world_of(2, transport=transport) as groups:
        loop = asyncio.get_running_loop()

        def rank(group, turn):
            work = group.all_reduce(ones(LARGE if turn % 2 else 4), background=turn < 3)
            assert work.is_completed() or turn < 3
            assert work.wait()
            return work.result()

        for turn in range(6):
            results = await asyncio.gather(*(loop.run_in_executor(threads, rank, group, turn) for group in groups))
            assert all(result.eq(2).all() for result in results)


async def test_timed_out_wait_in_a_thread_leaves_the_operation_pending(transport, threads):
    async with world_of(2, transport=transport) as (zero, one):
        loop = asyncio.get_running_loop()
        work = zero.all_reduce(ones())
        for limit in (0, 0.01, timedelta(milliseconds=10)):
            with pytest.raises(WaitTimeoutError, match="and the operation continues: wait again") as late:
                await loop.run_in_executor(threads, work.wait, limit)
            assert isinstance(late.value, TimeoutError)
        assert not work.is_completed()
        with pytest.raises(ValueError, match="a timeout is a number of seconds"):
            await loop.run_in_executor(threads, work.wait, -1)
        await one.all_reduce(ones())
        assert await loop.run_in_executor(threads, work.wait, 10)


async def test_wait_on_the_thread_of_the_loop_is_refused(transport):
    async with world_of(2, transport=transport) as (zero, one):
        work = zero.all_reduce(ones())
        with pytest.raises(LoopThreadError, match=r"use `await work`, or asyncio.to_thread\(\)"):
            work.wait()
        with pytest.raises(LoopThreadError, match="all_reduce on the event loop"):
            one.all_reduce(ones(), background=False)
        await one.all_reduce(ones())  # matches the first call, because the refused call has issued nothing
        await work
        with pytest.raises(LoopThreadError):
            work.wait()


async def test_wait_on_the_thread_of_the_loop_is_refused_although_the_operation_is_complete(threads):
    """A program must not depend on how fast its peers are, or on their number."""
    async with world_of(1) as (group,):
        done = [group.all_reduce(ones()), group.barrier(), joined([group.barrier(), group.barrier()]), joined([])]
        assert all(work.is_completed() for work in done)
        for work in done[:3]:
            for wait in (work.wait, work.synchronize):
                with pytest.raises(LoopThreadError, match="use `await work`"):
                    wait()
            await asyncio.get_running_loop().run_in_executor(threads, work.wait)


async def test_callback_may_wait_for_its_own_operation_on_the_thread_of_the_loop(transport):
    outcomes = []
    async with world_of(2, transport=transport) as (zero, one):
        work = zero.all_reduce(ones())
        work.add_done_callback(lambda done: outcomes.append(done.wait()))
        await asyncio.gather(work, one.all_reduce(ones()))
        work.add_done_callback(lambda done: outcomes.append(done.wait()))
    assert outcomes == [True, True]


def test_blocking_program_may_wait_on_the_thread_of_another_loop(together, transport):
    """The background loop drives the world of a blocking program, so other loops may be blocked."""

    def rank(group):
        async def main():
            work = group.all_reduce(ones())
            assert work.wait()
            return (await group.all_reduce(ones())).tolist() + work.result().tolist()

        return asyncio.run(main())

    assert together(2, rank, transport=transport) == [[2.0] * 8] * 2


def test_synchronize_waits_for_the_result(together, transport):
    def rank(group):
        tensors = [ones(), ones()]
        started = [group.all_reduce(tensor) for tensor in tensors]
        for work in (started[0], joined(started)):
            assert work.synchronize(timedelta(seconds=20)) is None
        assert all(tensor.eq(2).all() for tensor in tensors)
        if group.rank() == 0:
            late = joined([group.recv(ones(), 1), completed()])
            with pytest.raises(WaitTimeoutError):
                late.synchronize(0.01)
        group.barrier(background=False)
        if group.rank() == 1:
            group.send(ones(), 0, background=False)
        else:
            late.synchronize()
            assert late.result() == [1, None]

    together(2, rank, transport=transport)


def test_many_threads_wait_for_one_work(together, transport):
    def rank(group):
        for turn in range(10):
            if group.rank() == 0:
                work = group.all_reduce(ones(3))
                with ThreadPoolExecutor(6) as threads:
                    waits = [threads.submit(work.wait, 20) for _ in range(6)]
                    assert all(wait.result() for wait in waits)
            else:
                group.all_reduce(ones(3), background=turn % 2 == 0).wait()
        return True

    assert all(together(3, rank, transport=transport))


def test_threads_of_a_rank_use_groups_at_the_same_time(together, transport):
    def rank(group):
        groups = [group.world.new_group(None) for _ in range(4)]

        def thread(number):
            total = 0.0
            for turn in range(30):
                tensor = torch.full((1 + turn * 500,), float(number + 1))
                if turn % 3 == 0:
                    groups[number].all_reduce(tensor, background=False)
                else:
                    groups[number].all_reduce(tensor).wait()
                total += float(tensor[-1])
            return total

        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(thread, range(4)))

    for totals in together(3, rank, transport=transport):
        assert totals == [30 * 3.0 * (number + 1) for number in range(4)]


# -- callbacks and futures ---------------------------------------------------------------------------


async def test_callbacks_run_in_order_and_errors_are_logged(transport, caplog):
    async with world_of(2, transport=transport) as (zero, one):
        seen = []
        work = zero.all_reduce(ones())
        work.add_done_callback(lambda done: seen.append(("first", done is work, done.is_completed())))
        work.add_done_callback(lambda done: 1 / 0)
        work.add_done_callback(lambda done: seen.append("third"))
        await one.all_reduce(ones())
        await work
        work.add_done_callback(lambda done: seen.append("late"))
        assert seen == [("first", True, True), "third", "late"]
        assert "a callback of an operation that is completed raised" in caplog.text
        assert "ZeroDivisionError" in caplog.text
        caplog.clear()  # the frames of its traceback hold the world, and its mapped memory


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_interrupt_leaves_after_the_other_callbacks_have_run(raised):
    work, called = Work(), []

    def interrupted(done):
        done.add_done_callback(lambda _: called.append("added"))
        raise raised

    for callback in (interrupted, lambda _: called.append("second"), interrupted, lambda _: called.append("last")):
        work.add_done_callback(callback)
    work.finish(1)
    with pytest.raises(raised):
        work.run_callbacks()
    assert sorted(called) == ["added", "added", "last", "second"]
    assert not work.has_callbacks


async def test_callback_may_start_the_next_operation(transport):
    """Callbacks run without the lock of the machine."""
    async with world_of(2, transport=transport) as groups:
        finished = [asyncio.Event() for _ in groups]

        def start_next(group, left, work):
            if left:
                group.all_reduce(work.result()).add_done_callback(partial(start_next, group, left - 1))
            else:
                loop.call_soon_threadsafe(finished[group.rank()].set)

        loop = asyncio.get_running_loop()
        tensors = [ones() for _ in groups]
        for group, tensor in zip(groups, tensors, strict=True):
            group.all_reduce(tensor).add_done_callback(partial(start_next, group, 5))
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in finished))
        assert all(tensor.eq(64).all() for tensor in tensors)


def test_callbacks_added_while_the_work_completes_are_called_once():
    for _ in range(300):
        work, called, start = Work(), [], threading.Barrier(4)

        def add(number, work=work, called=called, start=start):
            start.wait()
            work.add_done_callback(lambda _: called.append(number))

        adders = [threading.Thread(target=add, args=(number,)) for number in range(3)]
        for adder in adders:
            adder.start()
        start.wait()
        work.finish(1)
        work.run_callbacks()
        for adder in adders:
            adder.join()
        assert sorted(called) == [0, 1, 2]


async def test_torch_future_completes_with_the_work(transport, threads):
    async with world_of(2, transport=transport) as (zero, one):
        loop = asyncio.get_running_loop()
        work = zero.all_reduce(ones())
        future = work.get_future()
        assert isinstance(future, torch.futures.Future)
        assert work.get_future() is future
        assert not future.done()
        doubled = future.then(lambda done: done.value() * 2)
        await one.all_reduce(ones())
        assert (await loop.run_in_executor(threads, future.wait)).eq(2).all()
        assert (await loop.run_in_executor(threads, doubled.wait)).eq(4).all()
        both = torch.futures.collect_all([work.get_future(), one.barrier().get_future()])
        await zero.barrier()
        assert len(await loop.run_in_executor(threads, both.wait)) == 2
        # A callback of a future may block on another operation.
        chained = zero.all_reduce(ones()).get_future().then(lambda _: zero.all_reduce(ones()).wait())
        await one.all_reduce(ones())
        await one.all_reduce(ones())
        assert await loop.run_in_executor(threads, chained.wait)


def test_get_future_returns_one_future_to_all_threads():
    work = Work()
    with ThreadPoolExecutor(8) as threads:
        futures = list(threads.map(lambda _: work.get_future(), range(8)))
        assert all(future is futures[0] for future in futures)
        work.finish("x")
        work.run_callbacks()
        assert futures[0].wait() == "x"


# -- failures ----------------------------------------------------------------------------------------


async def test_every_way_of_waiting_raises_the_failure(transport, threads):
    async with world_of(2, transport=transport) as (zero, one):
        work, other = zero.all_reduce(ones(3)), one.all_reduce(ones(4))
        futures = work.get_future(), other.get_future()
        for _ in range(2):
            with pytest.raises(MismatchError):
                await work
            with pytest.raises(MismatchError):
                work.result()
            with pytest.raises(MismatchError):
                await asyncio.get_running_loop().run_in_executor(threads, work.wait)
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), MismatchError)
        assert "that failed (all_reduce #1" in repr(work)
        for wait in (other.wait, *(future.wait for future in futures)):
            with pytest.raises(MismatchError):
                await asyncio.get_running_loop().run_in_executor(threads, wait)
        # The garbage collector does not see the error in a future, and the frames of its traceback hold the world.
        for each in (work, other):
            each.exception().with_traceback(None)


async def test_pending_operations_fail_when_the_group_is_destroyed(transport):
    async with world_of(2, transport=transport) as groups:
        group = groups[0].world.new_group(None)
        works = [group.all_reduce(ones()), group.recv(ones(), 1)]
        task = asyncio.ensure_future(_await(works[0]))
        await asyncio.sleep(0)
        group.close()
        for pending in (task, works[1]):
            with pytest.raises(GroupAbortedError, match="was destroyed while this operation was pending"):
                await pending
        await asyncio.gather(*(one.barrier() for one in groups))


async def test_joined_work_reports_the_failures_of_all_its_works(transport, caplog):
    # Works of other tests log their errors now.
    gc.collect()
    caplog.clear()
    async with world_of(2, transport=transport) as (zero, _):
        whole = joined([zero.all_reduce(ones()) for _ in range(3)])
        zero.abort()
        with pytest.raises(GroupAbortedError):
            await whole
        del whole
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_failure_is_logged_once_for_each_group_and_rank(transport, caplog):
    # Works of other tests log their errors now.
    gc.collect()
    async with world_of(3, transport=transport) as groups:
        pairs = [group.new_group([0, 1], group_desc="pair") for group in groups[:2]]
        caplog.clear()
        pending = [group.all_reduce(ones()) for group in (groups[0], groups[1], pairs[0]) for _ in range(4)]
        pending += [groups[0].recv(ones(), 2, tag) for tag in range(4)]
        groups[2].abort("enough")
        pairs[1].abort("enough")
        await asyncio.wait(pending)
        assert len({str(work.exception()) for work in pending[:4]}) == 4, "each operation has its own error"
        unseen = [group.all_reduce(ones()) for group in (groups[0], groups[1], pairs[0]) for _ in range(4)]
        await asyncio.wait(unseen)
        del pending, unseen
        gc.collect()
    logged = [
        re.search(r"on group '(\w+)[^']*', rank (\d)", message).groups()
        for message in caplog.messages
        if "never retr" in message
    ]
    assert sorted(logged) == [("pair", "0"), ("world", "0"), ("world", "1")]


async def test_awaiting_completed_works_lets_other_tasks_run():
    ran = asyncio.Event()
    asyncio.get_running_loop().call_soon(ran.set)
    until = asyncio.get_running_loop().time() + 5
    while not ran.is_set() and asyncio.get_running_loop().time() < until:
        await completed("over")
    assert ran.is_set()


@pytest.fixture
def slow_task(monkeypatch):
    """A second passes between any two awaits, without a break for the other tasks of the loop."""
    seconds = itertools.count()
    monkeypatch.setattr(work_module, "monotonic", lambda: next(seconds))


async def test_completed_work_serves_asyncio_as_a_completed_future_does(transport, slow_task):
    """Also with a limit of 0, as programs poll futures, and however long the task has run without a break."""
    async with world_of(2, transport=transport) as groups:
        works = [group.all_reduce(ones()) for group in groups]
        pending = groups[0].recv(torch.zeros(1), 1)
        await asyncio.gather(*works)
        for work in works:
            for _ in range(20):
                assert await asyncio.wait_for(work, 0) is work.result()
                async with asyncio.timeout(0):
                    assert await work is work.result()
        assert await asyncio.gather(*works, works[0], asyncio.sleep(0, 7)) == [
            *map(Work.result, works),
            works[0].result(),
            7,
        ]
        assert len([await each for each in asyncio.as_completed(works)]) == len(works)
        assert await asyncio.shield(works[0]) is works[0].result()
        assert asyncio.isfuture(works[0])
        assert not asyncio.isfuture(pending)
        assert not await asyncio.to_thread(asyncio.isfuture, works[0]), "outside a loop it is no future"
        together = asyncio.gather(works[0], pending)
        await asyncio.sleep(0)
        together.cancel()
        with pytest.raises(asyncio.CancelledError):
            await together
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pending, 0)
        await groups[1].send(torch.ones(1), 0)
        await pending


async def test_first_await_of_a_completed_work_returns_at_once_after_a_turn_of_the_loop(
    transport, slow_task, eventually
):
    async with world_of(2, transport=transport) as groups:
        for _ in range(3):
            works = [group.all_reduce(ones()) for group in groups]
            await eventually(lambda works=works: all(work.is_completed() for work in works))
            async with asyncio.timeout(0):
                await works[0]
            await asyncio.sleep(0)


async def test_future_of_a_completed_or_failed_work_is_complete(transport):
    async with world_of(2, transport=transport) as groups:
        for _ in range(20):
            works = [group.all_reduce(ones()) for group in groups]
            await asyncio.gather(*works)
            for work in works:
                future = work.get_future()
                assert future.done()
                assert future.value() is work.result()
    failed: Work = Work()
    failed.finish(error=GroupError("for the test"))
    future = failed.get_future()
    assert future.done()
    with pytest.raises(GroupError, match="for the test"):
        future.value()
