"""The process's background loop: how it closes, and tasks that delay its end."""

import asyncio
import gc
import logging
import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncdist.base.background_loop import (
    BackgroundLoop,
    background_loop,
    close_background_loop,
    result_on,
    run_in_background,
)
from asyncdist.config import Config
from asyncdist.errors import UsageError
from asyncdist.store import AsyncStore, StoreServer

LONG = 60.0


@pytest.fixture(autouse=True)
def _collected():
    """Collect objects of earlier tests, so that their warnings do not appear in this test."""
    gc.collect()


@pytest.fixture
def own():
    """A background loop for one test."""
    own = BackgroundLoop()
    yield own
    own.close()


async def sleep_and_call(function):
    """Sleep until cancelled, and then call a function."""
    try:
        await asyncio.sleep(math.inf)
    finally:
        function()


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_interrupt_in_a_callback_or_task_does_not_end_the_loop(own, raised, caplog):
    def leave():
        raise raised

    async def leaving():
        leave()

    own.loop.call_soon_threadsafe(leave)
    with pytest.raises(raised):
        own.submit(leaving()).result(LONG)
    assert own.call(lambda: "goes on") == "goes on"
    assert caplog.text.count("a callback or task on asyncdist-runtime raised") == 2
    own.close()
    assert own.closed


def test_close_cancels_tasks_started_by_cancelled_tasks(own, caplog):
    ended, started = [], []

    def start(left):
        ended.append(left)
        if left:
            started.append(asyncio.get_running_loop().create_task(sleep_and_call(lambda: start(left - 1))))

    own.submit(sleep_and_call(lambda: start(3)))
    own.call(lambda: None)
    own.close()
    assert ended[:1] == [3]
    assert all(task.cancelled() for task in started)
    assert own.loop.is_closed()
    started.clear()
    gc.collect()
    assert caplog.records == []


def test_close_ends_async_generators_and_their_tasks(own, caplog):
    ended = []

    async def generate():
        try:
            yield
        finally:
            asyncio.get_running_loop().create_task(sleep_and_call(lambda: None))
            await asyncio.sleep(0)
            ended.append(True)

    generator = generate()

    async def begin():
        await anext(generator)

    own.run(begin())
    own.close()
    gc.collect()
    assert ended == [True]
    assert caplog.records == []


def test_closing_loop_is_still_the_background_loop():
    closing, found = background_loop(), []
    closing.submit(sleep_and_call(lambda: found.append(background_loop())))
    closing.call(lambda: None)
    close_background_loop()
    assert found == [closing]
    assert [each.name for each in threading.enumerate() if each.name == "asyncdist-runtime"] == []
    assert background_loop() is not closing


def test_close_waits_for_a_blocked_loop_with_a_timeout(own):
    blocked, proceed = threading.Event(), threading.Event()
    own.loop.call_soon_threadsafe(lambda: blocked.set() or proceed.wait(LONG))
    blocked.wait(LONG)
    own.close(0.01)
    assert not own.closed
    proceed.set()
    own.close()
    assert own.closed


def test_task_that_ignores_cancellation_is_not_destroyed(own, caplog):
    stay = threading.Event()

    async def stubborn():
        while not stay.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return "over"

    future = own.submit(stubborn())
    own.call(lambda: None)
    own.close(0.05)
    assert not own.closed
    stay.set()
    assert future.result(LONG) == "over"
    own.close()
    assert caplog.records == []


def test_run_with_a_timeout(own):
    ended = threading.Event()
    with pytest.raises(TimeoutError):
        own.run(sleep_and_call(ended.set), 0.01)
    assert ended.wait(LONG)


def test_closed_loop_refuses_coroutines(own):
    own.close()
    with pytest.raises(UsageError, match="ended"):
        own.run(asyncio.sleep(0))


def test_connection_lost_while_the_users_loop_closes_leaves_nothing(new_loop, caplog):
    """asyncio does not cancel tasks that start while asynchronous generators are closed."""
    server = background_loop().run(StoreServer.start("127.0.0.1", 0, stays=True))
    connections, generators = [], []

    async def lose_connection_at_shutdown():
        try:
            yield
        finally:
            background_loop().submit(asyncio.sleep(0)).add_done_callback(lambda _: server.drop_all())
            while connections[0].link is not None:  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def program():
        client = await AsyncStore.connect("127.0.0.1", server.port, config=Config(store_reconnect=LONG))
        connections.append(client.connection)
        generators.append(lose_connection_at_shutdown())
        await anext(generators[0])

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(program())
    connections.clear()
    generators.clear()
    background_loop().run(server.close())
    gc.collect()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


PROGRAM = """
import atexit, sys, threading, time

def last():
    print("ended", [thread.name for thread in threading.enumerate() if "asyncdist" in thread.name], flush=True)

atexit.register(last)  # registered first, called last

import asyncdist.sync as dist
import torch
from asyncdist.base.background_loop import background_loop

dist.init_process_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
if sys.argv[1] == "blocked":
    blocked = threading.Event()
    background_loop().loop.call_soon_threadsafe(lambda: (blocked.set(), time.sleep(180)))
    blocked.wait()
else:
    raise KeyError("a mistake")
"""


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize(
    ("loop", "status", "threads", "error"),
    [("free", 1, [], ["KeyError: 'a mistake'"]), ("blocked", 0, ["asyncdist-runtime"], [])],
)
def test_process_exits_also_if_its_loop_is_blocked(loop, status, threads, error):
    ended = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", PROGRAM, loop],
        capture_output=True,
        text=True,
        timeout=2 * LONG,  # less than the loop is blocked
    )
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == f"ended {threads}\n"
    assert ended.stderr.splitlines()[-1:] == error


def test_failed_thread_start_raises_except_at_exit(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr("asyncdist.base.background_loop._loops", {})
    with pytest.raises(RuntimeError, match="can't create new thread"):
        background_loop()
    monkeypatch.setattr("asyncdist.base.lifecycle._ending", True)
    last = background_loop()
    assert last.closed
    assert last.loop.is_closed()
    assert background_loop() is last


async def test_caller_on_another_loop_gets_the_result_of_a_background_coroutine():
    async def where():
        return asyncio.get_running_loop()

    assert await run_in_background(where()) is background_loop().loop
    with pytest.raises(ZeroDivisionError):
        await run_in_background(raise_it(ZeroDivisionError))


async def raise_it(kind):
    raise kind


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_cancelled_caller_waits_for_the_end_of_its_background_coroutine(turns):
    said = []

    async def work():
        try:
            await asyncio.sleep(LONG)
        finally:
            await asyncio.sleep(0.01)
            said.append("ended")

    async def call():
        await run_in_background(work())

    calling = asyncio.create_task(call())
    for _ in range(turns):
        await asyncio.sleep(0.002)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    # A coroutine that had not begun has nothing to end.
    assert said == ["ended"] or turns < 5
    assert not [task for task in asyncio.all_tasks(background_loop().loop) if "work" in repr(task)]


async def test_result_that_a_cancelled_caller_does_not_get_is_undone():
    has_ended = threading.Event()

    async def work():
        has_ended.set()
        return "result"

    undone = []
    calling = asyncio.create_task(run_in_background(work(), undo=undone.append))
    await asyncio.sleep(0)
    # The coroutine ends while this loop is busy, and then the caller is cancelled.
    has_ended.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert undone == ["result"]
    assert await run_in_background(work(), undo=undone.append) == "result"
    assert undone == ["result"]


def test_result_on_a_loop_that_waits_for_the_caller_is_refused(monkeypatch):
    monkeypatch.setattr("asyncdist.base.background_loop.LOOP_PATIENCE", 0.1)

    async def main():
        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(result_on, loop, asyncio.sleep(0.3, "result")) == "result"
        with ThreadPoolExecutor(1) as pool:  # its end holds the loop
            waiting = pool.submit(result_on, loop, asyncio.sleep(0, "result"))
        with pytest.raises(UsageError, match="has run nothing for"):
            waiting.result()
        return loop

    loop = asyncio.run(main())
    never = asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="closed"):
        result_on(loop, never)
    never.close()
