"""Keys that belong to several clients, and go with the last of them: told apart by prefix, whoever has set them."""

from __future__ import annotations

import pytest

from asyncdist.base.background_loop import background_loop
from asyncdist.config import Config
from asyncdist.errors import StoreConnectionError
from asyncdist.store import AsyncStore, StoreServer, TCPStore
from asyncdist.store.protocol.operations import CHANGED, GONE, Op
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.ownership import lodging
from asyncdist.testing.faults import Proxy

LONG = 10.0


class House:
    """A state machine whose requests number themselves."""

    def __init__(self) -> None:
        self.state = StoreState()
        self.number = 0

    def ask(self, client, op, *args):
        self.number += 1
        return [reply.value for reply in self.state.execute(client, self.number, op, args)]

    def come(self, client, prefix):
        """Stay under a prefix, as a client that may come back does: owned by what outlives its connection."""
        self.ask(client, Op.SET_EPHEMERAL, lodging(prefix, client), b"")
        self.state.own(f"member {client}", lodging(prefix, client))

    def go(self, client):
        self.state.leave(client)
        self.state.expire_owner(f"member {client}")
        return self.state.collect()

    def held(self):
        return sorted(self.ask("anybody", Op.LIST_KEYS, "")[0])


@pytest.fixture
def house():
    house = House()
    for client in ("a", "b"):
        house.come(client, "job/1/")
    for key in ("job/1/k", "job/1/l", "job/10/k", "job", "other"):
        house.ask("c", Op.SET, key, b"v")
    house.ask("a", Op.QUEUE_PUSH, "job/1/q", b"item")
    house.ask("a", Op.QUEUE_PUSH, "job/1/q", b"item")
    house.ask("a", Op.QUEUE_PUSH, "job/2/q", b"item")
    return house


OTHERS = ["job", "job/10/k", "other"]


def test_what_is_theirs_goes_with_the_last(house):
    house.go("a")
    assert house.held() == sorted([*OTHERS, "job/1/k", "job/1/l", lodging("job/1/", "b")])
    house.go("b")
    assert house.held() == OTHERS
    assert house.ask("c", Op.QUEUE_LEN, "job/1/q") == [0]
    assert house.ask("c", Op.QUEUE_LEN, "job/2/q") == [1]


def test_one_that_comes_before_the_last_has_gone_keeps_it(house):
    house.go("a")
    house.come("d", "job/1/")
    house.go("b")
    assert "job/1/k" in house.held()
    house.go("d")
    assert house.held() == OTHERS


def test_one_that_says_so_twice_counts_once(house):
    house.come("a", "job/1/")
    house.go("a")
    house.go("b")
    assert house.held() == OTHERS


def test_one_that_stays_at_several(house):
    house.come("b", "job/10/")
    house.go("a")
    house.go("b")
    assert house.held() == ["job", "other"]


def test_ephemeral_keys_of_the_last_and_of_strangers_are_among_them(house):
    house.ask("b", Op.SET_EPHEMERAL, "job/1/mine", b"")
    house.state.own("member b", "job/1/mine")
    house.ask("stranger", Op.SET_EPHEMERAL, "job/1/strange", b"")
    house.go("a")
    house.go("b")
    assert house.held() == OTHERS
    assert house.state.owned() == {}


def test_those_who_watch_are_told(house):
    house.ask("c", Op.WATCH, "job/1/k")
    house.go("a")
    assert [reply.value for reply in house.go("b")] == [GONE]
    assert house.ask("c", Op.SET, "job/1/k", b"again")[0] == CHANGED + b"again"


@pytest.mark.parametrize("key", ["\0here/", "\0here/\0", "\0here/job", "\0here/\0a"])
def test_a_key_that_names_no_prefix_is_like_any_other(house, key):
    house.ask("d", Op.SET_EPHEMERAL, key, b"")
    house.state.own("member d", key)
    before = house.held()
    house.go("d")
    assert house.held() == [each for each in before if each != key]


async def test_one_that_comes_back_when_all_may_be_gone_is_told_so(eventually):
    brief = Config(store_lease=0.0)
    async with await StoreServer.start("127.0.0.1", 0) as server:
        with Proxy("127.0.0.1", server.port) as proxy:
            store = await AsyncStore.connect(*proxy.address, timeout=LONG, config=brief)
            await store.set(lodging("job/", "0"), b"", ephemeral=True)
            await store.set("job/step", b"41")
            proxy.clog()
            proxy.cut()
            adding = store.add("job/step", 1)
            await eventually(lambda: not server.state.num_keys)
            proxy.unclog()
            with pytest.raises(StoreConnectionError, match="what our job kept there may be gone"):
                await adding
            with pytest.raises(StoreConnectionError, match="what our job kept there may be gone"):
                await store.check(["job/step"])
            assert not server.state.num_keys
            await store.close()


def test_one_that_blocks_is_told_so_as_well(until):
    server = background_loop().run(StoreServer.start("127.0.0.1", 0))
    with (
        Proxy("127.0.0.1", server.port) as proxy,
        TCPStore(*proxy.address, timeout=LONG, config=Config(store_lease=0.0)) as store,
    ):
        store.set(lodging("job/", "0"), b"", ephemeral=True)
        store.set("job/step", b"41")
        proxy.cut()
        until(lambda: not server.state.num_keys)
        for _ in range(2):
            with pytest.raises(StoreConnectionError, match="what our job kept there may be gone"):
                store.add("job/step", 1)
    background_loop().run(server.close())


async def test_a_daemon_that_was_killed_knows_who_stayed_where(tmp_path, eventually):
    config = Config(store_lease=LONG)
    async with await StoreServer.start("127.0.0.1", 0, config=config, data=tmp_path) as server:
        port, server.stays = server.port, True
        stores = [await AsyncStore.connect("127.0.0.1", port, timeout=LONG, config=config) for _ in range(2)]
        for number, store in enumerate(stores):
            await store.set(lodging("job/", str(number)), b"", ephemeral=True)
        await stores[0].set("job/k", b"v")
        await stores[0].queue_push("job/q", b"item")
        await stores[0].set("k", b"v")
    async with await StoreServer.start("127.0.0.1", port, config=config, data=tmp_path) as server:
        server.stays = True
        assert server.state.peek("job/k") == b"v"
        assert await stores[0].get("job/k") == b"v"
        await stores[0].close()
        await stores[1].set("k", b"w")
        assert server.state.peek("job/k") == b"v"
        await stores[1].close()
        await eventually(lambda: server.state.num_keys == 1)
    async with await StoreServer.start("127.0.0.1", 0, config=config, data=tmp_path) as server:
        assert server.state.contents().values == {"k": b"w"}
        assert server.state.num_items == 0
