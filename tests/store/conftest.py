"""Servers and clients for the tests of this folder; each ends with nothing left at the server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytest_asyncio

from asyncdist.config import Config
from asyncdist.store import AsyncStore, StoreServer, TCPStore
from tests.support.faults import Proxy
from tests.support.raw_connection import RawConnection
from tests.support.stores import LONG, TOKEN, open_store


@pytest.fixture
def config() -> Config:
    return Config(store_max_value_nbytes=1 << 20, handshake_timeout=LONG, store_c10d="loopback")


@pytest_asyncio.fixture
async def server(config: Config) -> AsyncIterator[StoreServer]:
    server = await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config)
    yield server
    await server.close()
    assert server.num_connections == 0
    assert server.state.num_open == 0
    assert server.quota.arriving_nbytes == 0
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert others == []


@pytest_asyncio.fixture
async def raw() -> AsyncIterator[Callable[..., Awaitable[RawConnection]]]:
    """Connect to a server, authenticated or not; the connection is reset after the test."""
    made: list[RawConnection] = []

    async def connect(server: StoreServer, *, proven: bool = False) -> RawConnection:
        made.append(await RawConnection.to(server.port, token=TOKEN if proven else None))
        return made[-1]

    yield connect
    for each in made:
        await each.leave()


@pytest.fixture
def proxy(server: StoreServer) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", server.port) as proxy:
        yield proxy


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as pool:
        yield pool


@pytest.fixture
def master() -> Iterator[TCPStore]:
    """A blocking store that serves itself."""
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG, config=Config(token=TOKEN)) as store:
        yield store


@pytest.fixture
def other(master: TCPStore) -> Iterator[TCPStore]:
    """Another client of `master`."""
    with TCPStore("127.0.0.1", master.port, timeout=LONG, config=Config(token=TOKEN)) as store:
        yield store


Connect = Callable[..., Awaitable[Any]]


@pytest_asyncio.fixture
async def connect(server: StoreServer) -> AsyncIterator[Connect]:
    """Connect a client to `server` or to an address, with settings; the client is closed after the test."""
    made = []

    async def connect(address: tuple[str, int] | None = None, *, kind: type = AsyncStore, **settings: Any) -> Any:
        made.append(await open_store(kind, *(address or ("127.0.0.1", server.port)), **settings))
        return made[-1]

    yield connect
    for store in made:
        await store.close()


@pytest_asyncio.fixture
async def store(connect: Connect) -> AsyncStore:
    return await connect()
