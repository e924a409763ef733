"""Scoped ports: an empty store on a port of its own, which ends with a lease."""

import pytest

from asyncdist.errors import AddressError, StoreConnectionError, StoreError
from asyncdist.store import AsyncStore
from asyncdist.store.protocol import operations
from tests.support.stores import TOKEN


async def scoped_address(store: AsyncStore) -> tuple[str, int]:
    await store.request(operations.acquire_lease("job/"))
    return "127.0.0.1", await store.request(operations.command(operations.Op.OPEN_SCOPED_STORE, "job/"))


async def test_scoped_store_is_empty_and_ends_with_its_lease(store, connect):
    await store.set("k", b"v")
    address = await scoped_address(store)
    worker = await connect(address)
    assert await worker.num_keys() == 0
    await worker.set("k", b"w")
    assert await store.get("k") == b"v"
    await store.request(operations.release_lease("job/"))
    with pytest.raises(StoreConnectionError):
        await worker.get("never")
    with pytest.raises((AddressError, StoreConnectionError)):
        await AsyncStore.connect(*address, token=TOKEN, timeout=0.0)


async def test_scoped_store_survives_a_broken_connection_of_its_client(proxy, connect):
    store = await connect(proxy.address)
    worker = await connect(await scoped_address(store))
    await worker.set("k", b"w")
    proxy.cut()
    await store.num_keys()
    assert await worker.get("k") == b"w"


async def test_scoped_store_without_a_lease_is_refused(store):
    with pytest.raises(StoreError, match="acquire it first"):
        await store.request(operations.command(operations.Op.OPEN_SCOPED_STORE, "job/"))
