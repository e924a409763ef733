"""A server with a journal acknowledges a change once it is written, as its fsync policy says, and keeps it."""

import asyncio
import contextlib
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from asyncdist.config import Config
from asyncdist.errors import JournalError, StoreConnectionError, StoreError
from asyncdist.store import AsyncStore, StoreServer, TCPStore
from asyncdist.store.persistence.group_commit import Fsync, GroupCommit
from asyncdist.store.persistence.journal import Journal
from asyncdist.store.protocol.c10d import MAGIC, Code
from asyncdist.store.protocol.client_protocol import IDENTITY_NBYTES
from asyncdist.store.protocol.operations import Op
from asyncdist.store.server.c10d_session import C10dSession
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.model import Contents
from tests.support.c10d_peer import Peer, encode
from tests.support.ports import refuses
from tests.support.received_messages import frame_of

TOKEN = "a token for tests"
LONG = 10.0
CONFIG = Config(store_max_value_nbytes=1 << 20, store_reconnect=0.0, store_c10d="loopback")

Eventually = Callable[[Callable[[], object]], Awaitable[None]]


@asynccontextmanager
async def served(
    folder: Path, fsync: Fsync = Fsync.ALWAYS, config: Config = CONFIG
) -> AsyncIterator[tuple[StoreServer, AsyncStore]]:
    server = await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config, data=folder, fsync=fsync)
    store = await AsyncStore.connect("127.0.0.1", server.port, token=TOKEN, timeout=LONG, config=config)
    try:
        yield server, store
    finally:
        await store.close()
        await server.close()


class Disk:
    """Blocks `Journal.sync` between `stop` and `resume`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.syncs = 0
        self.running, real = threading.Event(), Journal.sync
        self.running.set()

        def sync(journal: Journal) -> None:
            self.syncs += 1
            assert self.running.wait(LONG)
            real(journal)

        monkeypatch.setattr(Journal, "sync", sync)

    def stop(self) -> None:
        self.running.clear()

    def resume(self) -> None:
        self.running.set()


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("fsync", list(Fsync))
async def test_restarted_server_has_what_it_held(tmp_path, fsync):
    async with served(tmp_path, fsync) as (_, store):
        await store.multi_set(["a", "b", "gone"], [b"1", b"2", b"3"])
        assert await store.add("n", 40) == 40
        assert await store.compare_set("a", b"1", b"one") == b"one"
        await store.append("b", b"+")
        assert await store.delete_key("gone")
        for item in (b"first", b"second", b"third"):
            await store.queue_push("q", item)
        assert await store.queue_pop("q") == b"first"
        await store.barrier("together", 1)
    async with served(tmp_path, fsync) as (_, store):
        assert await store.multi_get(["a", "b", "n", "together"]) == [b"one", b"2+", b"40", b"1"]
        assert await store.add("n", 2) == 42
        assert await store.num_keys() == 4
        assert [await store.queue_pop("q") for _ in range(2)] == [b"second", b"third"]
        assert await store.queue_len("q") == 0
        await store.queue_push("q", b"fourth")
    async with served(tmp_path, fsync) as (_, store):
        assert await store.queue_pop("q") == b"fourth"


@pytest.mark.parametrize("limit", [1, 1 << 20])
async def test_long_values_can_be_read_after_a_restart_with_a_smaller_limit(tmp_path, limit):
    value, item = b"v" * (2 << 20), b"i" * (3 << 20)
    async with served(tmp_path, config=CONFIG.with_(store_max_value_nbytes=4 << 20)) as (_, store):
        await store.set("large", value)
        await store.queue_push("q", item)
    async with served(tmp_path, config=CONFIG.with_(store_max_value_nbytes=limit)) as (server, store):
        assert await store.get("large") == value
        async with store.watch("large") as watch:
            assert await anext(watch) == value
        with await asyncio.to_thread(
            TCPStore, "127.0.0.1", server.port, timeout=LONG, token=TOKEN, config=CONFIG
        ) as blocking:
            assert await asyncio.to_thread(blocking.queue_pop, "q") == item
        with pytest.raises(StoreError, match="ASYNCDIST_STORE_MAX_VALUE_NBYTES"):
            await store.append("large", b"more")
        with pytest.raises(StoreError, match="ASYNCDIST_STORE_MAX_VALUE_NBYTES"):
            async with store.watch_keys():
                pass


async def test_unacknowledged_item_is_in_the_queue_after_a_restart(tmp_path, eventually: Eventually):
    async with served(tmp_path) as (server, store):
        for item in (b"first", b"second"):
            await store.queue_push("q", item)
        popped = server.state.execute("a client that dies", 1, Op.QUEUE_POP, ("q", False))
        assert popped[0].value == b"first"
        assert await store.queue_pop("q") == b"second"
        await eventually(lambda: server.state.gather()().queues["q"] == {1: b"first"})
    async with served(tmp_path) as (_, store):
        assert await store.queue_pop("q", block=False) == b"first"
        with pytest.raises(StoreError, match="is empty"):
            await store.queue_pop("q", block=False)


async def test_changes_of_torchs_clients_are_kept(tmp_path):
    def write(port: int) -> None:
        with Peer(port) as peer:
            peer.ask(Code.SET, b"\x80 no text", b"value")
            assert peer.ask(Code.ADD, b"n", 3) == 3
            peer.ask(Code.QUEUE_PUSH, b"q", b"item")
            peer.ask(Code.QUEUE_PUSH, b"q", b"other")
            assert peer.ask(Code.QUEUE_POP, b"q") == (2, b"item")

    def read(port: int) -> None:
        with Peer(port) as peer:
            assert peer.ask(Code.GET, b"\x80 no text") == b"value"
            assert peer.ask(Code.ADD, b"n", 1) == 4
            assert peer.ask(Code.QUEUE_POP, b"q") == (1, b"other")

    async with served(tmp_path) as (server, _):
        await asyncio.to_thread(write, server.port)
    async with served(tmp_path) as (server, _):
        await asyncio.to_thread(read, server.port)


# -- group commit -----------------------------------------------------------------------------------


async def test_replies_wait_for_one_sync_of_many_changes(tmp_path, disk, eventually: Eventually):
    async with served(tmp_path) as (server, store):
        other = await AsyncStore.connect("127.0.0.1", server.port, token=TOKEN, timeout=LONG)
        await store.set("old", b"value")
        disk.stop()
        before = disk.syncs
        answers = [asyncio.ensure_future(store.set("k", b"v"))]
        await eventually(lambda: disk.syncs > before)
        answers += [asyncio.ensure_future(other.add("n", 1)) for _ in range(50)]
        answers.append(asyncio.ensure_future(other.get("k")))
        await eventually(lambda: server.state.keys.peek("n") == b"50")
        assert not any(answer.done() for answer in answers)
        disk.resume()
        assert await asyncio.gather(*answers) == [None, *range(1, 51), b"v"]
        assert disk.syncs == before + 2  # one for the first, one for all fifty
        await other.close()


async def test_read_of_synced_values_does_not_wait(tmp_path, disk):
    async with served(tmp_path) as (_, store):
        await store.set("k", b"v")
        disk.stop()
        assert await store.get("k") == b"v"
        assert await store.check(["absent"]) is False
        disk.resume()


async def test_policy_never_does_not_sync(tmp_path, disk):
    async with served(tmp_path, Fsync.NEVER) as (_, store):
        disk.stop()
        for number in range(100):
            assert await store.add("n", 1) == number + 1
        assert disk.syncs == 0
        disk.resume()


def held_in(folder: Path, copy: Path) -> Contents:
    """Return the contents that a later server would restore if the present one were killed now."""
    shutil.copytree(folder, copy)
    journal = Journal(copy, compact_nbytes=1 << 30)
    journal.close()
    assert journal.contents is not None
    return journal.contents


@pytest.mark.parametrize("reason", ["interval", "compaction"])
async def test_changes_during_a_sync_are_written(tmp_path, disk, monkeypatch, reason, eventually: Eventually):
    data, config, fsync = tmp_path / "data", CONFIG, Fsync.INTERVAL
    if reason == "interval":
        monkeypatch.setattr("asyncdist.store.persistence.group_commit.INTERVAL", 0.01)
    else:
        config, fsync = CONFIG.with_(store_compact_nbytes=1000), Fsync.NEVER
    async with served(data, fsync, config) as (server, store):
        disk.stop()
        await store.set("first", b"v" * 1000)
        await eventually(lambda: disk.syncs)
        for number in range(10):
            assert await store.add("n", 1) == number + 1
            assert held_in(data, tmp_path / str(number)).values["n"] == b"%d" % (number + 1)
        disk.resume()
        if reason == "compaction":
            await eventually(lambda: server.durability.num_snapshots == 1)
            assert disk.syncs == 2  # the second covers the writes during the first
        await store.set("last", b"v")
    assert sorted(held_in(data, tmp_path / "end").values) == ["first", "last", "n"]


LARGE = CONFIG.with_(store_max_value_nbytes=4 << 20)


@pytest.fixture
def slow_commit(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Let the write of a long value set the first event, and wait for the second one."""
    begun, go = threading.Event(), threading.Event()
    commit = Journal.commit

    def slow(journal: Journal, *body: bytes, sync: bool) -> None:
        if sum(map(len, body)) > 1 << 20:
            begun.set()
            assert go.wait(LONG)
        commit(journal, *body, sync=sync)

    monkeypatch.setattr(Journal, "commit", slow)
    return begun, go


@pytest.mark.parametrize("fsync", [Fsync.INTERVAL, Fsync.NEVER])
async def test_long_value_is_written_in_a_thread(tmp_path, slow_commit, fsync, eventually: Eventually):
    begun, go = slow_commit
    async with served(tmp_path, fsync, LARGE) as (server, store):
        answers = [store.set("large", b"v" * (2 << 20))]
        await asyncio.to_thread(begun.wait, LONG)
        answers += [store.set("k", b"v"), store.get("large")]  # written after it, or shows it
        await eventually(lambda: server.state.keys.peek("k") == b"v")
        await eventually(lambda: any(each.waiting_nbytes for each in server.admission.connections))
        assert not any(answer.done() for answer in answers)
        go.set()
        assert await asyncio.gather(*answers) == [None, None, b"v" * (2 << 20)]
    async with served(tmp_path, fsync, LARGE) as (_, store):
        assert [len(value) for value in await store.multi_get(["large", "k"])] == [2 << 20, 1]


async def test_write_longer_than_the_interval_is_synced_after_it(
    tmp_path, disk, slow_commit, monkeypatch, eventually: Eventually
):
    monkeypatch.setattr("asyncdist.store.persistence.group_commit.INTERVAL", 0.01)
    (_, go), turns, in_turn = slow_commit, [], GroupCommit._sync_in_turn
    monkeypatch.setattr(GroupCommit, "_sync_in_turn", lambda durability: turns.append(True) or in_turn(durability))
    async with served(tmp_path, Fsync.INTERVAL, LARGE) as (_, store):
        setting = store.set("large", b"v" * (2 << 20))
        await eventually(lambda: len(turns) > 1)
        before = disk.syncs
        go.set()
        await setting
        await eventually(lambda: disk.syncs > before)


async def test_c10d_replies_keep_their_order_behind_a_slow_disk(tmp_path, disk, eventually: Eventually):
    sizes = {b"/k0": 200_000, b"/k1": 100_000, b"/k2": 10}
    async with served(tmp_path) as (server, store):
        for key, nbytes in sizes.items():
            await store.set(key.decode()[1:], b"v" * nbytes)
        with await asyncio.to_thread(Peer, server.port) as peer:
            (session,) = [each for each in server.admission.connections if isinstance(each, C10dSession)]
            disk.stop()
            peer.send(Code.SET, b"/x", b"v")
            for key in (b"/k0", b"/k1"):
                before = session.waiting_nbytes
                peer.send(Code.GET, key)
                await eventually(lambda before=before: session.waiting_nbytes > before)
            for _ in range(3):
                peer.send(Code.GET, b"/k2")
            await eventually(lambda: session.unfinished)  # too much is held to execute more
            disk.resume()
            values = [await asyncio.to_thread(peer.vector) for _ in range(5)]
    assert [len(value) for value in values] == [200_000, 100_000, 10, 10, 10]


async def test_replies_that_wait_for_the_disk_are_limited(tmp_path, disk, eventually: Eventually):
    async with served(tmp_path) as (server, store):
        await store.set("large", b"v" * (1 << 20))
        disk.stop()
        before = disk.syncs
        first = asyncio.ensure_future(store.set("k", b"v"))
        await eventually(lambda: disk.syncs > before)
        gets = [asyncio.ensure_future(store.get("large")) for _ in range(20)]
        (connection,) = server.admission.connections
        await eventually(lambda: connection.waiting_nbytes)
        assert await asyncio.wait_for(asyncio.sleep(0.05, "the loop turns"), LONG)
        assert connection.waiting_nbytes < 3 << 20  # one reply beyond the limit
        disk.resume()
        await first
        assert {len(value) for value in await asyncio.gather(*gets)} == {1 << 20}


async def test_reading_pauses_while_the_disk_cannot_keep_up(tmp_path, disk, monkeypatch, eventually: Eventually):
    monkeypatch.setattr("asyncdist.store.persistence.group_commit.PENDING_NBYTES", 1 << 20)
    monkeypatch.setattr("asyncdist.store.persistence.group_commit.CHECK_INTERVAL", 0.001)
    async with served(tmp_path) as (server, _):
        peer = await asyncio.to_thread(Peer, server.port)
        disk.stop()
        peer.send(Code.SET, b"k", b"v")
        await eventually(lambda: disk.syncs)

        def flood() -> bytes:
            for number in range(200):
                peer.send(Code.SET, b"%d" % number, b"v" * (1 << 18))  # a SET has no reply
            return peer.ask(Code.GET, b"199")

        flooding = asyncio.ensure_future(asyncio.to_thread(flood))
        await eventually(lambda: server.halted)
        assert not flooding.done()
        disk.resume()
        assert await flooding == b"v" * (1 << 18)
        peer.close()


@pytest.mark.parametrize("fsync", list(Fsync))
async def test_failed_write_ends_the_journal_and_acknowledges_nothing_more(tmp_path, monkeypatch, fsync):
    async with served(tmp_path, fsync) as (server, store):
        await store.set("k", b"acknowledged")

        def full(journal: Journal, *body: bytes, sync: bool) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(Journal, "commit", full)
            with pytest.raises(StoreConnectionError):
                await store.set("k", b"lost")
        with pytest.raises(JournalError, match=r"cannot be written .No space left on device.*acknowledged so far"):
            await server.durability.failure
    async with served(tmp_path) as (_, store):
        assert await store.get("k") == b"acknowledged"


async def test_client_that_connects_after_a_failed_write_gets_no_reply(tmp_path, monkeypatch, eventually: Eventually):
    async with served(tmp_path) as (server, store):
        with monkeypatch.context() as broken:
            broken.setattr(os, "fdatasync", _full)
            with pytest.raises(StoreConnectionError):
                await store.set("k", b"in doubt")
        late, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(encode(Code.VALIDATE, MAGIC) + encode(Code.GET, b"/k"))
        await eventually(lambda: any(each.waiting_nbytes for each in server.admission.connections))
        server.drop_all()
        with contextlib.suppress(ConnectionResetError):
            assert await late.read() == b""
        writer.close()


async def test_failed_sync_names_the_changes_that_may_be_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncdist.store.persistence.group_commit.INTERVAL", 0.01)
    async with served(tmp_path, Fsync.INTERVAL) as (server, store):
        with monkeypatch.context() as broken:
            broken.setattr(os, "fdatasync", _full)
            await store.set("k", b"acknowledged")
            with pytest.raises(JournalError, match="acknowledged since the last sync may be lost"):
                await server.durability.failure


def _full(fd: int) -> None:
    raise OSError(28, "No space left on device")


async def test_close_syncs_with_the_policy_interval(tmp_path, disk):
    async with served(tmp_path, Fsync.INTERVAL) as (_, store):
        await store.set("k", b"v")
        before = disk.syncs
    assert disk.syncs == before + 1


# -- compaction -------------------------------------------------------------------------------------


async def test_log_is_compacted_while_it_is_written(tmp_path, eventually: Eventually):
    config = CONFIG.with_(store_compact_nbytes=20_000)
    async with served(tmp_path, config=config) as (server, store):
        await store.queue_push("q", b"item")
        for number in range(20):
            await asyncio.gather(*(store.set(f"k{place}", b"%d" % number * 10) for place in range(100)))
        await eventually(lambda: (tmp_path / "lock").exists() and not (tmp_path / "log-1").exists())
        assert server.durability.journal.nbytes < 100_000
    async with served(tmp_path, config=config) as (_, store):
        keys = [f"k{place}" for place in range(100)]
        assert await store.multi_get(keys) == [b"19" * 10] * 100
        assert await store.queue_pop("q", block=False) == b"item"


async def test_one_snapshot_is_written_at_a_time(tmp_path, monkeypatch, eventually: Eventually):
    begun, go = threading.Event(), threading.Event()
    write_snapshot = Journal.write_snapshot

    def slow(journal: Journal, *what: object) -> None:
        assert not begun.is_set()
        begun.set()
        assert go.wait(LONG)
        write_snapshot(journal, *what)

    monkeypatch.setattr(Journal, "write_snapshot", slow)
    async with served(tmp_path, config=CONFIG.with_(store_compact_nbytes=1000)) as (server, store):
        for _ in range(20):
            await store.set("k", bytes(500))
        await eventually(begun.is_set)
        assert {path.name for path in tmp_path.glob("log-*")} == {"log-1", "log-2"}
        go.set()
        await eventually(lambda: server.durability.num_snapshots == 1)
        begun.clear()
        await store.set("k", bytes(500))
        await eventually(lambda: server.durability.num_snapshots == 2)


# -- draining ---------------------------------------------------------------------------------------


async def test_drain_sends_replies_that_wait_for_the_disk(tmp_path, disk, eventually: Eventually):
    async with served(tmp_path) as (server, store):
        disk.stop()
        answer = asyncio.ensure_future(store.add("n", 7))
        await eventually(lambda: disk.syncs)
        draining = asyncio.ensure_future(server.drain(LONG))
        await eventually(lambda: refuses(server.port))
        disk.resume()
        assert await answer == 7
        await draining
        assert server.num_connections == 0


async def test_drain_gives_up_on_a_client_that_does_not_read(tmp_path, eventually: Eventually):
    async with served(tmp_path) as (server, store):
        await store.set("large", b"v" * (1 << 20))
        with await asyncio.to_thread(Peer, server.port) as peer:
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # or the kernel may buffer all of it
            for _ in range(50):
                peer.send(Code.GET, b"/large")
            await eventually(lambda: any(each.paused for each in server.admission.connections))
            await server.drain(0.05)
            assert server.num_connections == 1


# -- clients that reconnect -------------------------------------------------------------------------

PATIENT = CONFIG.with_(store_reconnect=LONG, store_lease=LONG)


class Restartable:
    """A server on one port that can be restarted, and its clients."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clients: list[AsyncStore] = []
        self.server: StoreServer

    async def start(self, port: int = 0) -> None:
        self.server = await StoreServer.start(
            "127.0.0.1", port, token=TOKEN, config=PATIENT, data=self._folder, stays=True
        )

    async def restart(self) -> None:
        await self.server.close()
        await self.start(self.server.port)

    async def connect(self) -> AsyncStore:
        store = await AsyncStore.connect("127.0.0.1", self.server.port, token=TOKEN, timeout=LONG, config=PATIENT)
        self._clients.append(store)
        return store

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.server.close()

    def value(self, key: str) -> bytes | None:
        return self.server.state.keys.peek(key)


@pytest_asyncio.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Restartable]:
    daemon = Restartable(tmp_path)
    await daemon.start()
    yield daemon
    await daemon.close()


async def test_change_before_a_restart_is_not_repeated(daemon, disk, eventually: Eventually):
    store = await daemon.connect()
    assert await store.add("n", 1) == 1
    disk.stop()
    answer = asyncio.ensure_future(store.add("n", 1))
    await eventually(lambda: daemon.value("n") == b"2")
    daemon.server.drop_all()  # its reply is lost with the connection
    disk.resume()
    await daemon.restart()
    assert await answer == 2
    assert await store.add("n", 1) == 3


@pytest.mark.parametrize("restarted", [False, True])
async def test_change_whose_answer_was_dropped_is_not_repeated(
    daemon, disk, monkeypatch, eventually: Eventually, restarted
):
    """More replies are lost with the connection than the store keeps."""
    monkeypatch.setattr("asyncdist.store.state.sessions.KEPT_ANSWERS", 10)
    store = await daemon.connect()
    try:
        await store.num_keys()  # the client's session is on disk, too
        disk.stop()
        setting, adding = store.set("k", b"v"), [store.add("n", 1) for _ in range(30)]
        await eventually(lambda: daemon.value("n") == b"30")
        daemon.server.drop_all()
        disk.resume()
        if restarted:
            await daemon.restart()
        *forgotten, first = await asyncio.gather(*adding[:21], return_exceptions=True)
        assert {type(error) for error in forgotten} == {StoreConnectionError}
        assert "is unknown" in str(forgotten[0])
        assert [first, *await asyncio.gather(*adding[21:])] == list(range(21, 31))
        assert await store.add("n", 1) == 31
        await setting  # may be done twice
    finally:
        disk.resume()


async def test_late_change_is_not_taken_for_a_repeated_one(daemon, monkeypatch):
    monkeypatch.setattr("asyncdist.store.state.sessions.KEPT_ANSWERS", 2)
    store = await daemon.connect()
    pushing = store.queue_push("q", bytes(1 << 20))
    assert await asyncio.gather(*(store.add("n", 1) for _ in range(9))) == list(range(1, 10))
    await pushing


async def test_ephemeral_key_outlives_the_server_and_not_its_owner(daemon, eventually: Eventually):
    owner = await daemon.connect()
    await owner.set("mine", b"v", ephemeral=True)
    await owner.set("taken over", b"v", ephemeral=True)
    await owner.set("taken over", b"lasting")
    await daemon.restart()
    assert daemon.value("mine") == b"v"
    assert await owner.get("mine") == b"v"
    await owner.close()
    await eventually(lambda: daemon.value("mine") is None)
    assert daemon.value("taken over") == b"lasting"
    await daemon.restart()
    assert daemon.value("mine") is None
    assert daemon.value("taken over") == b"lasting"


async def test_closed_client_has_no_session_after_a_restart(daemon):
    stays, leaves = await daemon.connect(), await daemon.connect()
    for store in (stays, leaves):
        await store.set("k", b"v")
    await leaves.close()
    await stays.set("k", b"w")
    await daemon.restart()
    assert len(daemon.server.sessions) == 1
    assert await stays.get("k") == b"w"


async def test_snapshot_holds_client_sessions_and_their_keys(tmp_path, eventually: Eventually):
    config = PATIENT.with_(store_compact_nbytes=100)
    async with served(tmp_path / "data", config=config) as (_, store):
        await store.set("mine", b"v", ephemeral=True)
        assert await store.add("n", 5) == 5
        while (tmp_path / "data" / "log-1").exists():
            await store.set("k", b"v")
        contents = held_in(tmp_path / "data", tmp_path / "copy")
    assert list(contents.attached) == ["mine"]
    ((_, answers, _),) = contents.members.values()
    assert answers


async def test_lease_of_a_client_that_died_ends_after_a_restart(daemon, raw, eventually: Eventually):
    client = await raw(daemon.server, proven=True)
    await client.send(frame_of(1, Op.RESUME, bytes(IDENTITY_NBYTES), 50))  # the lease: 50 ms
    await client.send(frame_of(2, Op.SET_EPHEMERAL, "mine", b"v"))
    await eventually(lambda: daemon.value("mine") == b"v")
    await daemon.restart()
    assert daemon.value("mine") == b"v"
    await eventually(lambda: daemon.value("mine") is None)


async def test_contents_of_a_snapshot_are_those_of_its_moment_and_are_put_together_by_a_thread(tmp_path, monkeypatch):
    made_by = []
    gather = StoreState.gather

    def gathering(state):
        make = gather(state)
        state.keys.set("k", b"later")
        state.queues.push("q", b"later")

        def made():
            made_by.append(threading.current_thread())
            return make()

        return made

    state = StoreState()
    state.execute("c", 1, Op.SET, ("k", b"v"))
    for number in range(3):
        state.execute("c", number, Op.QUEUE_PUSH, ("q", b"%d" % number))
    state.execute("c", 9, Op.QUEUE_POP, ("q", False))
    contents = gathering(state)()
    assert contents.values == {"k": b"v"}
    assert contents.queues == {"q": {1: b"0", 2: b"1", 3: b"2"}}

    monkeypatch.setattr(StoreState, "gather", gathering)
    made_by.clear()
    config = Config(store_compact_nbytes=1 << 10)
    server = await StoreServer.start("127.0.0.1", 0, data=tmp_path, config=config)
    async with server, await AsyncStore.connect("127.0.0.1", server.port) as store:
        while not server.durability.num_snapshots:
            await store.set("filler", bytes(1 << 9))
    assert made_by
    assert threading.main_thread() not in made_by
