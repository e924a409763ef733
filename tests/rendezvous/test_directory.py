"""The records of a job in its store: published, found, watched, and ended with their processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from asyncdist.config import Config
from asyncdist.errors import AuthenticationError, ProtocolError, UsageError
from asyncdist.net.connection.handshake import ChannelAddress
from asyncdist.rendezvous import JobDirectory, PeerRecord
from asyncdist.store import AsyncStore, StoreServer

CONFIG = Config(timeout=20.0)


@pytest.fixture
async def server() -> AsyncIterator[StoreServer]:
    async with await StoreServer.start("127.0.0.1", 0) as server:
        yield server


@pytest.fixture
def job(server) -> str:
    """Return the URL of a job at a store server."""
    return f"asyncdist://127.0.0.1:{server.port}/a job/with a slash"


@pytest.fixture
async def opened():
    """Return a function that opens a directory, which ends with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def opened(job, service: str = "test", config: Config = CONFIG) -> JobDirectory:
            directory = await JobDirectory.open(job, service, config=config)
            stack.push_async_callback(directory.close)
            return directory

        yield opened


def record(name: str, number: int, about=None) -> PeerRecord:
    return PeerRecord(name, ChannelAddress(f"id{number}", "a process", "host", 1, 2, "x", ("127.0.0.1", 1)), about)


async def test_records_are_found_by_name_until_they_are_withdrawn(job, opened):
    directory, other = await opened(job), await opened(job)
    first, second, third = record("a/b", 1, {"rank": 3}), record("a/b", 2), record("a", 1)
    for each in (first, second, third):
        await directory.publish(each)
    assert await other.records("a/b") == [first, second]
    assert sorted(await other.names()) == ["a", "a/b"]
    await directory.withdraw(first)
    assert await other.records("a/b") == [second]
    assert (directory.token, directory.host) == (other.token, "127.0.0.1")
    await directory.close()
    assert await other.records("a/b") == []


async def test_watch_tells_what_is_published_and_ends(job, opened):
    watching, directory = await opened(job), await opened(job)
    first, second = record("name", 1), record("name", 2)
    await directory.publish(first)
    async with watching.watch("name") as changes:
        assert (await anext(changes)).record == first
        await directory.publish(second)
        assert (await anext(changes)).record == second
        await directory.close()
        ended = [await anext(changes), await anext(changes)]
        assert {change.id for change in ended} == {"id1", "id2"}
        assert [change.record for change in ended] == [None, None]


async def test_services_and_jobs_are_kept_apart(job, opened):
    one = await opened(job, "one")
    await one.publish(record("name", 1))
    for other in (await opened(job, "two"), await opened(job + "x", "one")):
        assert await other.records("name") == []
        assert other.token != one.token


async def test_store_of_the_caller_is_used_and_left_open(server, opened):
    async with await AsyncStore.connect("127.0.0.1", server.port, timeout=20.0) as store:
        directory = await opened(store)
        await directory.publish(record("name", 1))
        assert await directory.names() == ["name"]
        await directory.close()
        assert await store.num_keys() > 0


async def test_token_of_the_settings_is_the_token_of_the_job(opened):
    async with await StoreServer.start("127.0.0.1", 0, token="secret") as server:
        config = CONFIG.with_(token="secret")
        directory = await opened(f"asyncdist://127.0.0.1:{server.port}/job", config=config)
        assert directory.token == "secret"
        await directory.close()


@pytest.mark.parametrize("url", ["tcp://host:1", "no url", "asyncdist://host/job"])
async def test_other_urls_are_refused(url):
    with pytest.raises(UsageError, match="use"):
        await JobDirectory.open(url, "test", config=CONFIG)


async def test_store_that_other_hosts_reach_needs_a_token(job):
    class Reached(AsyncStore):
        host = "store.example"

        def __init__(self) -> None:
            self.timeout = 1.0

        def __repr__(self) -> str:
            return "a store"

    with pytest.raises(AuthenticationError, match="cannot be passed to other hosts"):
        await JobDirectory.open(Reached(), "test", config=CONFIG)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x01"])
def test_illegible_record_is_an_error(data):
    with pytest.raises(ProtocolError, match="not legible"):
        PeerRecord.decode(data)


used = []
"""The tokens that directories of `kept` have told."""


@pytest.fixture
async def kept(opened):
    """Return a function that opens a directory at a port with `keep` as a task; both end with the test."""
    tasks = []
    used.clear()

    async def kept(port: int) -> JobDirectory:
        directory = await opened(f"asyncdist://127.0.0.1:{port}/job")
        tasks.append(asyncio.ensure_future(directory.keep(used.append)))
        return directory

    yield kept
    for keeping in tasks:
        keeping.cancel()
        await asyncio.wait([keeping])


async def test_records_are_published_again_in_the_store_that_follows_a_lost_one(kept, caplog):
    server = await StoreServer.start("127.0.0.1", 0)
    directory = await kept(server.port)
    await directory.publish(record("name", 1))
    withdrawn = record("name", 2)
    await directory.publish(withdrawn)
    await directory.withdraw(withdrawn)
    for _ in range(2):
        await server.close()
        server = await StoreServer.start("127.0.0.1", server.port)
        newcomer = await kept(server.port)
        async with newcomer.watch("name") as changes:
            assert (await anext(changes)).record == record("name", 1)
        assert await newcomer.records("name") == [record("name", 1)]
    assert "no process finds what this one has published there" in caplog.text
    assert "published 1 records again" in caplog.text
    await server.close()


async def test_token_of_those_who_came_first_to_the_new_store_is_used(kept, eventually):
    server = await StoreServer.start("127.0.0.1", 0)
    directory = await kept(server.port)
    await directory.publish(record("name", 1))
    await server.close()
    server = await StoreServer.start("127.0.0.1", server.port)
    # Before the directory connects again, which takes several turns of the loop.
    server.state.keys.set("channels/job/test/token", b"of others")
    await eventually(lambda: directory.token == "of others")
    assert used == ["of others"]
    await server.close()


async def test_loss_of_the_store_of_the_caller_is_logged(caplog):
    server = await StoreServer.start("127.0.0.1", 0)
    async with server, await AsyncStore.connect("127.0.0.1", server.port) as store:
        directory = await JobDirectory.open(store, "test", config=CONFIG)
        keeping = asyncio.ensure_future(directory.keep(used.append))
        await directory.publish(record("name", 1))
        await server.close()
        await keeping
    assert "no process finds what this one has published there" in caplog.text
