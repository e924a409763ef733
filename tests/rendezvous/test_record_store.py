import asyncio
import json
import os
import stat
import threading

import pytest

from asyncdist.config import Config
from asyncdist.errors import AddressError, RendezvousError
from asyncdist.rendezvous.record_store import AddressRecord, BlockingStoreRecords, DaemonRecords, RecordFile
from asyncdist.status.discovery import find_worlds, meeting_point
from asyncdist.store import AsyncStore, FileStore, StoreServer, TCPStore
from tests.support.rendezvous_stores import BLOCKING_STORES

ONE = AddressRecord("10.0.0.1", 4000, "secret", "aa", 2)
TWO = AddressRecord("10.0.0.2", 4001, None, "bb", 2)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\xff garbage",
        b"[]",
        b"3",
        b'{"asyncdist": 2}',
        b'{"asyncdist": 1, "host": "a"}',
        ONE.encode().replace(b"4000", b'"x"'),
        ONE.encode().replace(b'"secret"', b"7"),
        json.dumps({**json.loads(ONE.encode()), "more": 1}).encode(),
    ],
)
def test_invalid_record_decodes_to_none(data):
    assert AddressRecord.decode(data) is None


@pytest.fixture(params=[*BLOCKING_STORES, "RecordFile"])
async def records(request, tmp_path):
    make = BLOCKING_STORES.get(request.param, lambda path: RecordFile(path, ""))
    store = make(str(tmp_path / "store"))
    records = BlockingStoreRecords(store, "key", request.param)
    yield records
    await records.close()
    if hasattr(store, "close"):
        store.close()


async def test_compare_and_set_semantics(records):
    one, two = ONE.encode(), TWO.encode()
    assert await records.read() == b""
    assert await records.swap(two, one) == two, "an absent value is not replaced if one is expected"
    assert await records.read() == b""
    assert await records.swap(b"", one) == one
    assert await records.read() == one
    assert await records.swap(b"", two) == one, "another value is kept and returned"
    assert await records.swap(two, one) == one
    assert await records.swap(one, two) == two
    await records.withdraw(one)
    assert await records.read() == two, "another record is kept"
    await records.withdraw(two)
    assert await records.read() == b""
    assert await records.swap(b"", one) == one


async def test_blocked_store_does_not_block_the_loop():
    loop, entered, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    class Slow:
        def check(self, keys):
            loop.call_soon_threadsafe(entered.set)
            return release.wait(5)

        def get(self, key):
            return b"value"

    records = BlockingStoreRecords(Slow(), "key", "slow")
    reading = asyncio.ensure_future(records.read())
    await entered.wait()
    release.set()
    assert await reading == b"value"
    await records.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncdist-rendezvous")]


async def test_store_that_has_ended_raises_a_connection_error(in_thread):
    server = await StoreServer.start("127.0.0.1", 0)
    records = None
    try:
        client = await in_thread(TCPStore, "127.0.0.1", server.port)
        records = BlockingStoreRecords(client, "key", "store=TCPStore")
        assert await records.read() == b""
    finally:
        await server.close()
    with pytest.raises(ConnectionError):
        await records.read()
    await records.close()
    client.close()


async def test_errors_of_other_stores_become_rendezvous_errors():
    class Broken:
        def check(self, keys):
            raise RuntimeError("Connection reset by peer\nException raised from …")

    records = BlockingStoreRecords(Broken(), "key", "torchrun's store at node0:1")
    with pytest.raises(RendezvousError, match="cannot use torchrun's store at node0:1: Connection reset by peer; "):
        await records.read()
    await records.close()


async def test_record_of_a_daemon_is_deleted_by_close_unless_a_later_rank_0_has_replaced_it(eventually):
    one, two = ONE.encode(), TWO.encode()
    async with await StoreServer.start("127.0.0.1", 0) as server:
        clients = [await AsyncStore.connect("127.0.0.1", server.port) for _ in range(2)]
        first, second = (DaemonRecords(client, "key", "a daemon") for client in clients)
        assert await first.swap(b"", one) == one
        await first.withdraw(one)
        assert await second.swap(await second.read(), two) == two
        await first.close()
        await eventually(lambda: server.num_connections == 1)
        assert await second.read() == two
        await second.close()
        await eventually(lambda: len(server.state.keys) == 0)


async def test_record_is_published_again_in_the_store_that_follows_a_lost_one(caplog):
    server = await StoreServer.start("127.0.0.1", 0)
    records = DaemonRecords(await AsyncStore.connect("127.0.0.1", server.port), "key", "a daemon")
    assert await records.swap(b"", ONE.encode()) == ONE.encode()
    assert await records.swap(ONE.encode(), TWO.encode()) == TWO.encode()
    for _ in range(2):
        await server.close()
        server = await StoreServer.start("127.0.0.1", server.port)
        async with await AsyncStore.connect("127.0.0.1", server.port) as reader:
            assert await reader.get("key") == TWO.encode()
    assert "a daemon: published the record of this world again" in caplog.text
    await records.close()
    assert len(server.state.keys) == 0
    await server.close()


async def test_record_of_a_later_rank_0_in_the_new_store_stays(eventually):
    server = await StoreServer.start("127.0.0.1", 0)
    records = DaemonRecords(await AsyncStore.connect("127.0.0.1", server.port), "key", "a daemon")
    assert await records.swap(b"", ONE.encode()) == ONE.encode()
    await server.close()
    server = await StoreServer.start("127.0.0.1", server.port)
    # Before the records connect again, which takes several turns of the loop.
    server.state.keys.set("key", TWO.encode())
    await eventually(lambda: server.state.num_open == 1)  # it watches the record there
    assert await records.read() == TWO.encode()
    await records.close()
    await server.close()


@pytest.mark.parametrize(
    ("path", "name", "file"),
    [("", "", "asyncdist.json"), ("", "a/b", "asyncdist-a%2Fb.json"), ("meet", "", "meet"), ("meet", "b", "meet.b"),
     ("made by tempfile", "", "made by tempfile")],
)  # fmt: skip
def test_each_world_has_a_file_that_its_owner_alone_can_read(tmp_path, path, name, file):
    (tmp_path / "made by tempfile").touch()
    record = RecordFile(str(tmp_path / path), name)
    assert record.path == tmp_path / file
    assert not record.check([""])
    for old, new in ((b"", ONE), (ONE.encode(), TWO)):
        assert record.compare_set("", old, new.encode()) == record.get("") == new.encode()
        assert stat.S_IMODE(record.path.stat().st_mode) == 0o600


def test_foreign_file_is_not_overwritten(tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("four years of work")
    with pytest.raises(AddressError, match=r"thesis\.txt does not hold a record of asyncdist"):
        RecordFile(str(path), "").compare_set("", b"", ONE.encode())
    assert path.read_text() == "four years of work"


def as_link(path):
    path.rename(path.with_name("target"))
    path.symlink_to(path.with_name("target"))


as_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a file away")
FOREIGN = {
    "is a symbolic link": as_link,
    "every user may write": lambda path: path.chmod(0o666),
    "another user .65534. owns": lambda path: os.chown(path, 65534, 65534),
}


@pytest.mark.parametrize("why", [*list(FOREIGN)[:2], pytest.param(list(FOREIGN)[2], marks=as_root)])
async def test_file_that_another_user_may_have_written_is_refused(tmp_path, why):
    path = tmp_path / "meet"
    path.write_bytes(TWO.encode())
    FileStore(tmp_path / "store").close()
    for each in (path, tmp_path / "store"):
        FOREIGN[why](each)
    with pytest.raises(AddressError, match=why):
        RecordFile(str(path), "").check([""])
    with pytest.raises(AddressError, match=why):
        FileStore(tmp_path / "store")
    with pytest.raises(AddressError, match=why):
        await find_worlds(meeting_point(f"file://{path}"), Config(), 1.0)


@pytest.mark.parametrize(
    ("path", "says"),
    [("/absent/meet", "the folder of file:///absent/meet does not exist"),
     ("/dev/null", "file:///dev/null is neither a file nor a folder")],
)  # fmt: skip
def test_path_that_can_be_no_file_is_refused(path, says):
    with pytest.raises(AddressError, match=says):
        RecordFile(path, "").check([""])


def test_concurrent_compare_and_set_has_one_winner(tmp_path):
    outcomes, start = [], threading.Barrier(8)

    def write(number):
        mine = AddressRecord("10.0.0.1", number, None, "aa", 2).encode()
        record = RecordFile(str(tmp_path / "meet"), "")
        start.wait()
        outcomes.append((record.compare_set("", b"", mine), mine))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = RecordFile(str(tmp_path / "meet"), "").get("")
    assert [answer == mine for answer, mine in outcomes].count(True) == 1
    assert all(answer == held for answer, _ in outcomes)
    assert [path.name for path in tmp_path.iterdir()] == ["meet"], "no draft is left"
