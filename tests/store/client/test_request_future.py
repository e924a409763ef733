"""Requests of the awaited client: futures, each way to wait for one, and one timer for all deadlines."""

import asyncio
import threading

import pytest

from asyncdist.errors import StoreTimeoutError, UsageError
from asyncdist.store import AsyncPrefixStore, AsyncStore, StoreServer
from tests.support.stores import LONG

pytestmark = pytest.mark.each_loop

UNIT = 0.05
"""Seconds: a timeout that expires."""


async def test_requests_begin_at_once_and_need_no_task(store, server, eventually):
    tasks = asyncio.all_tasks()
    waiting = [store.get(f"k{number}") for number in range(100)]
    await eventually(lambda: server.state.num_open == 100)
    assert asyncio.all_tasks() == tasks
    await store.multi_set([f"k{number}" for number in range(100)], ["v"] * 100)
    assert await asyncio.gather(*waiting) == [b"v"] * 100


async def in_a_wait(future):
    done, _ = await asyncio.wait([future], timeout=LONG)
    return done.pop().result()


async def first_of(future):
    return await next(asyncio.as_completed([future], timeout=LONG))


async def gathered(future):
    return (await asyncio.gather(future))[0]


async def as_it_is(future):
    return await future


FORMS = {
    "await": as_it_is,
    "gather": gathered,
    "wait_for": lambda future: asyncio.wait_for(future, LONG),
    "ensure_future": lambda future: as_it_is(asyncio.ensure_future(future)),
    "wait": in_a_wait,
    "wait, of a future": lambda future: in_a_wait(asyncio.ensure_future(future)),
    "as_completed": first_of,
    "shield": asyncio.shield,
}
"""The ways to wait for a future with asyncio; each returns its result."""


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_waiting_returns_the_result(store, form):
    waiting = asyncio.ensure_future(FORMS[form](store.get("k")))
    await store.set("k", b"v")
    assert await waiting == b"v"
    with pytest.raises(StoreTimeoutError):
        await FORMS[form](store.get("never", timeout=UNIT))


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("as_completed", "shield")])
async def test_cancelling_any_form_of_waiting_withdraws_the_request(store, server, form, eventually):
    future = store.get("never")
    waiting = asyncio.ensure_future(FORMS[form](future))
    await eventually(lambda: server.state.num_open == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if form in ("wait", "wait, of a future"):  # asyncio.wait does not cancel the future
        assert not future.done()
        future.cancel()
    await eventually(lambda: server.state.num_open == 0)
    assert not store.connection.protocol.open_requests()


async def test_error_of_create_task_says_that_no_task_is_needed(store):
    future = store.get("k")
    said = r"a coroutine was expected, got <a future, get of 'k', that is pending: await it as it is, it needs no task>"
    with pytest.raises(TypeError, match=said):
        asyncio.get_running_loop().create_task(future)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(future)
    assert caught.group_contains(TypeError, match=said)
    await store.set("k", b"v")
    assert await future == b"v"
    assert "done" in repr(future)
    future = store.wait(["x", "y"])
    assert "wait of 2 keys" in repr(future)
    future.cancel()
    assert "cancelled" in repr(future)
    future = store.num_keys()
    assert "<a future, num_keys, that" in repr(future)
    assert await future == 1


async def test_pop_is_a_coroutine(store, server, eventually):
    async with asyncio.TaskGroup() as group:
        popped = group.create_task(store.queue_pop("q"))
        await store.queue_push("q", b"item")
    assert popped.result() == b"item"
    for pauses in range(4):
        popping = asyncio.create_task(store.queue_pop("q"))
        for _ in range(pauses):
            await asyncio.sleep(0)
        popping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await popping
    await eventually(lambda: server.state.num_open == 0)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "wait"])
async def test_every_form_of_waiting_but_wait_accepts_a_pop(store, form):
    await store.queue_push("q", b"item")
    assert await FORMS[form](store.queue_pop("q")) == b"item"
    popping = store.queue_pop("q")
    with pytest.raises(TypeError, match="coroutines is forbidden, use tasks"):
        await asyncio.wait([popping])
    popping.close()


async def test_every_form_of_waiting_works_on_a_prefix_store(store):
    part = AsyncPrefixStore("part", store)
    for form in FORMS.values():
        await form(part.set("k", b"v"))
        assert await form(part.get("k")) == b"v"
        assert await form(part.list_keys()) == ["k"]
    await part.queue_push("q", b"item")
    assert await part.queue_pop("q") == b"item"


async def test_call_from_another_thread_is_refused(store):
    loop, found = asyncio.get_running_loop(), []

    async def pass_on() -> bytes:
        await store.set("k", b"v")
        return await store.get("k")

    async def begin(stream) -> None:
        async with stream("k"):
            pass

    def ask() -> None:
        with pytest.raises(UsageError, match="run_coroutine_threadsafe"):
            store.get("k")
        for stream in (store.subscribe, store.watch, store.watch_keys):
            with pytest.raises(UsageError, match="run_coroutine_threadsafe"):
                asyncio.run(begin(stream))
        found.append(asyncio.run_coroutine_threadsafe(pass_on(), loop).result(LONG))

    thread = threading.Thread(target=ask)
    thread.start()
    await asyncio.to_thread(thread.join, LONG)
    assert found == [b"v"]


def test_call_after_the_end_of_the_loop_is_refused():
    async def connect() -> AsyncStore:
        server = await StoreServer.start("127.0.0.1", 0, token="token")
        store = await AsyncStore.connect("127.0.0.1", server.port, token="token", timeout=LONG)
        await store.close()
        await server.close()
        return store

    async def use(store: AsyncStore) -> None:
        for begin in (store.get, store.queue_pop, store.subscribe, store.watch):
            with pytest.raises(UsageError, match="loop has ended"):
                await begin("k")

    asyncio.run(use(asyncio.run(connect())))


async def test_timeouts_expire_in_their_order(store, server):
    """The times are the loop's timers, which are as late as those of the store."""
    loop = asyncio.get_running_loop()

    async def wait(limit: float) -> None:
        begun = loop.time()
        future = store.get("never", timeout=limit)
        assert begun + limit <= future.deadline <= loop.time() + limit
        soon_after = loop.create_future()
        loop.call_at(future.deadline + UNIT / 2, lambda: soon_after.set_result(future.done()))
        with pytest.raises(StoreTimeoutError, match=f"after {limit:g} s"):
            await future
        assert loop.time() >= future.deadline
        assert await soon_after

    waiting = store.get("later", timeout=LONG)
    await asyncio.gather(*map(wait, [4 * UNIT, UNIT, 3 * UNIT, 2 * UNIT]))
    await store.check([])
    assert server.state.num_open == 1
    await store.set("later", b"v")
    assert await waiting == b"v"


async def test_timer_stops_with_the_last_request(store):
    with pytest.raises(StoreTimeoutError):
        await store.get("never", timeout=UNIT)
    assert store.connection.deadlines.active is False
    await store.set("k", b"v", ephemeral=True)
    assert store.connection.deadlines.active is True  # until the deadline of the request, which has ended
    await store.close()
    assert store.connection.deadlines.active is False
