"""A store's data on disk: log segments, periodic snapshots, and recovery from both.

    DIR/lock             held by the daemon that uses the folder; contains the id of the data set
    DIR/snapshot-3       the contents of the store when log-3 was begun
    DIR/log-3, log-4 …   the changes since then; the last segment is appended to

Compaction begins a new segment, writes its snapshot under a temporary name, renames the snapshot once it is complete and
on disk, and then removes the older files. At each moment the newest snapshot and the segments from its number on are
complete. The numbers of the frames continue from one segment to the next. A torn frame at the end of the last segment was
never acknowledged: the journal cuts it off with a warning. It creates a last segment without a complete header again,
with a warning. It refuses any other damage.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
from pathlib import Path
from typing import BinaryIO

from asyncdist.base import lifecycle
from asyncdist.base.callables import Predicate
from asyncdist.base.descriptors import ClosingOnError
from asyncdist.errors import JournalError, ProtocolError
from asyncdist.store.persistence import log_format
from asyncdist.store.state.change_log import replay, snapshot
from asyncdist.store.state.model import Contents

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(log|snapshot)-(\d+)")
_LINEAGE = re.compile("[0-9a-f]{16}")
_UNFINISHED = ".unfinished"
_MAX_PIECES = 1024
"""The pieces that one writev takes (IOV_MAX)."""


class Journal:
    """The data of one store in a folder, open for appending. `contents` is the data at the time of opening.

    All methods may be called from any thread, one at a time, with two exceptions: `write_snapshot` may run in parallel
    with the others, and `commit` in parallel with `sync`, which may not cover that commit.
    """

    def __init__(self, folder: Path, *, compact_nbytes: int) -> None:
        """Open ``folder``; create it if necessary. Raises JournalError if it is in use, damaged or no store's folder."""
        self.folder = folder
        self.contents: Contents | None = None
        self._compact_nbytes = compact_nbytes
        self._next_frame = 0
        self._nbytes = 0  # of all segments since the last snapshot
        self._snapshot_nbytes = 0
        self._fd = self._lock = -1
        lifecycle.close_in_children(self)
        try:
            _create(folder)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _cannot("open", folder, error) from error
        with ClosingOnError(self):
            _lock(self._lock, folder)
            try:
                self.lineage = self._read_or_create_lineage()
                self._recover()
            except OSError as error:
                raise _cannot("read", folder, error) from error

    def fileno(self) -> int:
        return self._lock

    def close(self) -> None:
        """Release the folder. The kernel writes what was committed without ``sync``."""
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    # -- writing: after an OSError, nothing more may be written --------------------------------------

    def commit(self, *body: bytes, sync: bool) -> None:
        """Append a frame, whose body may be in pieces; with ``sync``, it is on disk when this returns."""
        self._nbytes += _write(self._fd, log_format.frame_head(self._salt, self._next_frame, *body), *body)
        self._next_frame += 1
        if sync:
            self.sync()

    def sync(self) -> None:
        os.fdatasync(self._fd)

    @property
    def nbytes(self) -> int:
        return self._nbytes + self._snapshot_nbytes

    @property
    def wants_compaction(self) -> bool:
        """Whether the log is long enough for a snapshot: at least as long as the last one."""
        return self._nbytes > max(self._compact_nbytes, self._snapshot_nbytes)

    def rotate(self) -> int:
        """Begin a new segment, with everything before on disk; return its number, for `write_snapshot`."""
        self.sync()
        before = self._fd
        self._begin(self._number + 1)
        os.close(before)
        self._nbytes = 0
        return self._number

    def write_snapshot(self, number: int, contents: Contents, pause: Predicate) -> None:
        """Write the contents of the store when segment ``number`` was begun, then remove the older files.

        ``pause`` is called after each frame, to let other threads run; if it returns False, the snapshot is aborted.
        """
        path = self.folder / f"snapshot-{number}"
        unfinished = path.with_name(path.name + _UNFINISHED)
        try:
            nbytes = _write_snapshot(unfinished, contents, pause)
            if nbytes == 0:
                return
            os.rename(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        _sync_folder(self.folder)
        self._snapshot_nbytes = nbytes
        self._remove_before(number)

    def _begin(self, number: int) -> None:
        self._number = number
        self._salt = secrets.token_bytes(log_format.SALT_NBYTES)
        path = self.folder / f"log-{number}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        _write(self._fd, log_format.header(self._salt, self._next_frame))
        os.fsync(self._fd)
        _sync_folder(self.folder)

    def _remove_before(self, number: int) -> None:
        for kind in ("log", "snapshot"):
            for each in self._numbers(kind):
                if each < number:
                    (self.folder / f"{kind}-{each}").unlink(missing_ok=True)
        _sync_folder(self.folder)

    def _read_or_create_lineage(self) -> str:
        """Return the id of this data set; successive servers share it."""
        lineage = os.pread(self._lock, 64, 0).decode("ascii", "replace")
        if not _LINEAGE.fullmatch(lineage):
            lineage = secrets.token_hex(8)
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, lineage.encode(), 0)
            os.fsync(self._lock)
        return lineage

    # -- reading ----------------------------------------------------------------------------------------

    def _recover(self) -> None:
        for path in self.folder.glob("*" + _UNFINISHED):
            path.unlink()
        contents = self.contents = Contents()
        snapshots, segments = self._numbers("snapshot"), self._numbers("log")
        first = 1
        if snapshots:
            first = snapshots[-1]
            self._read_snapshot(self.folder / f"snapshot-{first}", contents)
        if not snapshots and not segments:
            self._begin(first)
            return
        last = max([first, *segments])
        before: _Reader | None = None
        for number in range(first, last + 1):
            before = self._read_segment(number, contents, before, last=number == last)
        self._remove_before(first)

    def _numbers(self, kind: str) -> list[int]:
        """Return the numbers of all files of one kind, in order."""
        found = map(_NAME.fullmatch, os.listdir(self.folder))
        return sorted(int(each[2]) for each in found if each and each[1] == kind)

    def _read_snapshot(self, path: Path, contents: Contents) -> None:
        with path.open("rb") as file:
            reader = _Reader(path, file)
            self._snapshot_nbytes = reader.size
            try:
                ended = reader.replay(contents)
            except log_format.DamagedError as error:
                raise _damaged(path, error) from None
            if not ended or reader.end != reader.size:
                raise _damaged(path, log_format.DamagedError(reader.end, "the snapshot's end is not there"))

    def _read_segment(self, number: int, contents: Contents, before: _Reader | None, *, last: bool) -> _Reader | None:
        """Replay a segment that follows ``before``; return its reader, or None if the segment was created again."""
        path = self.folder / f"log-{number}"
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise _damaged(path, log_format.DamagedError(0, "the file is missing")) from None
        with file:
            if last and _lacks_header(file):
                logger.warning(
                    "store: create %s again: it has %d bytes and no complete header, because the store ended while it "
                    "created the file, or because the file was truncated and its contents are lost",
                    path, os.fstat(file.fileno()).st_size,
                )  # fmt: skip
                self._begin(number)
                return None
            reader = _Reader(path, file)
            if before is not None and reader.number != before.number:
                why = f"frame {before.number} belongs here, and {path.name} begins with frame {reader.number}"
                raise _damaged(before.path, log_format.DamagedError(before.end, why))
            try:
                reader.replay(contents)
                if reader.end < reader.size and not last:
                    raise log_format.DamagedError(reader.end, "its end is missing, and later segments are there")
            except log_format.DamagedError as error:
                if not last or isinstance(error, log_format.MisplacedError) or reader.has_frame_after(reader.end):
                    raise _damaged(path, error) from None
        self._nbytes += reader.end
        self._next_frame = reader.number
        if last:
            self._salt = reader.salt
            self._number = number
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            if reader.end < reader.size:
                logger.warning(
                    "store: cut %d bytes off %s at offset %d: the last frame is incomplete and was never acknowledged",
                    reader.size - reader.end, path, reader.end,
                )  # fmt: skip
                os.ftruncate(self._fd, reader.end)  # the next flush covers this
        return reader


class _Reader:
    """One file of frames, read from its beginning. ``end`` is the offset after the last frame that was replayed.

    ``number`` is that of the next frame.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.end = 0
        try:
            self.salt, self.number = log_format.read_header(file.read(log_format.HEADER_NBYTES))
        except log_format.DamagedError as error:
            raise _damaged(path, error) from None
        self.end = log_format.HEADER_NBYTES

    def replay(self, contents: Contents) -> bool:
        """Replay all complete frames; return whether the last one ends a snapshot.

        Raises:
            DamagedError: The checksum or the number of a frame is wrong.
        """
        ended = False
        while True:
            body = log_format.read_frame(self._file, self.size - self.end, self.end, self.salt, self.number)
            if body is None:
                return ended
            try:
                ended = replay(body, contents)
            except ProtocolError as error:  # another version wrote it
                why = f"its checksum is right: {error}"
                raise _damaged(self.path, log_format.DamagedError(self.end, why)) from None
            self.end += log_format.FRAME_NBYTES + len(body)
            self.number += 1

    def has_frame_after(self, offset: int) -> bool:
        self._file.seek(0)
        return log_format.has_frame_after(self._file.read(), offset, self.salt)


def _lacks_header(file: BinaryIO) -> bool:
    """Return whether a segment has no complete header. Reads ``file`` from its start."""
    if os.fstat(file.fileno()).st_size > log_format.HEADER_NBYTES:
        return False
    try:
        log_format.read_header(file.read())
    except log_format.DamagedError:
        return True
    file.seek(0)
    return False


def _create(folder: Path) -> None:
    """Create a folder and its missing parents, and flush their names to disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in missing:
        _sync_folder(each.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_snapshot(path: Path, contents: Contents, pause: Predicate) -> int:
    """Write a snapshot to disk and return its length; 0 if it was aborted."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        salt = secrets.token_bytes(log_format.SALT_NBYTES)
        nbytes = _write(fd, log_format.header(salt))
        for number, body in enumerate(snapshot(contents)):
            nbytes += _write(fd, log_format.frame_head(salt, number, *body), *body)
            if not pause():
                return 0
        os.fsync(fd)
        return nbytes
    finally:
        os.close(fd)


def _lock(fd: int, folder: Path) -> None:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    raise JournalError(f"another store uses {folder}: stop it first, or give this one a folder of its own")


def _write(fd: int, *pieces: bytes) -> int:
    views = [memoryview(piece) for piece in pieces]
    nbytes = sum(map(len, views))
    while views:
        written = os.writev(fd, views[:_MAX_PIECES])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views and written:
            views[0] = views[0][written:]
    return nbytes


def _damaged(path: Path, error: log_format.DamagedError) -> JournalError:
    return JournalError(
        f"{path} is damaged at offset {error.offset} ({error.why}), and the store does not start on less than it has "
        "acknowledged: restore the folder from a copy, or begin with an empty one"
    )


def _cannot(action: str, folder: Path, error: OSError) -> JournalError:
    return JournalError(
        f"cannot {action} the store's data in {folder} ({error.strerror or error}): check the folder's owner, its mode "
        "and the free space"
    )
