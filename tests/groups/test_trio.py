"""Works and worlds in trio, and in anyio on trio and on asyncio: scopes, timeouts, nurseries, failures."""

import asyncio
import contextlib
import gc
import inspect
import threading
from functools import partial, wraps
from time import monotonic
from types import SimpleNamespace

import anyio
import pytest
import torch
import trio
import trio.testing

import asyncdist
from asyncdist import rpc
from asyncdist.errors import GroupAbortedError, MismatchError, NotInitializedError, OperationTimeoutError, UsageError
from asyncdist.kernel.engine.trio_tasks import run_on_background_loop
from asyncdist.kernel.engine.work import completed, joined
from asyncdist.store import AsyncStore, HashStore
from asyncdist.testing.cluster import world_of
from asyncdist.weights import Publisher, Subscriber
from tests.support.attempts import completes
from tests.support.devices import PretendStreams, device_group

LARGE = 300_000
LONG = 1.0
"""Seconds: a thousand time slices."""


def ones(count=4):
    return torch.ones(count)


async def value_of(work):
    return await work


@contextlib.asynccontextmanager
async def world(size=2, transport="inproc", **options):
    """Open a world with a task for each rank, and yield the groups by rank."""
    store = HashStore()
    groups = [None] * size
    leave = anyio.Event()

    async def rank_main(rank, *, task_status):
        opening = asyncdist.process_group(transport, rank=rank, world_size=size, store=store, **options)
        async with opening as groups[rank]:
            task_status.started()
            await leave.wait()

    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as starting:
            for rank in range(size):
                starting.start_soon(tasks.start, partial(rank_main, rank))
        try:
            yield groups
        finally:
            leave.set()


def in_anyio(*backends):
    """Run a coroutine test in anyio on each of some loops, by default on both."""

    def decorate(test):
        @pytest.mark.parametrize("backend", backends or ["trio", "asyncio"])
        @wraps(test)
        def run(backend, **fixtures):
            anyio.run(partial(test, **fixtures), backend=backend)

        names = ["backend", *inspect.signature(test).parameters]
        run.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )
        return run

    return decorate


@in_anyio()
async def test_await_returns_the_value_of_the_operation(transport):
    async with world(2, transport) as (zero, one):
        for count in (4, LARGE):
            works = zero.all_reduce(ones(count)), one.all_reduce(ones(count))
            assert [(await work).eq(2).all() for work in works] == [True, True]
            # A second await returns the same value.
            assert (await works[0]) is works[0].result()
        works = zero.send(ones(), 1), one.recv(ones(), 0)
        assert [await work for work in works] == [None, 0]
        assert len(await joined([zero.all_reduce(ones()), one.all_reduce(ones())])) == 2


@in_anyio()
async def test_several_tasks_wait_for_one_work():
    async with world() as (zero, one):
        work = zero.all_reduce(ones())
        values = []

        async def waiter():
            values.append(await work)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(waiter)
            await anyio.lowlevel.checkpoint()
            tasks.start_soon(value_of, one.all_reduce(ones()))
        assert [value is work.result() for value in values] == [True] * 5


@in_anyio()
async def test_cancelled_scope_stops_waiting_and_the_operation_continues(transport, caplog):
    async with world(2, transport) as (zero, one):
        for count in (4, LARGE):
            work = zero.all_reduce(ones(count))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(value_of, work)
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
            assert tasks.cancel_scope.cancelled_caught
            assert not work.is_completed()
            await one.all_reduce(ones(count))
            assert (await work).eq(2).all()
    assert not caplog.records


@in_anyio()
async def test_shielded_scope_waits_in_a_cancelled_one():
    async with world() as (zero, one):
        work = zero.all_reduce(ones())
        with anyio.CancelScope() as outer:
            outer.cancel()
            with anyio.CancelScope(shield=True):
                one.all_reduce(ones())
                assert (await work).eq(2).all()


@in_anyio()
async def test_failure_of_a_work_cancels_its_task_group():
    async with world(3) as (zero, one, two):
        works = two.recv(ones(), 0), zero.all_reduce(ones(3)), one.all_reduce(ones(5))

        async def all_of_them():
            async with anyio.create_task_group() as tasks:
                for work in works:
                    tasks.start_soon(value_of, work)

        with pytest.raises(ExceptionGroup) as caught:
            await all_of_them()
        assert caught.group_contains(MismatchError)


@in_anyio()
async def test_deadline_of_an_operation_and_an_abort_raise_their_errors():
    async with world() as (zero, one):
        with pytest.raises(OperationTimeoutError):
            await zero.all_reduce(ones(), timeout=0.01)
        with pytest.raises(GroupAbortedError):
            await one.all_reduce(ones())
    async with world() as (zero, _):
        work = zero.all_reduce(ones())
        async with anyio.create_task_group() as tasks:

            async def aborted():
                with pytest.raises(GroupAbortedError, match="the reason"):
                    await work

            tasks.start_soon(aborted)
            await anyio.wait_all_tasks_blocked()
            zero.abort("the reason")


@in_anyio()
async def test_error_for_which_a_cancelled_task_waited_is_not_logged(caplog):
    gc.collect()  # the errors of earlier tests
    caplog.clear()
    async with world() as (zero, _):
        work = zero.all_reduce(ones())
        with anyio.move_on_after(0.01):
            await work
        zero.abort()
        dropped = zero.all_reduce(ones())
        with pytest.raises(GroupAbortedError):
            await dropped
    del work, dropped
    gc.collect()
    assert not caplog.records


@in_anyio()
async def test_default_world_opens_and_closes():
    for _ in range(2):
        await asyncdist.init_process_group(store=HashStore(), rank=0, world_size=1)
        tensor = ones()
        assert await asyncdist.all_reduce(tensor) is tensor
        subgroup = asyncdist.new_group([0])
        await asyncdist.destroy_process_group(subgroup)
        await asyncdist.barrier()
        await asyncdist.destroy_process_group()
        with pytest.raises(NotInitializedError):
            asyncdist.all_reduce(tensor)


@in_anyio()
async def test_cancelled_opening_ends_before_the_scope_and_can_be_repeated(tmp_path):
    with anyio.move_on_after(0.05) as scope:
        await asyncdist.init_process_group("tcp", f"file://{tmp_path}/meeting", rank=0, world_size=2)
    assert scope.cancelled_caught
    assert not asyncdist.is_initialized()
    with pytest.raises(NotInitializedError, match=r"call .*init_process_group"):
        await asyncdist.all_reduce(ones())
    await asyncdist.init_process_group(store=HashStore(), rank=0, world_size=1)
    await asyncdist.destroy_process_group()


@in_anyio()
async def test_world_closes_in_a_cancelled_scope(transport):
    async with anyio.create_task_group() as tasks, world(2, transport) as (zero, one):
        zero.all_reduce(ones())
        await one.all_reduce(ones())
        tasks.cancel_scope.cancel()


@in_anyio("trio")
async def test_each_await_is_a_checkpoint_of_trio():
    with trio.testing.assert_checkpoints():
        await completed(5)
    async with world() as (zero, one):
        work = zero.all_reduce(ones())
        for each in (one.all_reduce(ones()), work, work):
            with trio.testing.assert_checkpoints():
                await each
        with trio.CancelScope() as scope:
            scope.cancel()
            await work
        assert scope.cancelled_caught
        assert work.result().eq(2).all()


def test_long_operation_leaves_the_thread_of_trio_after_a_time_slice():
    def moves_for(seconds):
        end = monotonic() + seconds
        while monotonic() < end:
            yield ()

    async def main():
        async with world() as groups:
            for group in groups:
                progress, channel = group.endpoint.progress, SimpleNamespace(error=None, started=0, highest=0)
                assert not completes(progress, moves_for(LONG), channel, wait=False)

    trio.run(main)


def test_work_of_a_device_is_awaited(together):
    def rank(group):
        streams = PretendStreams()
        on = device_group(group, (), streams)
        try:
            assert trio.run(value_of, on.all_reduce(ones())).eq(2).all()
        finally:
            streams.release()
            on.close()

    together(2, rank)


def test_trio_awaits_works_of_a_world_whose_loop_runs_in_another_thread_or_is_stopped(transport):
    """A loop that is stopped between two calls of ``run_until_complete`` drives nothing; a thread then drives."""

    async def pair(groups, start):
        works = [group.all_reduce(ones(LARGE)) for group in groups] if start else []
        async with trio.open_nursery() as nursery:
            for work in works or [group.barrier() for group in groups]:
                nursery.start_soon(value_of, work)

    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        async def opened():
            groups = await stack.enter_async_context(world_of(2, transport=transport))
            await asyncio.to_thread(trio.run, pair, groups, True)
            return groups

        groups = runner.run(opened())
        trio.run(pair, groups, True)
        trio.run(pair, groups, False)
        runner.run(stack.aclose())


def test_work_that_completes_after_the_end_of_trio_disturbs_nothing(together):
    called = threading.Event()

    def program(group):
        if group.rank() == 1:
            called.wait()
            group.all_reduce(ones()).wait()
            return None
        work = group.all_reduce(ones())

        async def give_up():
            with trio.move_on_after(0.01):
                await work

        trio.run(give_up)
        called.set()
        work.wait()
        return trio.run(value_of, work)

    assert together(2, program)[0].eq(2).all()


@in_anyio("trio")
async def test_result_of_a_coroutine_that_ignores_its_cancellation_is_returned():
    made = []
    with trio.CancelScope() as scope:
        token = trio.lowlevel.current_trio_token()

        async def stubborn():
            token.run_sync_soon(scope.cancel)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "made"

        made.append(await run_on_background_loop(stubborn()))
        await trio.lowlevel.checkpoint()
    assert made == ["made"]
    assert scope.cancelled_caught


@in_anyio("trio")
async def test_what_needs_asyncio_says_so():
    job, tensors = "asyncdist://127.0.0.1:1/job", {"a": ones()}
    for enter in (
        lambda: rpc.serve({}, job).__aenter__(),
        lambda: rpc.connect(job).__aenter__(),
        lambda: rpc.find("name"),
        lambda: asyncdist.join(job).__aenter__(),
        lambda: Publisher(tensors, job=job).__aenter__(),
        lambda: Subscriber(tensors, job=job).__aenter__(),
        lambda: AsyncStore.connect("127.0.0.1", 1),
    ):
        with pytest.raises(UsageError, match=r"needs a running event loop of asyncio.*trio.to_thread.run_sync"):
            await enter()


def test_works_and_worlds_say_that_no_loop_runs(together):
    async def opening():
        await asyncdist.init_process_group(store=HashStore(), rank=0, world_size=1)

    awaited = threading.Event()

    def program(group):
        if group.rank() == 0:
            work = group.all_reduce(ones())
            with pytest.raises(RuntimeError, match="no running event loop"):
                value_of(work).send(None)
            with pytest.raises(RuntimeError, match="no running event loop"):
                opening().send(None)
            awaited.set()
            group.barrier(background=False)
            return work.wait()
        # A work that is complete already needs no loop.
        awaited.wait()
        group.all_reduce(ones())
        return group.barrier(background=False).wait()

    assert together(2, program) == [True, True]
    assert not asyncdist.is_initialized()
