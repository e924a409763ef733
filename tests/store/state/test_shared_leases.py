"""Prefix leases: the keys under a prefix are deleted with the last client that holds a lease on it."""

from __future__ import annotations

import pytest

from asyncdist.base.background_loop import background_loop
from asyncdist.config import Config
from asyncdist.errors import StoreConnectionError
from asyncdist.store import AsyncStore, StoreServer, TCPStore
from asyncdist.store.protocol.operations import CHANGED, GONE, Op
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.ownership import prefix_lease
from asyncdist.testing.faults import Proxy

LONG = 10.0


class NumberedState:
    """A state machine whose requests number themselves."""

    def __init__(self) -> None:
        self.state = StoreState()
        self.number = 0

    def ask(self, client, op, *args):
        self.number += 1
        return [reply.value for reply in self.state.execute(client, self.number, op, args)]

    def acquire(self, client, prefix):
        """Acquire a prefix lease as a reconnecting client does: its owner outlives the connection."""
        self.state.bind(client, f"member {client}")
        self.ask(client, Op.SET_EPHEMERAL, prefix_lease(prefix, client), b"")

    def expire(self, client):
        self.state.leave(client)
        return self.state.expire_owner(f"member {client}")

    def key_names(self):
        return sorted(self.ask("anybody", Op.LIST_KEYS, "")[0])


@pytest.fixture
def state():
    state = NumberedState()
    for client in ("a", "b"):
        state.acquire(client, "job/1/")
    for key in ("job/1/k", "job/1/l", "job/10/k", "job", "other"):
        state.ask("c", Op.SET, key, b"v")
    state.ask("a", Op.QUEUE_PUSH, "job/1/q", b"item")
    state.ask("a", Op.QUEUE_PUSH, "job/1/q", b"item")
    state.ask("a", Op.QUEUE_PUSH, "job/2/q", b"item")
    return state


OTHERS = ["job", "job/10/k", "other"]


def test_keys_are_deleted_with_the_last_lease(state):
    state.expire("a")
    assert state.key_names() == sorted([*OTHERS, "job/1/k", "job/1/l", prefix_lease("job/1/", "b")])
    state.expire("b")
    assert state.key_names() == OTHERS
    assert state.ask("c", Op.QUEUE_LEN, "job/1/q") == [0]
    assert state.ask("c", Op.QUEUE_LEN, "job/2/q") == [1]


def test_new_lease_before_the_last_expires_keeps_the_keys(state):
    state.expire("a")
    state.acquire("d", "job/1/")
    state.expire("b")
    assert "job/1/k" in state.key_names()
    state.expire("d")
    assert state.key_names() == OTHERS


def test_lease_acquired_twice_counts_once(state):
    state.acquire("a", "job/1/")
    state.expire("a")
    state.expire("b")
    assert state.key_names() == OTHERS


def test_client_holds_leases_on_several_prefixes(state):
    state.acquire("b", "job/10/")
    state.expire("a")
    state.expire("b")
    assert state.key_names() == ["job", "other"]


def test_last_lease_deletes_ephemeral_keys_of_any_owner(state):
    state.ask("b", Op.SET_EPHEMERAL, "job/1/mine", b"")
    state.ask("stranger", Op.SET_EPHEMERAL, "job/1/strange", b"")
    state.expire("a")
    state.expire("b")
    assert state.key_names() == OTHERS


def test_watchers_are_notified_of_deleted_keys(state):
    state.ask("c", Op.WATCH, "job/1/k")
    state.expire("a")
    assert [reply.value for reply in state.expire("b")] == [GONE]
    assert state.ask("c", Op.SET, "job/1/k", b"again")[0] == CHANGED + b"again"


@pytest.mark.parametrize("key", ["\0here/", "\0here/\0", "\0here/job", "\0here/\0a"])
def test_key_without_prefix_is_not_a_lease(state, key):
    state.state.bind("d", "member d")
    state.ask("d", Op.SET_EPHEMERAL, key, b"")
    before = state.key_names()
    state.expire("d")
    assert state.key_names() == [each for each in before if each != key]


async def test_client_that_returns_after_expiry_learns_of_the_loss(eventually):
    brief = Config(store_lease=0.0)
    async with await StoreServer.start("127.0.0.1", 0) as server:
        with Proxy("127.0.0.1", server.port) as proxy:
            store = await AsyncStore.connect(*proxy.address, timeout=LONG, config=brief)
            await store.set(prefix_lease("job/", "0"), b"", ephemeral=True)
            await store.set("job/step", b"41")
            proxy.clog()
            proxy.cut()
            adding = store.add("job/step", 1)
            await eventually(lambda: not len(server.state.keys))
            proxy.unclog()
            with pytest.raises(StoreConnectionError, match="what our job kept there may be gone"):
                await adding
            with pytest.raises(StoreConnectionError, match="what our job kept there may be gone"):
                await store.check(["job/step"])
            assert not len(server.state.keys)
            await store.close()


def test_one_that_blocks_is_told_so_as_well(until):
    server = background_loop().run(StoreServer.start("127.0.0.1", 0))
    with (
        Proxy("127.0.0.1", server.port) as proxy,
        TCPStore(*proxy.address, timeout=LONG, config=Config(store_lease=0.0)) as store,
    ):
        store.set(prefix_lease("job/", "0"), b"", ephemeral=True)
        store.set("job/step", b"41")
        proxy.cut()
        until(lambda: not len(server.state.keys))
        for _ in range(2):
            with pytest.raises(StoreConnectionError, match="what our job kept there may be gone"):
                store.add("job/step", 1)
    background_loop().run(server.close())


async def test_a_daemon_that_was_killed_knows_who_stayed_where(tmp_path, eventually):
    config = Config(store_lease=LONG)
    async with await StoreServer.start("127.0.0.1", 0, config=config, data=tmp_path, stays=True) as server:
        port = server.port
        stores = [await AsyncStore.connect("127.0.0.1", port, timeout=LONG, config=config) for _ in range(2)]
        for number, store in enumerate(stores):
            await store.set(prefix_lease("job/", str(number)), b"", ephemeral=True)
        await stores[0].set("job/k", b"v")
        await stores[0].queue_push("job/q", b"item")
        await stores[0].set("k", b"v")
    async with await StoreServer.start("127.0.0.1", port, config=config, data=tmp_path, stays=True) as server:
        assert server.state.keys.peek("job/k") == b"v"
        assert await stores[0].get("job/k") == b"v"
        await stores[0].close()
        await stores[1].set("k", b"w")
        assert server.state.keys.peek("job/k") == b"v"
        await stores[1].close()
        await eventually(lambda: len(server.state.keys) == 1)
    async with await StoreServer.start("127.0.0.1", 0, config=config, data=tmp_path) as server:
        assert server.state.contents().values == {"k": b"w"}
        assert server.state.queues.num_items == 0
