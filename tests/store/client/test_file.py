"""FileStore between processes, some of which die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from asyncdist.errors import AddressError, ProtocolError, QueueEmptyError, StoreTimeoutError, UsageError
from asyncdist.store import FileStore
from asyncdist.store.client.file import FileClient
from asyncdist.store.persistence.log_format import MAGIC, frame_head, read_header

UNIT, LONG = 0.05, 20.0

WORKER = """
import sys
from asyncdist.store import FileStore
rank, path = int(sys.argv[1]), sys.argv[2]
with FileStore(path, 2) as store:
    store.set_timeout(20)
    store.set(f"hello/{rank}", f"from {rank}")
    assert store.get(f"hello/{1 - rank}") == f"from {1 - rank}".encode()
    for _ in range(300):
        store.add("sum", 1)
        store.append("text", str(rank))
    store.barrier("all", 2)
    assert store.add("sum", 0) == 600
    assert sorted(store.get("text")) == sorted(b"01" * 300)
    if rank:
        for number in range(50):
            store.queue_push("queue", str(number))
    else:
        assert [int(store.queue_pop("queue")) for _ in range(50)] == list(range(50))
    store.barrier("end", 2)
"""


@pytest.mark.processes
def test_two_processes(tmp_path):
    path = tmp_path / "store"
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(rank), str(path)]) for rank in range(2)]
    assert [worker.wait(LONG) for worker in workers] == [0, 0]
    assert not path.exists()  # the last one out removed it


DYING = """
import sys, threading, time
from asyncdist.store import FileStore
store = FileStore(sys.argv[1])
store.queue_push("queue", "item")
store._desk.confirm = lambda number: None
assert store.queue_pop("queue") == b"item"
threading.Thread(target=store.barrier, args=("b", 2), daemon=True).start()
while not store._desk.state._barriers:
    time.sleep(0.001)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.processes
def test_a_process_that_is_killed_is_not_counted_and_its_item_comes_back(tmp_path):
    path = tmp_path / "store"
    with subprocess.Popen([sys.executable, "-c", DYING, str(path)], stdout=subprocess.PIPE) as dying:
        assert dying.stdout.readline() == b"ready\n"
        with FileStore(path) as store:
            with pytest.raises(QueueEmptyError):
                store.queue_pop("queue", block=False)
            dying.kill()
            # Not reaped by us yet, it is a zombie: that is dead too.
            assert store.queue_pop("queue", timeout=LONG) == b"item"
            with pytest.raises(StoreTimeoutError):
                store.barrier("b", 2, timeout=UNIT)
    assert dying.returncode == -signal.SIGKILL


def test_what_a_dead_writer_left_is_cut_off(tmp_path):
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("k", "v")
        whole = path.stat().st_size
        body = b"a frame of which half has come " * 80
        half = (frame_head(read_header(path.read_bytes())[0], 1, body) + body)[:1000]
        with path.open("ab") as file:
            file.write(half)
        assert store.get("k") == b"v"
        store.set("l", "w")
        with FileStore(path) as other:
            assert other.multi_get(["k", "l"]) == [b"v", b"w"]
            assert other.num_keys() == 2
    assert path.stat().st_size < whole + 1000


def test_a_header_cut_short_is_written_again(tmp_path):
    path = tmp_path / "store"
    path.write_bytes(b"asyncdist st")
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "v")
        assert other.get("k") == b"v"


NOT_OURS = [b"%PDF-1.7 or whatever", b"asyncdist store log 1\n" + bytes(40), MAGIC + bytes(40)]


@pytest.mark.parametrize("content", NOT_OURS)
def test_a_file_of_something_else(tmp_path, content):
    path = tmp_path / "store"
    path.write_bytes(content)
    with pytest.raises(ProtocolError, match="no file of a store"):
        FileStore(path)
    assert path.read_bytes() == content


def test_a_damaged_byte_is_refused_with_its_place(tmp_path):
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("k", "v")
        before = path.stat().st_size
        store.set("damaged", "value")
        store.set("k", "w")
    content = bytearray(path.read_bytes())
    content[before + 40] ^= 1
    path.write_bytes(content)
    with pytest.raises(ProtocolError, match=f"at offset {before}: the checksum"):
        FileStore(path)


def test_removed_doubled_or_swapped_frame_is_refused_with_its_place(tmp_path):
    path, ends = tmp_path / "store", []
    with FileStore(path) as store:
        for value in ("u", "v", "w"):
            ends.append(path.stat().st_size)
            store.set("k", value)
    content = path.read_bytes()
    ends.append(len(content))
    one, two, three = (content[begin:end] for begin, end in pairwise(ends))
    for harmed, offset in (
        ([one, three], ends[1]),
        ([two, three], ends[0]),
        ([one, two, two, three], ends[2]),
        ([one, two, three, three], ends[3]),
        ([one, three, two], ends[1]),
    ):
        path.write_bytes(content[: ends[0]] + b"".join(harmed))
        with pytest.raises(ProtocolError, match=rf"at offset {offset}: frame \d stands where frame \d belongs"):
            FileStore(path)


def test_a_file_that_cannot_be_opened(tmp_path):
    with pytest.raises(AddressError, match="cannot be opened"):
        FileStore(tmp_path / "no such folder" / "store")


def test_one_who_comes_later_sees_it_all(tmp_path):
    path = tmp_path / "store"
    with FileStore(path) as first:
        first.set("k", "v")
        first.queue_push("q", "item")
    with FileStore(path) as second:
        assert second.get("k") == b"v"
        assert second.queue_len("q") == 1
    assert path.exists()


def test_the_last_of_a_known_number_removes_the_file(tmp_path):
    path = tmp_path / "store"
    first = FileStore(str(path), 2)
    assert first.path == str(path)
    first.close()
    assert path.exists()  # the second is still to come
    FileStore(path, 2).close()
    assert not path.exists()


def test_it_is_removed_also_from_another_folder(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with FileStore("store", 1):
        monkeypatch.chdir(tmp_path / "there")
        (tmp_path / "there" / "store").write_text("somebody else's")
    assert not (tmp_path / "here" / "store").exists()
    assert (tmp_path / "there" / "store").read_text() == "somebody else's"


def test_what_stands_in_its_place_is_not_removed(tmp_path):
    path = tmp_path / "store"
    with FileStore(path, 1):
        path.unlink()
        path.write_text("somebody else's")
    assert path.read_text() == "somebody else's"


def test_stores_of_one_process_and_their_threads(tmp_path):
    stores = [FileStore(tmp_path / "store") for _ in range(4)]
    with ThreadPoolExecutor(16) as threads:
        standing = [threads.submit(store.barrier, "b", 16, LONG) for store in stores for _ in range(4)]
        for future in standing:
            future.result(LONG)
        taking = [threads.submit(store.queue_pop, "q", True, LONG) for store in stores for _ in range(2)]
        for number in range(8):
            stores[number % 4].queue_push("q", str(number))
        assert sorted(int(future.result(LONG)) for future in taking) == list(range(8))
    assert len({repr(sorted(store.list_keys())) for store in stores}) == 1
    for store in stores:
        store.close()


def test_publish_reaches_other_members(tmp_path):
    with FileStore(tmp_path / "store") as here, FileStore(tmp_path / "store") as there:
        with there.subscribe("news") as messages:
            assert here.publish("news", "1") == 1
            assert messages.get(LONG) == b"1"
        assert here.publish("news", "2") == 0


def test_those_who_wait_hear_soon(tmp_path):
    with FileStore(tmp_path / "store") as here, FileStore(tmp_path / "store") as there:
        threading.Timer(UNIT, there.set, ("k", "v")).start()
        assert here.get("k", timeout=LONG) == b"v"


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    with FileStore(tmp_path / "store") as store:
        store.set("k", "v")
        pwrite = os.pwrite

        def full(fd: int, data: bytes, offset: int) -> int:
            if len(data) < 10:
                raise OSError(28, "No space left on device")
            return pwrite(fd, data[: len(data) - 5], offset)

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(RuntimeError, match="No space left"):
            store.set("k", "a new value")
        monkeypatch.undo()
        assert store.get("k") == b"v"
        store.set("k", "w")
        with FileStore(tmp_path / "store") as other:
            assert other.get("k") == b"w"


def _use_after_fork(store: FileStore) -> None:
    try:
        store.set("k", "child")
    except UsageError:
        store.close()
        os._exit(17)
    os._exit(1)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_store_is_not_used_by_a_forked_child(tmp_path):
    with FileStore(tmp_path / "store") as store:
        store.set("k", "v")
        child = multiprocessing.get_context("fork").Process(target=_use_after_fork, args=(store,))
        child.start()
        child.join(LONG)
        assert child.exitcode == 17
        assert store.get("k") == b"v"


def test_a_desk_that_fails_to_open_closes_its_file(tmp_path):
    path = tmp_path / "store"
    path.write_bytes(b"something else")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(ProtocolError):
            FileClient(path)
    assert len(os.listdir("/proc/self/fd")) == before
