"""Requests of the awaited client: futures and coroutines in one, and one timer for all their time limits."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncdist.errors import StoreConnectionError, StoreTimeoutError, UsageError

UNIT, LONG = 0.05, 10.0
"""Seconds: a limit that is to pass, and one that must not."""


async def test_requests_begin_at_once_and_need_no_task(store, server, eventually):
    tasks = asyncio.all_tasks()
    waiting = [store.get(f"k{number}") for number in range(100)]
    await eventually(lambda: server.state.num_open == 100)
    assert asyncio.all_tasks() == tasks
    await store.multi_set([f"k{number}" for number in range(100)], ["v"] * 100)
    assert await asyncio.gather(*waiting) == [b"v"] * 100


async def test_a_request_can_be_made_a_task_of(store):
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(store.get("k"))
        failing = asyncio.create_task(store.get("never", timeout=UNIT))
        group.create_task(store.set("k", b"v"))
    assert waiting.result() == b"v"
    with pytest.raises(StoreTimeoutError):
        await failing


async def test_a_task_of_one_is_cancelled_at_any_moment(store, server, eventually):
    for pauses in range(4):
        task = asyncio.create_task(store.get("never"))
        for _ in range(pauses):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await eventually(lambda: server.state.num_open == 0)
    assert store._line._conversation.num_open == 0


async def test_closing_one_as_a_coroutine_gives_it_up(store, server, eventually):
    waiting = store.get("never")
    await eventually(lambda: server.state.num_open == 1)
    waiting.close()
    await eventually(lambda: server.state.num_open == 0)


async def test_a_coroutine_made_in_another_thread_runs_on_the_loop(store):
    """As `asyncio.run_coroutine_threadsafe` is used: the call is made where the loop is not."""
    loop, found = asyncio.get_running_loop(), []

    def ask() -> None:
        asyncio.run_coroutine_threadsafe(store.set("k", b"v"), loop).result(LONG)
        found.append(asyncio.run_coroutine_threadsafe(store.get("k"), loop).result(LONG))

    thread = threading.Thread(target=ask)
    thread.start()
    await asyncio.to_thread(thread.join, LONG)
    assert found == [b"v"]


async def test_limits_of_every_length_pass_in_their_order(store, server):
    over = []

    async def wait(limit: float) -> None:
        with pytest.raises(StoreTimeoutError, match=f"after {limit:g} s"):
            await store.get("never", timeout=limit)
        over.append(limit)

    limits = [4 * UNIT, UNIT, 3 * UNIT, 2 * UNIT]
    waiting = store.get("later", timeout=LONG)
    await asyncio.gather(*map(wait, limits))
    assert over == sorted(limits)
    await store.check([])
    assert server.state.num_open == 1
    await store.set("later", b"v")
    assert await waiting == b"v"


async def test_no_timer_is_left_of_requests_that_are_over(store):
    with pytest.raises(StoreTimeoutError):
        await store.get("never", timeout=UNIT)
    assert store._line._limits._timer is None
    await store.set("k", b"v", ephemeral=True)
    assert store._line._limits._timer is not None  # it is looked at when it goes off, and not before
    await store.close()
    assert store._line._limits._timer is None


async def test_what_is_asked_of_a_closed_store_fails_when_it_is_awaited(store):
    await store.close()
    failing = asyncio.create_task(store.get("k"))
    with pytest.raises(StoreConnectionError, match="closed"):
        await failing


async def test_wrong_arguments_are_refused_at_the_call(store):
    with pytest.raises(UsageError):
        store.set("k", 1)
    with pytest.raises(UsageError, match="ASYNCDIST_STORE_MAX_VALUE_NBYTES"):
        store.set("k", bytes(2 << 20))
