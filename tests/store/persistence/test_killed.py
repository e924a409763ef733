"""A server with a journal is killed repeatedly: while it writes, syncs, writes snapshots, compacts or starts.

Acknowledged changes must be there each time. Other changes may be there, but only whole and in order.
"""

import asyncio
import contextlib
import itertools
import os
import random
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncdist.config import Config
from asyncdist.errors import AsyncdistError
from asyncdist.store import AsyncStore
from asyncdist.store.persistence.group_commit import Fsync
from benchmarks.processes import Nursery, RankEndedError, RankProcess

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).with_name("program_killed.py")
KILLS = int(os.environ.get("ASYNCDIST_TEST_STORE_KILLS", "300"))
PATIENCE = 60.0


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    with Nursery(preload=("asyncdist.store", "asyncdist.store.persistence.group_commit")) as nursery:
        yield nursery


class Expected:
    """The changes that were acknowledged, and those that were requested."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}  # acknowledged, without a later request
        self.asked: dict[str, bytes | None] = {}  # requested; None: deleted
        self.total = self.most = 0  # of an `add`
        self.items: deque[bytes] = deque()  # pushed for sure, and not popped
        self.unsure: set[bytes] = set()  # pushed or popped perhaps
        self.numbers = itertools.count()

    async def check(self, store: AsyncStore) -> None:
        keys = await store.list_keys("key/")
        found = dict(zip(keys, await store.multi_get(keys, timeout=PATIENCE), strict=True)) if keys else {}
        for key in found.keys() | self.values.keys() | self.asked.keys():
            allowed = {self.values.get(key)} | ({self.asked[key]} if key in self.asked else set())
            assert found.get(key) in allowed, f"{key}: {found.get(key)} is not in {allowed}"
        total = await store.add("total", 0)
        assert self.total <= total <= self.most
        items = [await store.queue_pop("queue", block=False) for _ in range(await store.queue_len("queue"))]
        sure = [item for item in items if item not in self.unsure]
        assert sure == list(self.items)
        assert len(set(items)) == len(items)
        self.values, self.asked = found, {}
        self.total = self.most = total
        self.items.clear()
        self.unsure = set(items)  # their confirmations may not have arrived

    async def write(self, store: AsyncStore, chance: random.Random) -> None:
        """Change something until the store is killed."""
        while True:
            key, value = f"key/{chance.randrange(30)}", b"%d" % next(self.numbers) * chance.randrange(1, 40)
            if key in self.asked:
                await asyncio.sleep(0)
                continue
            match chance.randrange(4):
                case 0:
                    self.asked[key] = value
                    await store.set(key, value)
                    self.values[key] = value
                    del self.asked[key]
                case 1:
                    self.asked[key] = None
                    await store.delete_key(key)
                    self.values.pop(key, None)
                    del self.asked[key]
                case 2:
                    self.most += 1
                    self.total = max(self.total, await store.add("total", 1))
                case 3:
                    self.unsure.add(value)
                    await store.queue_push("queue", value)
                    self.items.append(value)
                    self.unsure.discard(value)


async def until_killed(*writing) -> None:
    for over in await asyncio.gather(*writing, return_exceptions=True):
        if not isinstance(over, AsyncdistError):
            raise over


async def one_life(server: RankProcess, expected: Expected, chance: random.Random) -> None:
    port = server.hear()
    stores = [await _connected(port) for _ in range(3)]
    try:
        await expected.check(stores[0])
        writing = [expected.write(store, random.Random(chance.random())) for store in stores]
        asyncio.get_running_loop().call_later(chance.random() * 0.05, server.kill)
        async with asyncio.timeout(PATIENCE):
            await until_killed(*writing)
    finally:
        for store in stores:
            await store.close()


async def _connected(port: int) -> AsyncStore:
    return await AsyncStore.connect("127.0.0.1", port, timeout=PATIENCE, config=Config(store_reconnect=0.0))


@pytest.mark.exhaustive
def test_acknowledged_changes_survive_kills(nursery, tmp_path):
    chance = random.Random(5)
    expected, snapshots = Expected(), set()
    for life in range(KILLS):
        fsync = chance.choice(list(Fsync))
        if chance.random() < 0.2:  # killed while it starts
            starting = nursery.start(PROGRAM, "serve", str(tmp_path), 1500, fsync)
            with contextlib.suppress(TimeoutError, RankEndedError):
                starting.hear(chance.random() * 0.02)
            starting.kill()
            starting.wait()
        server = nursery.start(PROGRAM, "serve", str(tmp_path), 1500, fsync)
        try:
            asyncio.run(one_life(server, expected, chance))
        except RankEndedError as error:
            pytest.fail(f"in its life {life} it did not start: {error}")
        server.wait()
        snapshots |= {int(name[9:]) for name in os.listdir(tmp_path) if re.fullmatch(r"snapshot-\d+", name)}
        nursery.clear()
    assert max(snapshots) > KILLS / 20  # so many were finished, and many more interrupted
