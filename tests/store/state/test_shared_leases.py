"""Leases on prefixes: the keys under a prefix are deleted with the last client that keeps the lease on it."""

import asyncio

import pytest

from asyncdist.config import Config
from asyncdist.errors import StoreConnectionError
from asyncdist.store import AsyncStore, StoreServer, TCPStore
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.operations import CHANGED, GONE, Op, Reason
from asyncdist.store.state.machine import StoreState
from tests.support.faults import Proxy
from tests.support.stores import TOKEN, open_store

LONG = 10.0


class NumberedState:
    """A state machine whose requests number themselves. A client has an identity, as one that may reconnect."""

    def __init__(self) -> None:
        self.state = StoreState()
        self.number = 0

    def ask(self, client, op, *args):
        self.number += 1
        return [reply.value for reply in self.state.execute(client, self.number, op, args)]

    def connect(self, client):
        return self.state.bind(client, client.encode())

    def acquire(self, client, prefix):
        """Return whether the lease was granted at once."""
        self.connect(client)
        return self.ask(client, Op.ACQUIRE_LEASE, prefix) == [None]

    def expire(self, client):
        self.state.leave(client)
        return self.state.expire(client.encode())

    def key_names(self):
        return sorted(self.state.keys.list_keys(""))


@pytest.fixture
def state():
    state = NumberedState()
    for client in ("a", "b"):
        assert state.acquire(client, "job/1/")
    for key in ("job/1/k", "job/1/l", "job/10/k", "job", "other"):
        state.ask("c", Op.SET, key, b"v")
    state.ask("a", Op.QUEUE_PUSH, "job/1/q", b"item")
    state.ask("a", Op.QUEUE_PUSH, "job/1/q", b"item")
    state.ask("a", Op.QUEUE_PUSH, "job/2/q", b"item")
    return state


OTHERS = ["job", "job/10/k", "other"]


@pytest.mark.parametrize("more", [{}, {"a": "job/1/"}, {"b": "job/10/"}], ids=["one", "one, twice", "one, and another"])
def test_keys_are_deleted_with_the_last_client_that_keeps_the_lease(state, more):
    for client, prefix in more.items():
        assert state.acquire(client, prefix)
    state.expire("a")
    assert state.key_names() == sorted([*OTHERS, "job/1/k", "job/1/l"])
    state.expire("b")
    assert state.key_names() == [key for key in OTHERS if not key.startswith(more.get("b", "none"))]
    assert state.ask("c", Op.QUEUE_LEN, "job/1/q") == [0]
    assert state.ask("c", Op.QUEUE_LEN, "job/2/q") == [1]


def test_client_that_joins_before_the_last_one_expires_keeps_the_keys(state):
    state.expire("a")
    assert state.acquire("d", "job/1/")
    state.expire("b")
    assert "job/1/k" in state.key_names()
    state.expire("d")
    assert state.key_names() == OTHERS


def test_released_lease_ends_with_the_other_client(state):
    ended = []
    state.state.leases.at_end(b"a", "job/1/", lambda: ended.append("job/1/"))
    state.ask("a", Op.RELEASE_LEASE, "job/1/")
    assert "job/1/k" in state.key_names()
    assert state.ask("c", Op.RELEASE_LEASE, "job/1/") == [None]
    state.expire("b")
    assert state.key_names() == OTHERS
    assert ended == ["job/1/"]


def test_end_of_a_lease_deletes_ephemeral_keys_of_any_client(state):
    state.ask("b", Op.SET_EPHEMERAL, "job/1/mine", b"")
    state.ask("stranger", Op.SET_EPHEMERAL, "job/1/strange", b"")
    state.expire("a")
    state.expire("b")
    assert state.key_names() == OTHERS
    assert state.state.gather()().attached == {}


def test_watchers_are_notified_of_deleted_keys(state):
    state.ask("c", Op.WATCH, "job/1/k")
    state.expire("a")
    assert [reply.value for reply in state.expire("b")] == [GONE]
    assert state.ask("c", Op.SET, "job/1/k", b"again")[0] == CHANGED + b"again"


def test_lease_on_an_empty_prefix_is_refused(state):
    ((reason, _),) = state.ask("a", Op.ACQUIRE_LEASE, "")
    assert reason == Reason.INVALID


@pytest.fixture
def abandoned(state):
    """A lease whose clients are disconnected, and a client "d" that waits for it."""
    state.state.leave("a")
    state.state.leave("b")
    assert not state.acquire("d", "job/1/")
    return state


def test_lease_without_connected_clients_is_granted_once_one_reconnects(abandoned):
    (granted,) = abandoned.connect("a")
    assert granted.client == "d"
    abandoned.expire("a")
    abandoned.expire("b")
    assert "job/1/k" in abandoned.key_names()
    abandoned.expire("d")
    assert abandoned.key_names() == OTHERS


def test_lease_without_connected_clients_is_granted_anew_after_its_end(abandoned):
    assert not abandoned.acquire("e", "job/1/")
    assert abandoned.expire("a") == []
    assert [reply.client for reply in abandoned.expire("b")] == ["d", "e"]
    assert abandoned.key_names() == OTHERS
    abandoned.ask("d", Op.SET, "job/1/new", b"")
    abandoned.expire("d")
    assert "job/1/new" in abandoned.key_names()


def test_cancelled_request_for_a_lease_is_not_granted(abandoned):
    abandoned.ask("d", Op.CANCEL, abandoned.number)
    abandoned.expire("a")
    assert abandoned.expire("b") == []
    assert abandoned.state.gather()().shared == {}


@pytest.mark.parametrize("kind", [AsyncStore, TCPStore])
async def test_client_that_returns_after_expiry_learns_of_the_loss(kind, eventually):
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN) as server:
        with Proxy("127.0.0.1", server.port) as proxy:
            store = await open_store(kind, *proxy.address, store_lease=0.0)
            await store.request(operations.acquire_lease("job/"))
            await store.set("job/step", b"41")
            proxy.clog()
            proxy.cut()
            adding = asyncio.ensure_future(store.add("job/step", 1))
            await eventually(lambda: not len(server.state.keys))
            proxy.unclog()
            for refused in (adding, store.check(["job/step"])):
                with pytest.raises(StoreConnectionError, match="the data of its job may be gone"):
                    await refused
            assert not len(server.state.keys)
            await store.close()


async def test_killed_daemon_restores_shared_leases(tmp_path, eventually):
    config = Config(store_lease=LONG)
    async with await StoreServer.start("127.0.0.1", 0, config=config, data=tmp_path, stays=True) as server:
        port = server.port
        stores = [await AsyncStore.connect("127.0.0.1", port, timeout=LONG, config=config) for _ in range(2)]
        for store in stores:
            await store.request(operations.acquire_lease("job/"))
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
        assert server.state.gather()().values == {"k": b"w"}
        assert server.state.queues.num_items == 0
