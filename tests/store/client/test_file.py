"""FileStore between processes, some of which are killed."""

import fcntl
import multiprocessing
import os
import subprocess
import sys

import pytest

from asyncdist.errors import AddressError, ProtocolError, UnsupportedError, UsageError
from asyncdist.store import FileStore, PrefixStore
from asyncdist.store.client import file as file_module
from asyncdist.store.persistence.log_format import MAGIC, frame_head, read_header

LONG = 60.0

WORKER = """
import sys
from asyncdist.store import FileStore
rank, path = int(sys.argv[1]), sys.argv[2]
with FileStore(path, 2) as store:
    store.set_timeout(20)
    store.set(f"hello/{rank}", f"from {rank}")
    assert store.get(f"hello/{1 - rank}") == f"from {1 - rank}".encode()
    for _ in range(100):
        store.add("sum", 1)
        store.append("text", str(rank))
    store.set(f"ready/{rank}", "")
    store.wait(["ready/0", "ready/1"])
    assert store.add("sum", 0) == 200
    assert sorted(store.get("text")) == sorted(b"01" * 100)
"""


@pytest.mark.processes
def test_last_of_two_processes_removes_the_file(tmp_path):
    path = tmp_path / "store"
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(rank), str(path)]) for rank in range(2)]
    assert [worker.wait(LONG) for worker in workers] == [0, 0]
    assert not path.exists()


def unfinished(whole: bytes, kind: str) -> bytes:
    """Return what a writer that died while it appended may leave behind two frames."""
    body = b"part of a frame " * 1000
    frame = frame_head(read_header(whole)[0], 3, body) + body
    return {"half": frame[:1000], "hole": frame[:4096] + bytes(4096) + frame[8192:], "zeros": bytes(5000)}[kind]


@pytest.mark.parametrize("kind", ["half", "hole", "zeros"])
def test_unfinished_frame_of_a_killed_writer_is_cut_off(tmp_path, kind):
    path = tmp_path / "store"
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "v")
        whole = path.read_bytes()
        path.write_bytes(whole + unfinished(whole, kind))
        assert store.get("k") == b"v"
        store.set("l", "w")
        assert other.multi_get(["k", "l"]) == [b"v", b"w"]
        assert path.stat().st_size < len(whole) + 1000


def test_partial_header_is_written_again(tmp_path):
    path = tmp_path / "store"
    path.write_bytes(b"asyncdist st")
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "v")
        assert other.get("k") == b"v"


OTHER_FILES = [b"%PDF-1.7 or whatever", b"asyncdist store log 1\n" + bytes(40), MAGIC + bytes(40)]


@pytest.mark.parametrize("content", OTHER_FILES)
def test_file_that_is_not_a_store_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "store"
    path.write_bytes(content)
    with pytest.raises(ProtocolError, match="is not the file of a store"):
        FileStore(path)
    assert path.read_bytes() == content


def test_frame_that_was_removed_repeated_or_damaged_is_refused_with_its_offset(tmp_path):
    path, ends = tmp_path / "store", []
    with FileStore(path) as store:
        for value in ("u", "v"):
            ends.append(path.stat().st_size)
            store.set("k", value)
    content = path.read_bytes()
    before, one, rest = content[: ends[0]], content[ends[0] : ends[1]], content[ends[1] :]
    damaged = one[:-1] + bytes([one[-1] ^ 1])
    misplaced = r"frame \d stands where frame \d belongs"
    for harmed, offset, why in (
        (rest, ends[0], misplaced),
        (one + one + rest, ends[1], misplaced),
        (damaged + rest, ends[0], "the checksum"),
    ):
        path.write_bytes(before + harmed)
        with pytest.raises(ProtocolError, match=f"at offset {offset}: {why}"):
            FileStore(path)


def test_missing_folder_raises_address_error(tmp_path):
    with pytest.raises(AddressError, match="cannot be opened"):
        FileStore(tmp_path / "no such folder" / "store")


def test_store_opened_later_has_the_values_of_an_earlier_one(tmp_path):
    path = tmp_path / "store"
    with FileStore(path) as first:
        first.set("k", "v")
        first.append("k", "w")
        assert first.delete_key("never") is False
    with FileStore(path) as second:
        assert second.get("k") == b"vw"
        assert second.list_keys() == ["k"]
    assert path.exists()


def test_last_of_world_size_stores_removes_the_file(tmp_path):
    path = tmp_path / "store"
    first = FileStore(str(path), 2)
    assert first.path == str(path)
    first.close()
    assert path.exists()  # the second is still to come
    FileStore(path, 2).close()
    assert not path.exists()


def test_file_of_a_relative_path_is_removed_after_chdir(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with FileStore("store", 1):
        monkeypatch.chdir(tmp_path / "there")
        (tmp_path / "there" / "store").write_text("another program's")
    assert not (tmp_path / "here" / "store").exists()
    assert (tmp_path / "there" / "store").read_text() == "another program's"


def test_file_that_replaced_the_stores_file_is_kept(tmp_path):
    path = tmp_path / "store"
    with FileStore(path, 1):
        path.unlink()
        path.write_text("another program's")
    assert path.read_text() == "another program's"


UNSUPPORTED = {
    "queue_push": lambda store: store.queue_push("q", "item"),
    "queue_pop": lambda store: store.queue_pop("q", block=False),
    "queue_len": lambda store: store.queue_len("q"),
    "barrier": lambda store: store.barrier("b", 1),
    "publish": lambda store: store.publish("c", "message"),
    "subscribe": lambda store: store.subscribe("c"),
    "watch": lambda store: store.watch("k"),
    "set_ephemeral": lambda store: store.set("k", "v", ephemeral=True),
}


@pytest.mark.parametrize("operation", UNSUPPORTED)
def test_operations_that_torchs_file_store_lacks_name_the_store_to_use(tmp_path, operation):
    with FileStore(tmp_path / "store") as store:
        for each in (store, PrefixStore("part", store)):
            with pytest.raises(UnsupportedError, match=rf"^store {operation}: .* use a TCPStore"):
                UNSUPPORTED[operation](each)
        assert store.num_keys() == 0


def test_full_disk_fails_the_operation_and_leaves_the_state(tmp_path, monkeypatch):
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
def test_store_refuses_operations_in_a_forked_child(tmp_path):
    with FileStore(tmp_path / "store") as store:
        store.set("k", "v")
        child = multiprocessing.get_context("fork").Process(target=_use_after_fork, args=(store,))
        child.start()
        child.join(LONG)
        assert child.exitcode == 17
        assert store.get("k") == b"v"


def test_store_that_fails_to_open_closes_its_file(tmp_path):
    path = tmp_path / "store"
    path.write_bytes(b"something else")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(ProtocolError):
            FileStore(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_dropped_store_does_not_wait_long_for_a_lock_that_another_process_holds(tmp_path, caplog, monkeypatch):
    """The collector may drop it on any thread."""
    monkeypatch.setattr(file_module, "_DROP_PATIENCE", 0.0)
    store = FileStore(tmp_path / "store", 1)
    with open(tmp_path / "store") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        del store
    assert "stays counted as open" in caplog.text
    assert (tmp_path / "store").exists()


@pytest.mark.processes
def test_stores_that_are_open_at_the_exit_are_closed_then(tmp_path):
    program = "import sys; from asyncdist.store import FileStore; kept = [FileStore(sys.argv[1], 2) for _ in range(2)]"
    subprocess.run([sys.executable, "-c", program, tmp_path / "store"], check=True)
    assert not (tmp_path / "store").exists()
