"""The journal after a power failure at any step, with any part of the unflushed writes: no acknowledged change is lost."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncdist.store.persistence import log_format
from asyncdist.store.persistence.journal import Journal
from asyncdist.store.protocol.operations import Op
from asyncdist.store.state.change_log import ChangeLog
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.model import Contents

Names = dict[str, "File"]


class File:
    """A file of the folder: ``flushed`` is what it holds for certain."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.flushed = b""

    def contents(self) -> list[bytes]:
        """Return what may be in it: what was flushed, all that was written, or its length and none of the bytes."""
        written = self.path.read_bytes() if self.path.exists() else b""
        return [self.flushed, written, self.flushed.ljust(len(written), b"\0")]


class Disk:
    """The possible contents of a journal's folder after a power failure.

    The content of a file is certain once the file has been flushed, and a name once the folder has. Any part of the other
    changes may be lost. ``moment`` is called before each system call that changes this.
    """

    def __init__(self, folder: Path, moment: Callable[[], None]) -> None:
        self.folder = folder
        self._moment = moment
        self._looking = False
        self.flushed_above: set[Path] = set()
        self._files: Names = {}
        self._kept: Names = {}
        self._steps: list[Callable[[Names], object]] = []  # with the names, since the folder was flushed

    def remains(self) -> Iterator[dict[str, bytes]]:
        """Yield all possible contents, by file name."""
        for done in itertools.product([False, True], repeat=len(self._steps)):
            names = dict(self._kept)
            for step in itertools.compress(self._steps, done):
                step(names)
            for which in range(3):
                yield {name: file.contents()[which] for name, file in names.items()}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for call in ("open", "writev", "pwrite", "fsync", "fdatasync", "rename", "unlink", "ftruncate"):
                patch.setattr(os, call, self._watched(getattr(os, call), getattr(self, "_" + call, lambda *_: None)))
            yield

    def _watched(self, real: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            if not self._looking:
                self._looking = True
                self._moment()
                self._looking = False
                note(*args)
            return real(*args, **settings)

        return call

    def _open(self, path: Path, flags: int, mode: int = 0) -> None:
        if flags & os.O_CREAT and path.name not in self._files:
            file = self._files[path.name] = File(path)
            self._steps.append(lambda names: names.update({path.name: file}))

    def _fsync(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path == self.folder:
            self._kept = dict(self._files)
            self._steps.clear()
        elif path.parent == self.folder:
            self._files[path.name].flushed = path.read_bytes()
        else:
            self.flushed_above.add(path)

    _fdatasync = _fsync

    def _rename(self, before: Path, after: Path) -> None:
        file = self._files[after.name] = self._files.pop(before.name)
        file.path = after

        def step(names: Names) -> None:
            if names.pop(before.name, None):
                names[after.name] = file

        self._steps.append(step)

    def _unlink(self, path: Path) -> None:
        self._files.pop(path.name, None)
        self._steps.append(lambda names: names.pop(path.name, None))


class Program:
    """Commits to a journal, compacts it and opens it again; at each moment it opens all possible remains of a failure."""

    def __init__(self, folder: Path, again: Path, *, sync: bool) -> None:
        self.disk = Disk(folder, self.moment)
        self._sync = sync
        self._again = again
        self._committed = self._flushed = (
            0  # the last number that was committed, and the last that is certainly on disk
        )
        self._lineage = ""
        self._seen: set[tuple[tuple[str, bytes], ...]] = set()
        self.num_failures = 0

    def begin(self) -> None:
        self._journal = Journal(self.disk.folder, compact_nbytes=1 << 30)
        self._lineage = self._journal.lineage
        contents = self._journal.contents or Contents()
        assert self._number(contents) == self._committed
        self._log = ChangeLog()
        self._state = StoreState(log=self._log)
        self._state.restore(contents)
        self._log.start(lambda: None)

    def commit(self) -> None:
        self._state.execute("c", 1, Op.SET, ("number", b"%d" % (self._committed + 1)))
        self._journal.commit(*self._log.take(), sync=self._sync)
        self._committed += 1
        if self._sync:
            self._flushed = self._committed

    def compact(self) -> None:
        number = self._journal.rotate()
        self._flushed = self._committed
        contents = self._state.gather()()
        self.commit()
        self._journal.write_snapshot(number, contents, lambda: True)

    def end(self, torn: bytes = b"") -> None:
        self._journal.close()
        if torn:
            with max(self.disk.folder.glob("log-*")).open("ab") as file:
                file.write(torn)

    def moment(self) -> None:
        """Open what may remain if the power fails now: everything that was flushed, and any part of the rest."""
        for remains in list(self.disk.remains()):
            key = tuple(sorted(remains.items()))
            if key in self._seen:
                continue
            self._seen.add(key)
            self.num_failures += 1
            folder = self._again / str(self.num_failures)
            folder.mkdir()
            for name, content in remains.items():
                (folder / name).write_bytes(content)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "fsync", lambda fd: None)
                journal = Journal(folder, compact_nbytes=1 << 30)
            assert self._flushed <= self._number(journal.contents) <= self._committed + 1
            assert journal.lineage == self._lineage or not self._lineage
            journal.close()

    @staticmethod
    def _number(contents: Contents | None) -> int:
        assert contents is not None
        return int(contents.values.get("number", b"0"))


@pytest.mark.parametrize("sync", [True, False])
def test_acknowledged_changes_survive_a_power_failure(tmp_path, sync):
    (tmp_path / "again").mkdir()
    program = Program(tmp_path / "new" / "data", tmp_path / "again", sync=sync)
    with program.disk.watched():
        for torn in (b"", bytes(10), log_format.frame_head(bytes(8), 0, b"body")):
            program.begin()
            program.commit()
            program.compact()
            program.commit()
            program.end(torn)
        program.begin()
        program.end()
        program.moment()
    assert program.num_failures > 50
    assert program.disk.flushed_above == {tmp_path, tmp_path / "new"}
