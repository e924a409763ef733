"""Scoped ports: an empty store on a port of its own, which ends with a lease."""

import pytest

from asyncdist.errors import AddressError, StoreConnectionError, StoreError
from asyncdist.store import AsyncStore, StoreServer
from asyncdist.store.protocol import operations
from tests.support.faults import Proxy

LONG = 60.0


@pytest.fixture
async def server():
    async with await StoreServer.start("127.0.0.1", 0) as server:
        yield server


async def scoped_port(store: AsyncStore) -> int:
    await store.request(operations.acquire_lease("job/"))
    return await store.request(operations.open_scoped_store("job/"))


async def test_scoped_store_is_empty_and_ends_with_its_lease(server, eventually):
    async with await AsyncStore.connect("127.0.0.1", server.port, timeout=LONG) as store:
        await store.set("k", b"v")
        port = await scoped_port(store)
        async with await AsyncStore.connect("127.0.0.1", port, timeout=LONG) as worker:
            assert await worker.num_keys() == 0
            await worker.set("k", b"w")
            assert await store.get("k") == b"v"
            await store.request(operations.release_lease("job/"))
            with pytest.raises(StoreConnectionError):
                await worker.get("never")
        with pytest.raises((AddressError, StoreConnectionError)):
            await AsyncStore.connect("127.0.0.1", port, timeout=0.0)


async def test_scoped_store_survives_a_broken_connection_of_its_client(server):
    with Proxy("127.0.0.1", server.port) as proxy:
        async with await AsyncStore.connect(*proxy.address, timeout=LONG) as store:
            port = await scoped_port(store)
            async with await AsyncStore.connect("127.0.0.1", port, timeout=LONG) as worker:
                await worker.set("k", b"w")
                proxy.cut()
                await store.num_keys()
                assert await worker.get("k") == b"w"


async def test_scoped_store_without_a_lease_is_refused(server):
    async with await AsyncStore.connect("127.0.0.1", server.port, timeout=LONG) as store:
        with pytest.raises(StoreError, match="acquire it first"):
            await store.request(operations.open_scoped_store("job/"))
