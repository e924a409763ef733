"""Loops, servers and stores for the tests of this folder; each test ends with nothing left over."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from asyncdist.config import Config
from asyncdist.store import AsyncStore, StoreServer

TOKEN = "a token for tests"
UNIT = 0.05
"""Seconds; every limit that a test expects to pass is one unit, and every one that it must not is hundreds."""
LONG = 200 * UNIT


def _debug_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_debug(True)
    return loop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio-debug": _debug_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    """Fail on threads left behind, and have sockets left behind warn now, which is an error too."""
    before = set(threading.enumerate())
    gc.freeze()  # the collection below has only this test's own objects to go through
    yield
    gc.collect()
    gc.unfreeze()
    left = [t for t in threading.enumerate() if t not in before and t.name != "asyncdist-runtime"]
    for thread in left:
        thread.join(2)
    assert [t.name for t in left if t.is_alive()] == []


@pytest.fixture
def config() -> Config:
    return Config(store_max_value_nbytes=1 << 20, handshake_timeout=LONG)


@pytest_asyncio.fixture
async def server(config: Config) -> AsyncIterator[StoreServer]:
    server = await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config)
    yield server
    await server.close()
    assert server.num_connections == 0
    assert server.state.num_open == 0
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert others == []


Connect = Callable[[], Awaitable[AsyncStore]]


@pytest_asyncio.fixture
async def connect(server: StoreServer) -> AsyncIterator[Connect]:
    made: list[AsyncStore] = []

    async def connect() -> AsyncStore:
        store = await AsyncStore.connect("127.0.0.1", server.port, token=TOKEN, timeout=LONG)
        made.append(store)
        return store

    yield connect
    for store in made:
        await store.close()


@pytest_asyncio.fixture
async def store(connect: Connect) -> AsyncStore:
    return await connect()


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Awaitable[None]]:
    """Return a wait until something is so that has no event of its own."""

    async def eventually(true: Callable[[], Any]) -> None:
        async with asyncio.timeout(LONG):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    return eventually
