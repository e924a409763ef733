"""FileStore over file systems that promise little: a network's, whose caches are old, whose servers fail and forget."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import types
from collections import defaultdict
from pathlib import Path

import pytest

from asyncdist.errors import AddressError, StoreError
from asyncdist.store import FileStore
from asyncdist.store.client import file as files
from asyncdist.store.client import locked_file
from asyncdist.store.client.locked_file import SharedFile
from asyncdist.store.persistence.log_format import frame_head, read_header

LONG, UNIT = 20.0, 0.05


class Network:
    """Stands for ``os`` and ``fcntl``: each open file has attributes of its own, as old as its last lock, and keeps what is
    written to itself until it is flushed. ``fail`` has a call raise errors, one after the other.
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
            return getattr(self, f"_{name}", real)(*args)

        return call

    def _fstat(self, fd: int) -> os.stat_result:
        return self.attributes.setdefault(fd, os.fstat(fd))

    def _flock(self, fd: int, how: int) -> None:
        if how == fcntl.LOCK_UN:
            self._fsync(fd)
        fcntl.flock(fd, how)
        self.attributes.pop(fd, None)

    def _pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self.kept[fd].append((offset, data))
        return len(data)

    def _fsync(self, fd: int) -> None:
        for offset, data in self.kept.pop(fd, []):
            os.pwrite(fd, data, offset)

    def _close(self, fd: int) -> None:
        self.attributes.pop(fd, None)
        os.close(fd)


@pytest.fixture
def network(monkeypatch) -> Network:
    network = Network()
    monkeypatch.setattr(locked_file, "os", network)
    monkeypatch.setattr(locked_file, "fcntl", network)
    monkeypatch.setattr(locked_file, "_mount", lambda path: ("nfs4", frozenset({"rw", "local_lock=none"})))
    return network


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "store"


# -- what others see, and when ---------------------------------------------------------------------


def test_what_one_has_done_all_see_at_once(network, path):
    with FileStore(path) as here, FileStore(path) as there:
        for number in range(5):
            assert there.check([f"k{number}"]) is False
            here.set(f"k{number}", "v")
            assert there.check([f"k{number}"]) is True
        assert [store.add("n", 1) for store in (here, there, here)] == [1, 2, 3]


def test_what_is_acknowledged_has_been_flushed(network, path):
    with FileStore(path) as here:
        before = path.stat().st_size
        network.calls.clear()
        here.set("k", "v")
        assert path.stat().st_size > before
        done = network.calls
        assert done.index("pwrite") < done.index("fsync") < len(done) - 1 - done[::-1].index("flock")


def test_on_a_disk_nothing_waits_for_it(path, monkeypatch):
    def fsync(fd):
        raise AssertionError("flushed")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(locked_file, "_mount", lambda path: ("ext4", frozenset()))
    with FileStore(path) as store:
        store.set("k", "v")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_write_that_is_lost_when_it_is_flushed(network, path, number):
    with FileStore(path) as here, FileStore(path) as there:
        here.set("k", "v")
        network.fail("fsync", number)
        with pytest.raises(StoreError, match="cannot be used") as caught:
            here.set("k", "lost")
        assert os.strerror(number) in str(caught.value)
        assert there.get("k") == here.get("k") == b"v"
        here.set("k", "w")
        assert there.get("k") == b"w"


def test_a_write_whose_reply_is_lost_was_done_once(network, path):
    """It is in the file, and the writer was told of an error."""
    with FileStore(path) as here, FileStore(path) as there:
        flush = network._fsync

        def flush_and_fail(fd):
            flush(fd)
            network._fsync = flush
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

        network._fsync = flush_and_fail
        with pytest.raises(StoreError, match="cannot be used"):
            here.add("n", 1)
        assert there.add("n", 1) == here.add("n", 0) == 2


# -- locks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_refused(network, path, number):
    network.fail("flock", number)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AddressError, match=r"cannot be locked .* TCPStore"):
        FileStore(path)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_lock_that_fails_later(network, path):
    with FileStore(path) as store:
        network.fail("flock", errno.EIO)
        with pytest.raises(StoreError, match="cannot be used"):
            store.set("k", "v")
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_an_interrupted_lock_is_asked_for_again(network, path):
    with FileStore(path) as store:
        network.fail("flock", errno.EINTR, errno.EAGAIN, errno.EINTR)
        store.set("k", "v")
        assert not network.errors["flock"]


def test_a_lock_that_another_holds_for_a_while(path):
    with FileStore(path) as store:
        other = SharedFile(path)
        waiting = threading.Thread(target=store.set, args=("k", "v"))
        with other.locked():
            waiting.start()
            waiting.join(UNIT)  # time enough to get past a lock that does not hold
            assert waiting.is_alive()
        waiting.join(LONG)
        other.close()
        assert store.get("k") == b"v"


def test_a_lock_that_nobody_lets_go_of(path, monkeypatch):
    with FileStore(path) as store:
        monkeypatch.setattr(locked_file, "PATIENCE", UNIT)
        other = SharedFile(path)
        with other.locked(), pytest.raises(StoreError, match="held by another process"):
            store.set("k", "v")
        other.close()


@pytest.mark.parametrize(
    ("options", "works"),
    [("rw,nolock", False), ("rw,local_lock=all", False), ("local_lock=flock", False), ("local_lock=posix", True)],
)
def test_locks_that_other_hosts_do_not_heed(path, monkeypatch, options, works):
    """On one host they do."""
    monkeypatch.setattr(locked_file, "_mount", lambda path: ("nfs", frozenset(options.split(","))))
    with FileStore(path) as first, FileStore(path) as second:
        first.set("k", "v")
        assert second.get("k") == b"v"
    monkeypatch.setattr(files, "_host_name", lambda: "elsewhere pid:[1]")
    if works:
        with FileStore(path) as third:
            assert third.get("k") == b"v"
    else:
        with pytest.raises(StoreError, match="without nolock"):
            FileStore(path)


# -- names that stand for something else -----------------------------------------------------------


def test_a_stale_handle_while_it_is_opened(network, path):
    network.fail("open", errno.ESTALE, errno.ESTALE)
    network.fail("stat", errno.ESTALE)
    with FileStore(path) as store:
        store.set("k", "v")


def test_a_stale_handle_later(network, path):
    with FileStore(path) as store:
        network.fail("fstat", errno.ESTALE)
        with pytest.raises(StoreError, match="removed by another host"):
            store.set("k", "v")


def test_one_that_is_removed_after_it_was_opened_and_before_it_was_locked(network, path):
    """The last of an earlier run does so. Who came a moment too early begins a new file."""
    flock = network._flock

    def remove_and_lock(fd, how):
        network._flock = flock
        path.unlink()
        flock(fd, how)

    network._flock = remove_and_lock
    with FileStore(path) as early, FileStore(path) as late:
        early.set("k", "v")
        assert late.get("k") == b"v"


def test_one_that_is_always_removed(network, path):
    network.fail("stat", *[errno.ESTALE] * 100)
    with pytest.raises(AddressError, match="removed by others"):
        FileStore(path)


def test_a_removal_whose_reply_was_lost(network, path):
    def unlink(named):
        os.unlink(named)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")  # to the removal that was sent again

    network._unlink = unlink
    FileStore(path, 1).close()
    assert not path.exists()


def test_nobody_comes_in_while_the_last_one_leaves(path, monkeypatch):
    """Whoever opens the file before it is removed waits for the lock, and then begins a new one."""
    remove, arrived = SharedFile.remove, []

    def arrive_and_remove(file):
        thread = threading.Thread(target=lambda: arrived.append(FileStore(path)))
        thread.start()
        thread.join(UNIT)  # time enough to come in, if it could
        assert not arrived
        remove(file)
        arrived.append(thread)

    first = FileStore(path, 1)
    monkeypatch.setattr(SharedFile, "remove", arrive_and_remove)
    first.close()
    monkeypatch.undo()
    arrived.pop(0).join(LONG)
    (store,) = arrived
    with store, FileStore(path) as other:
        other.set("k", "v")
        assert store.get("k") == b"v"


# -- what is torn or lost --------------------------------------------------------------------------


def test_a_last_frame_with_a_hole_is_cut_off(path):
    """Its writer's host died when some of its pages had come."""
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "v")
        body = b"some of a frame" * 1000
        frame = bytearray(frame_head(read_header(path.read_bytes())[0], 1, body) + body)
        frame[4096:8192] = bytes(4096)
        with path.open("ab") as file:
            file.write(frame)
        assert store.get("k") == b"v"
        store.set("l", "w")
        assert other.multi_get(["k", "l"]) == [b"v", b"w"]
    assert path.stat().st_size < len(body)


def test_a_head_with_a_hole_is_cut_off(path):
    with FileStore(path) as store:
        store.set("k", "v")
        with path.open("ab") as file:
            file.write(bytes(5000))
        store.set("l", "w")
        with FileStore(path) as other:
            assert other.num_keys() == 2


def test_a_file_that_lost_what_it_held(path):
    with FileStore(path) as store:
        store.set("k", "v")
        held = path.read_bytes()
        os.truncate(path, len(held) - 5)
        with pytest.raises(StoreError, match="has lost what had been written"):
            store.get("k")
        path.write_bytes(held)


# -- where it lies ---------------------------------------------------------------------------------

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
def test_which_file_system_holds_a_file(monkeypatch, name, kind):
    mounts = types.SimpleNamespace(read_text=lambda **how: MOUNTS)
    monkeypatch.setattr(locked_file, "Path", lambda name: mounts)
    path = Path(name)
    monkeypatch.setattr(Path, "resolve", lambda path: path)
    found, options = locked_file._mount(path)
    assert found == kind
    assert ("nolock" in options) is (name == "/home/a b/x")


def test_where_mounts_are_not_known_a_network_is_assumed(monkeypatch, path):
    monkeypatch.setattr(locked_file, "_mount", lambda path: ("", frozenset()))
    file = SharedFile(path)
    assert file.on_a_network
    assert file.locks_reach_other_hosts
    file.close()


def test_hosts_are_told_apart_by_name_and_not_by_name_space():
    assert files._host_name().split()[0] == files._host_name().split()[0] != ""
