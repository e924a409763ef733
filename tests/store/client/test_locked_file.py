"""FileStore on a simulated network file system: stale caches, writes that fail when flushed, locks that fail."""

import errno
import fcntl
import os
import threading
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncdist.errors import AddressError, StoreError
from asyncdist.store import FileStore
from asyncdist.store.client import locked_file
from asyncdist.store.client.locked_file import LockedFile

LONG, UNIT = 60.0, 0.05


class Network:
    """Replaces ``os`` and ``fcntl``: an open file caches its attributes until the next lock, and writes until a flush.

    ``fail`` makes the next calls of a function raise these errors.
    """

    def __init__(self) -> None:
        self.attributes: dict[int, os.stat_result] = {}
        self.kept: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self.errors: defaultdict[str, list[int]] = defaultdict(list)
        self.calls: list[str] = []

    def fail(self, call: str, *numbers: int) -> None:
        self.errors[call] += numbers

    def __getattr__(self, name):
        real = getattr(fcntl if name == "flock" or name.startswith("LOCK_") else os, name)
        if not callable(real):
            return real

        def call(*args):
            self.calls.append(name)
            if self.errors[name]:
                number = self.errors[name].pop(0)
                if name == "fsync":
                    self.kept.pop(args[0], None)
                raise OSError(number, os.strerror(number))
            return getattr(self, f"on_{name}", real)(*args)

        return call

    def on_fstat(self, fd: int) -> os.stat_result:
        return self.attributes.setdefault(fd, os.fstat(fd))

    def on_flock(self, fd: int, how: int) -> None:
        if how == fcntl.LOCK_UN:
            self.on_fsync(fd)
        fcntl.flock(fd, how)
        self.attributes.pop(fd, None)

    def on_pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self.kept[fd].append((offset, data))
        return len(data)

    def on_fsync(self, fd: int) -> None:
        for offset, data in self.kept.pop(fd, []):
            os.pwrite(fd, data, offset)

    def on_close(self, fd: int) -> None:
        self.attributes.pop(fd, None)
        os.close(fd)


@pytest.fixture
def network(monkeypatch) -> Network:
    network = Network()
    monkeypatch.setattr(locked_file, "os", network)
    monkeypatch.setattr(locked_file, "fcntl", network)
    monkeypatch.setattr(locked_file, "mount_of", lambda path: ("nfs4", frozenset({"rw", "local_lock=none"})))
    return network


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "store"


# -- visibility ------------------------------------------------------------------------------------


def test_changes_are_visible_to_other_stores_at_once(network, path):
    with FileStore(path) as here, FileStore(path) as there:
        for number in range(5):
            assert there.check([f"k{number}"]) is False
            here.set(f"k{number}", "v")
            assert there.check([f"k{number}"]) is True
        assert [store.add("n", 1) for store in (here, there, here)] == [1, 2, 3]


def test_write_is_flushed_before_the_lock_is_released(network, path):
    with FileStore(path) as here:
        before = path.stat().st_size
        network.calls.clear()
        here.set("k", "v")
        assert path.stat().st_size > before
        done = network.calls
        assert done.index("pwrite") < done.index("fsync") < len(done) - 1 - done[::-1].index("flock")


def test_local_file_systems_need_no_flush(path, monkeypatch):
    def fsync(fd):
        raise AssertionError("flushed")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(locked_file, "mount_of", lambda path: ("ext4", frozenset()))
    with FileStore(path) as store:
        store.set("k", "v")


@pytest.mark.parametrize(
    ("call", "number", "message"),
    [
        ("flock", errno.EIO, "cannot be used"),
        ("fstat", errno.ESTALE, "another host removed"),
        *(("fsync", number, "cannot be used") for number in (errno.EIO, errno.ENOSPC, errno.EDQUOT)),
    ],
)
def test_failed_call_raises_and_the_operation_is_not_executed(network, path, call, number, message):
    with FileStore(path) as here, FileStore(path) as there:
        here.set("k", "v")
        network.fail(call, number)
        with pytest.raises(StoreError, match=message) as caught:
            here.set("k", "lost")
        assert os.strerror(number) in str(caught.value)
        assert there.get("k") == here.get("k") == b"v"
        here.set("k", "w")
        assert there.get("k") == b"w"


def test_write_whose_reply_is_lost_is_executed_once(network, path):
    with FileStore(path) as here, FileStore(path) as there:
        flush = network.on_fsync

        def flush_and_fail(fd):
            flush(fd)
            network.on_fsync = flush
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

        network.on_fsync = flush_and_fail
        with pytest.raises(StoreError, match="cannot be used"):
            here.add("n", 1)
        assert there.add("n", 1) == here.add("n", 0) == 2


# -- locks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_system_without_locks_is_refused(network, path, number):
    network.fail("flock", number)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AddressError, match=r"cannot be locked .* use a TCPStore"):
        FileStore(path)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_interrupted_lock_is_requested_again(network, path):
    with FileStore(path) as store:
        network.fail("flock", errno.EINTR, errno.EAGAIN, errno.EINTR)
        store.set("k", "v")
        assert not network.errors["flock"]


@pytest.fixture
def other(path) -> Iterator[LockedFile]:
    file = LockedFile(path)
    file.open(lambda: None)
    yield file
    file.close()


def test_store_waits_for_a_lock_of_another_process(path, other):
    with FileStore(path) as store:
        waiting = threading.Thread(target=store.set, args=("k", "v"))
        with other.locked():
            waiting.start()
            waiting.join(UNIT)  # time enough to get past a lock that does not hold
            assert waiting.is_alive()
        waiting.join(LONG)
        assert store.get("k") == b"v"


def test_lock_that_is_never_released_raises_store_error(path, other, monkeypatch):
    with FileStore(path) as store:
        monkeypatch.setattr(locked_file, "PATIENCE", UNIT)
        with other.locked(), pytest.raises(StoreError, match="held by another process"):
            store.set("k", "v")


@pytest.mark.parametrize(
    ("options", "works"),
    [("rw,nolock", False), ("rw,local_lock=all", False), ("local_lock=flock", False), ("local_lock=posix", True)],
)
def test_second_host_is_refused_where_locks_do_not_reach_it(path, monkeypatch, options, works):
    monkeypatch.setattr(locked_file, "mount_of", lambda path: ("nfs", frozenset(options.split(","))))
    with FileStore(path) as first, FileStore(path) as second:
        first.set("k", "v")
        assert second.get("k") == b"v"
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    if works:
        with FileStore(path) as third:
            assert third.get("k") == b"v"
    else:
        with pytest.raises(StoreError, match="without nolock"):
            FileStore(path)


# -- removed files -----------------------------------------------------------------------------------


def test_stale_handle_while_opening_is_retried(network, path):
    network.fail("open", errno.ESTALE, errno.ESTALE)
    network.fail("stat", errno.ESTALE)
    with FileStore(path) as store:
        store.set("k", "v")


def test_file_removed_between_open_and_lock_is_created_again(network, path):
    flock = network.on_flock

    def remove_and_lock(fd, how):
        network.on_flock = flock
        path.unlink()
        flock(fd, how)

    network.on_flock = remove_and_lock
    with FileStore(path) as early, FileStore(path) as late:
        early.set("k", "v")
        assert late.get("k") == b"v"


def test_file_that_is_always_removed_raises_address_error(network, path):
    network.fail("stat", *[errno.ESTALE] * 100)
    with pytest.raises(AddressError, match="another process removes"):
        FileStore(path)


def test_removal_whose_reply_is_lost_succeeds(network, path):
    def unlink(named):
        os.unlink(named)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")  # the reply to the second attempt

    network.on_unlink = unlink
    FileStore(path, 1).close()
    assert not path.exists()


def test_store_opened_while_the_file_is_removed_begins_a_new_file(path, monkeypatch):
    remove, arrived = LockedFile.remove, []

    def arrive_and_remove(file):
        thread = threading.Thread(target=lambda: arrived.append(FileStore(path)))
        thread.start()
        thread.join(UNIT)  # time enough to open it, if it could
        assert not arrived
        remove(file)
        arrived.append(thread)

    first = FileStore(path, 1)
    monkeypatch.setattr(LockedFile, "remove", arrive_and_remove)
    first.close()
    monkeypatch.undo()
    arrived.pop(0).join(LONG)
    (store,) = arrived
    with store, FileStore(path) as other:
        other.set("k", "v")
        assert store.get("k") == b"v"


# -- damaged files -----------------------------------------------------------------------------------


def test_truncated_file_raises_store_error(path):
    with FileStore(path) as store:
        store.set("k", "v")
        held = path.read_bytes()
        os.truncate(path, len(held) - 5)
        with pytest.raises(StoreError, match="has lost data"):
            store.get("k")
        path.write_bytes(held)


# -- mounts ------------------------------------------------------------------------------------------

MOUNTS = """\
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:40 / /home rw - nfs4 server:/home rw,vers=4.2,local_lock=none
24 23 0:41 / /home/a\\040b rw - nfs server:/ab rw,vers=3,nolock,local_lock=all
25 22 0:42 / /home/later rw - tmpfs tmpfs rw
26 25 0:43 / /home/later rw - nfs server:/x rw
"""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("/tmp/x", "ext4"),
        ("/home/x", "nfs4"),
        ("/home/a b/x", "nfs"),
        ("/home/a bc/x", "nfs4"),
        ("/home/later/x", "nfs"),
    ],
)
def test_mount_that_holds_a_path_is_found(monkeypatch, name, kind):
    mounts = types.SimpleNamespace(read_text=lambda **how: MOUNTS)
    monkeypatch.setattr(locked_file, "Path", lambda name: mounts)
    path = Path(name)
    monkeypatch.setattr(Path, "resolve", lambda path: path)
    found, options = locked_file.mount_of(path)
    assert found == kind
    assert ("nolock" in options) is (name == "/home/a b/x")


def test_unknown_mount_counts_as_a_network_file_system(monkeypatch, other):
    monkeypatch.setattr(locked_file, "mount_of", lambda path: ("", frozenset()))
    file = LockedFile(other.path)
    assert file.on_a_network
    assert file.locks_reach_other_hosts
