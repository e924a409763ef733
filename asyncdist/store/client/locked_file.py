"""A file that processes of several hosts read and append to under its lock.

A network file system guarantees less than a disk. `LockedFile` requires only this:

* **Locks.** ``flock`` on the whole file excludes the processes of all hosts. NFS does so (version 4 by itself, version 3
  with its lock service) unless it is mounted with ``nolock`` or ``local_lock``. POSIX locks (``fcntl``) are unsuitable: a
  process loses them when it closes any descriptor of the file. `LockedFile` polls for the lock, because a process cannot
  end a wait in the kernel.
* **Acquiring a lock makes the writes of other hosts visible**, and nothing else does: cached attributes and contents may
  be a minute old ("attribute caching", "close to open"). Therefore readers acquire the lock too.
* **fsync reports whether the data was stored.** On a network file system a write may fail when it is flushed, so a write
  is flushed before the lock is released.

It does not rely on atomic writes (each frame has a checksum, and the next writer cuts off a torn one), O_APPEND (writes
state their offset), rename, file times, or the reply to a removal. After another host has removed the file, its name may
belong to a new file: the name is looked up again under the lock, and the file is opened again if necessary.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from asyncdist.base import lifecycle
from asyncdist.base.backoff import Backoff
from asyncdist.base.callables import Callback
from asyncdist.base.deadline import Deadline
from asyncdist.base.descriptors import ClosingOnError, open_trusted
from asyncdist.errors import AddressError, AsyncdistError, StoreError

PATIENCE = 60.0
"""Seconds for which another process may hold the lock. A process needs it for a few milliseconds."""
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 5e-3
_OPENINGS = 20
"""How often a file may be removed just after it was opened."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_LOCKS_STAY_HERE = ("nolock", "local_lock=all", "local_lock=flock")
_ONE_HOST = frozenset("ext2 ext3 ext4 xfs btrfs zfs tmpfs ramfs overlay f2fs bcachefs vfat".split())
"""File systems of one host, where a write is visible at once. All others are treated as network file systems."""


class LockedFile:
    """A file at ``path``, created if it does not exist. The methods from `is_current` to `remove` need its lock.

    `open` it first. Raises AddressError if it cannot be opened or locked, and StoreError if a later call fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # the process may change its directory before it removes the file
        self._fd = -1
        kind, options = mount_of(path)
        self.on_a_network = kind not in _ONE_HOST  # other hosts see a write only after fsync
        self.locks_reach_other_hosts = options.isdisjoint(_LOCKS_STAY_HERE)

    def open(self, begin: Callback) -> None:
        """Open the file, and call ``begin`` while holding its lock."""
        path = self.path
        for _ in range(_OPENINGS):
            try:
                self._fd = open_trusted(path, os.O_RDWR | os.O_CREAT)
            except AddressError:
                raise
            except OSError as error:
                if error.errno == errno.ESTALE:  # the file or its directory was removed during the look-up
                    continue
                raise AddressError(
                    f"the file {path} cannot be opened ({error.strerror}): every rank must be able to"
                ) from None
            lifecycle.close_in_children(self)
            with ClosingOnError(self), self.locked():
                if self.is_current():
                    begin()
                    return
            self.close()
        raise AddressError(f"another process removes the file {path} whenever it is opened: name another file")

    def fileno(self) -> int:
        return self._fd

    @contextlib.contextmanager
    def locked(self, *, shared: bool = False, patience: float | None = None) -> Iterator[None]:
        """Hold the file's lock, alone or shared with other readers; wait for it for ``patience`` seconds (`PATIENCE`)."""
        try:
            self._lock(fcntl.LOCK_SH if shared else fcntl.LOCK_EX, PATIENCE if patience is None else patience)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        except AsyncdistError:
            raise
        except OSError as error:
            raise self._explained(error) from error

    def _lock(self, how: int, patience: float) -> None:
        for _ in Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, Deadline.after(patience)):
            with contextlib.suppress(BlockingIOError, InterruptedError):
                fcntl.flock(self._fd, how | fcntl.LOCK_NB)
                return
        raise StoreError(
            f"the lock of {self.path} has been held by another process for {patience:g} s, which is stopped or on a host "
            "that is down: find it (fuser, lslocks), or use another file"
        )

    def is_current(self) -> bool:
        try:
            mine, named = os.fstat(self._fd), os.stat(self.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno == errno.ESTALE:
                return False
            raise
        return mine.st_nlink > 0 and (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)

    def read_from(self, offset: int) -> bytes:
        """Return the bytes from ``offset`` to the end. Raises StoreError if the file is shorter than ``offset``."""
        size = os.fstat(self._fd).st_size
        if size < offset:
            raise StoreError(
                f"{self.path} has lost data ({offset} bytes were there, and {size} are): another process truncated it, or "
                "its server failed; use another file"
            )
        pieces = []
        while offset < size and (piece := os.pread(self._fd, size - offset, offset)):
            pieces.append(piece)
            offset += len(piece)
        return b"".join(pieces)

    def write_at(self, offset: int, data: bytes) -> None:
        """Write at ``offset``, and cut off the incomplete frame of a killed writer.

        After an error the file may hold none of the data, a part, or all of it.
        """
        if os.fstat(self._fd).st_size > offset:
            os.ftruncate(self._fd, offset)
        written = 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], offset + written)
        if self.on_a_network:
            os.fsync(self._fd)

    def remove(self) -> None:
        """Remove the file, unless another file has replaced it. A process that waits for the lock creates a new file."""
        with contextlib.suppress(FileNotFoundError):
            if self.is_current():
                os.unlink(self.path)

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def _explained(self, error: OSError) -> AsyncdistError:
        why = error.strerror or str(error)
        if error.errno == errno.ESTALE:
            return StoreError(f"another host removed {self.path} ({why}): the ranks of a job must not remove its file")
        if error.errno in _NO_LOCKS:
            return AddressError(
                f"the file {self.path} cannot be locked ({why}): name one in a file system that has locks (on NFS, start "
                "its lock service), or use a TCPStore"
            )
        return StoreError(f"{self.path} cannot be used ({why}): check the free space and the file system's server")


def mount_of(path: Path) -> tuple[str, frozenset[str]]:
    """Return the type and the mount options of the file system that holds ``path``; empty if unknown."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return "", frozenset()
    resolved, longest = path.resolve(), -1
    kind, options = "", ""
    for mount in mounts:
        before, _, after = mount.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if len(point) >= longest and resolved.is_relative_to(point):  # of mounts at one point, the last is visible
            longest = len(point)
            kind, _, options = after.split(maxsplit=2)
    return kind, frozenset(options.split(","))
