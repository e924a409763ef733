"""A file that processes of several hosts read and append to under its lock; what is relied upon of the file system.

Network file systems, NFS above all, promise less than a disk. What is needed here is only this:

* **Locks.** ``flock`` on the whole file excludes processes of all hosts that have it open. NFS does so (version 4 itself,
  version 3 with its lock service), unless mounted with ``nolock`` or ``local_lock``, which is refused as soon as a second
  host turns up. ``flock`` rather than ``fcntl``'s locks, which a process loses when it closes any descriptor of the file.
  A file system without locks is refused. Locks are asked for again and again, since one that waits inside the kernel
  cannot be given up; who gets none for `PATIENCE` seconds says so.
* **Taking a lock makes what others wrote visible**, and nothing else does: sizes and contents that were seen before may be
  old by a minute ("attribute caching", "close to open"). So even a look takes the lock, and no size seen without it counts.
* **fsync tells whether bytes have arrived.** On a network file system a write is a promise that may be broken when it is
  flushed; so there it is flushed before the lock is let go and before anybody is told that it was done.

And this is not: that a write is atomic (each frame has its checksum, and one that is torn, or has a hole since its pages
came in another order, is cut off by the next writer if it is the last); O_APPEND (writes name their place, and only the
lock's holder writes); rename (nothing is ever replaced); mtimes or that clocks agree (no time of any file is read); that a
removal whose reply was lost, and which was sent again, succeeds (that nothing is there is what was wanted); that a name
still stands for the file that was opened by it: after the lock was got, the file is looked up again, and opened anew if
another host has removed it meanwhile (NFS says ESTALE, or keeps it under another name).
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
from asyncdist.base.deadline import Deadline
from asyncdist.errors import AddressError, AsyncdistError, StoreError

PATIENCE = 60.0
"""Seconds that a lock may be held by others: who holds it does a few milliseconds' work."""
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 5e-3
_OPENINGS = 20
"""How often a file may be found removed just after it was opened."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_LOCKS_STAY_HERE = ("nolock", "local_lock=all", "local_lock=flock")
_ONE_HOST = frozenset("ext2 ext3 ext4 xfs btrfs zfs tmpfs ramfs overlay f2fs bcachefs vfat".split())
"""File systems of one host, which sees at once what its processes write. Elsewhere we do what a network needs."""


class SharedFile:
    """A file at ``path``, made if there is none. Every method but `locked` wants its lock held.

    Raises AddressError where it cannot be opened or locked, StoreError where later something fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = path.absolute()  # the process may go to another folder before it comes to remove it
        self._kind, options = _mount(path)
        self.locks_reach_other_hosts = options.isdisjoint(_LOCKS_STAY_HERE)
        for _ in range(_OPENINGS):
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno == errno.ESTALE:  # of a folder, or of a file that was removed while we looked it up
                    continue
                raise AddressError(
                    f"the file {path} cannot be opened ({error.strerror}): every rank must be able to"
                ) from None
            lifecycle.close_in_children(self)
            try:
                with self.locked():
                    current = self.is_current()
            except BaseException:
                self.close()
                raise
            if current:
                return
            self.close()
        raise AddressError(f"the file {path} is removed by others whenever it is opened: name another")

    def fileno(self) -> int:
        """Return the descriptor, or -1 once the file is closed."""
        return self._fd

    @property
    def on_a_network(self) -> bool:
        """Whether other hosts see a write only after fsync."""
        return self._kind not in _ONE_HOST

    @contextlib.contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Hold the file's lock, shared with others who only read or alone."""
        try:
            self._lock(fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        except AsyncdistError:
            raise
        except OSError as error:
            raise self._explained(error) from error

    def _lock(self, how: int) -> None:
        for _ in Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, Deadline.after(PATIENCE)):
            with contextlib.suppress(BlockingIOError, InterruptedError):
                fcntl.flock(self._fd, how | fcntl.LOCK_NB)
                return
        raise StoreError(
            f"the lock of {self.path} has been held by another process for {PATIENCE:g} s: one that is stopped, or "
            "of a host that is gone; find it (fuser, lslocks), or begin anew with another file"
        )

    def is_current(self) -> bool:
        """Say whether the file is still what its name stands for."""
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
        """Return all that stands from ``offset`` on. Raises StoreError if the file is shorter than that."""
        size = os.fstat(self._fd).st_size
        if size < offset:
            raise StoreError(
                f"{self.path} has lost what had been written ({offset} bytes were there, and {size} are): "
                "another process truncated "
                "it, or its server failed; begin anew with another file"
            )
        pieces = []
        while offset < size and (piece := os.pread(self._fd, size - offset, offset)):
            pieces.append(piece)
            offset += len(piece)
        return b"".join(pieces)

    def write_at(self, offset: int, data: bytes) -> None:
        """Write at ``offset``, which becomes the end; whatever follows it is what a dead writer left.

        After an error the data may be there, in part or as a whole: whoever locks the file next sees.
        """
        if os.fstat(self._fd).st_size > offset:
            os.ftruncate(self._fd, offset)
        written = 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], offset + written)
        if self.on_a_network:
            os.fsync(self._fd)

    def remove(self) -> None:
        """Remove it, for good: who opened it before and comes to lock it makes another one.

        A file that has replaced it is kept.
        """
        with contextlib.suppress(FileNotFoundError):
            if self.is_current():
                os.unlink(self.path)

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def _explained(self, error: OSError) -> AsyncdistError:
        why = error.strerror or str(error)
        if error.errno == errno.ESTALE:
            return StoreError(f"{self.path} was removed by another host ({why}): ranks of one job must not do so")
        if error.errno in _NO_LOCKS:
            return AddressError(
                f"the file {self.path} cannot be locked ({why}): name one in a file system that has locks (on NFS, see "
                "that its lock service runs), or meet at a TCPStore"
            )
        return StoreError(f"{self.path} cannot be used ({why}): see to room there, and to the file system's server")


def _mount(path: Path) -> tuple[str, frozenset[str]]:
    """Return of which kind the file system is that holds ``path``, and how it is mounted; "" where that is not known."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return "", frozenset()
    resolved, longest = path.resolve(), -1
    kind, options = "", ""
    for mount in mounts:
        before, _, after = mount.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if len(point) >= longest and resolved.is_relative_to(point):  # of equal ones, the last is on top
            longest = len(point)
            kind, _, options = after.split(maxsplit=2)
    return kind, frozenset(options.split(","))
