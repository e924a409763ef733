"""The flight recorder: the last operations of one rank, cheap enough to be always on.

When a group fails, `Recorder.dump` writes them into ``ASYNCDIST_DUMP_DIR``, as JSON or in torch's format
(``ASYNCDIST_DUMP_FORMAT``); a signal requests a dump too (see `dump_signal`). `desync_report` reads the JSON files of all
ranks and reports which rank is stuck where.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asyncdist.base.error_text import describe_error
from asyncdist.base.lifecycle import WeakRegistry
from asyncdist.base.ops import is_message
from asyncdist.kernel import c10d_private
from asyncdist.kernel.torch_private import enter_span, exit_span, is_profiler_enabled
from asyncdist.kernel.tracing import stacks, torch_format
from asyncdist.kernel.tracing.trace_record import parse
from asyncdist.kernel.transport.wire_format import Fingerprint, call_in_words

log = logging.getLogger("asyncdist")

RATE_WINDOW = 10.0
"""The seconds over which rates are computed, or less if the recorder keeps fewer."""


class Entry:
    """One operation: its call, and its times on `time.perf_counter`; ``finished`` is 0.0 while it is pending.

    ``peer`` is the group rank of the other side of a message; None for a receive from any rank, and for a collective.
    ``span`` is its span in torch's profiler, which records operations that the profiled thread starts. The span of a
    background operation ends on another thread: the profiler then treats it as asynchronous, and nests no operator in it.
    An entry that is made with the time ``issued`` after its start has no span.
    """

    __slots__ = ("error", "fingerprint", "finished", "group", "issued", "nbytes", "op", "peer", "seq", "span")

    has_hooks = False
    """Whether `run_hooks` may have hooks to call."""

    def __init__(self, group: str, op: str, seq: int, fingerprint: int, nbytes: int, issued: float = 0.0) -> None:
        self.group = group
        self.op = op
        self.seq = seq
        self.fingerprint = fingerprint
        self.nbytes = nbytes
        self.issued = issued or time.perf_counter()
        self.finished = 0.0
        self.error: str | None = None
        self.peer: int | None = None
        self.span = enter_span(_span_name(op), None) if not issued and is_profiler_enabled() else None

    def finish(self, error: BaseException | None = None) -> bool:
        """Record the end; return whether the caller must call `run_hooks`, after it has released its locks."""
        self.finished = time.perf_counter()
        if error is not None:
            self.fail(error)
        if self.span is not None:
            exit_span(self.span)
            self.span = None
        return self.has_hooks

    def fail(self, error: BaseException) -> None:
        """Record the error of the operation."""
        self.error = describe_error(error)

    def run_hooks(self) -> None:
        """Call the hooks of the end; does nothing for an operation without hooks."""

    @property
    def state(self) -> str:
        return "failed" if self.error else "completed" if self.finished else "pending"

    def as_dict(self) -> dict[str, Any]:
        """Return the entry as JSON values, with the call in source form."""
        names = ("group", "op", "seq", "peer", "nbytes", "issued", "finished", "error", "state", "fingerprint")
        fingerprint = Fingerprint.unpack(self.fingerprint)
        call = call_in_words(fingerprint, self.op) if fingerprint.collective else self.op
        return {name: getattr(self, name) for name in names} | {"call": call}


def _span_name(op: str) -> str:
    """Return the name that ``torch.distributed.record_comm`` has set in the calling thread, or that of the operation."""
    named = c10d_private.get_comm_profiling_name
    return (named() if named else "") or f"asyncdist:{op}"


CompletedCall = tuple[str, str, int, int, int, float, float]
"""The group, the operation, its number, fingerprint and bytes, and its times: a call that was complete when it returned.
Making a tuple takes a tenth of the time of an `Entry`."""
Record = Entry | CompletedCall


def entry_of(kept: Record) -> Entry:
    """Return what the ring keeps as an entry."""
    if isinstance(kept, Entry):
        return kept
    entry = Entry(*kept[:6])
    entry.finished = kept[6]
    return entry


Details = Callable[[], Mapping[str, Any]]
"""Returns further values for a dump or a status."""
LastNumber = Callable[[], int]
"""Returns the number of the last collective of a group; 0 without one."""


class _RecordedGroup(NamedTuple):
    """A group's ranks, a function that returns the number of its last collective, and one that describes its state."""

    ranks: Sequence[int]
    last_number: LastNumber
    describe: Details


class Recorder:
    """Keeps the last ``size`` operations of one rank in one world, and its newest groups.

    Recording appends to a ring buffer and evicts the oldest entry, pending or not. A call that the calling thread completes
    is recorded at its end. Each function in ``pending`` returns the pending operations of an executor; a dump calls the
    functions, from any thread. Those in ``progress`` return further values of pending operations, and those in ``details``
    of the rank. ``dump_format`` is json, torch or both. ``dump_dir`` is the folder into which `dump_signal` writes.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        size: int,
        world_id: str = "",
        dump_format: str = "json",
        dump_dir: str | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.world_id = world_id
        self.dump_format = dump_format
        self.dump_dir = dump_dir
        self.pending: list[Callable[[], Iterable[Entry]]] = []
        self.progress: list[Callable[[], Mapping[Entry, dict[str, Any]]]] = []
        self.details: list[Details] = []
        self.dropped_frames = 0
        """The number of frames that arrived for an earlier generation of a group, and were dropped."""
        self._groups: dict[str, _RecordedGroup] = {}
        self._entries: deque[Record] = deque(maxlen=max(1, size))
        self.add = self._entries.append
        _recorders.add(self)

    @property
    def last(self) -> Record | None:
        """The newest operation; None before the first. Callable from any thread."""
        return self._entries[-1] if self._entries else None

    def clear(self) -> None:
        """Forget all operations: those by which a rank has prepared its world."""
        self._entries.clear()
        self._groups.clear()

    def add_group(self, name: str, ranks: Sequence[int], last_number: LastNumber, describe: Details = dict) -> None:
        """Register a group.

        Args:
            last_number: Returns the number of its last collective; 0 without one.
            describe: Returns further values for a dump: ``generation``, ``open`` and ``error``.
        """
        self._groups[name] = _RecordedGroup(ranks, last_number, describe)
        if len(self._groups) > (self._entries.maxlen or 0):
            del self._groups[next(iter(self._groups))]

    def fingerprint(self, group: str, key: bytes) -> int:
        """Return the recorded fingerprint of a group's collective, given a message's key; 0 if it was evicted."""
        number = int.from_bytes(key[8:12], "little")
        # Other threads append to the ring during the search.
        for entry in map(entry_of, reversed(list(self._entries))):
            if entry.group == group and entry.seq & 0xFFFFFFFF == number and not is_message(entry.op):
                return entry.fingerprint
        return 0

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over the entries of the ring and the evicted ones that are pending, in the order of their starts."""
        entries = dict.fromkeys(map(entry_of, list(self._entries)))
        pending = dict.fromkeys(entry for pending in list(self.pending) for entry in pending())
        return iter(sorted(entries | pending, key=lambda entry: entry.issued))

    def dump(self, folder: str, reason: str) -> str | None:
        """Write the recorder to ``folder``; return the path of a file, or None (and log an error) on failure.

        A later dump of the same rank replaces the files. Only the owner of this process can read them. A dump replaces a
        symbolic link under a file's name and does not follow it.
        """
        return self.write(folder, self.content(reason, with_stacks=True))

    def write(self, folder: str, content: dict[str, Any]) -> str | None:
        """Write an earlier `content` to ``folder``, as `dump` does."""
        path = ""
        if self.dump_format != "json":
            path = os.path.join(folder, f"{torch_format.file_prefix(self.world_id)}{self.rank}")
            if not _write(path, torch_format.torch_pickle(parse(content))):
                return None
        if self.dump_format != "torch":
            path = os.path.join(folder, f"asyncdist-{self.world_id[:8]}-rank{self.rank}.json")
            if not _write(path, json.dumps(content, indent=1).encode()):
                return None
        return path

    def content(
        self, reason: str, most: int | None = None, *, window: float = RATE_WINDOW, with_stacks: bool = False
    ) -> dict[str, Any]:
        """Return the recorder as JSON values. Any thread may call it.

        Args:
            most: Include only so many of the newest entries, and all pending ones; None includes all.
            window: The seconds over which to compute the rates.
            with_stacks: Whether to include the Python stacks of this process.
        """
        entries = list(self)
        now = time.perf_counter()
        rates = _rates(entries, now, window)
        if most is not None:
            older = entries[: max(0, len(entries) - most)]
            entries = [entry for entry in older if not entry.finished] + entries[len(older) :]
        progress = {entry: values for each in self.progress for entry, values in each().items()}
        content: dict[str, Any] = {
            "world": self.world_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "host": platform.node(),
            "pid": os.getpid(),
            "reason": reason,
            "time": time.time(),
            "clock": now,
            "dropped_frames": self.dropped_frames,
            "rates": rates,
            "groups": {
                name: {"ranks": list(group.ranks), "last": group.last_number(), **group.describe()}
                for name, group in list(self._groups.items())
            },
            "entries": [entry.as_dict() | progress.get(entry, {}) for entry in entries],
        }
        for each in self.details:
            content.update(each())
        return content | {"stacks": stacks.collect()} if with_stacks else content


def _rates(entries: Sequence[Entry], now: float, window: float) -> dict[str, float]:
    """Return the calls and bytes per second of the calls that have ended within the last seconds, without errors."""
    since = max(now - window, min((entry.issued for entry in entries), default=now))
    ended = [entry.nbytes for entry in entries if entry.finished > since and not entry.error]
    elapsed = max(now - since, 1e-9)
    return {"calls": len(ended) / elapsed, "nbytes": sum(ended) / elapsed}


_recorders: WeakRegistry[Recorder] = WeakRegistry()


def recorders() -> list[Recorder]:
    """Return the recorders of this process that are referenced, one for each rank of each world. Any thread may call it."""
    return _recorders.living()


def _write(path: str, content: bytes) -> bool:
    """Write a file of a dump; return False and log an error on failure."""
    try:
        write_private(path, content)
    except OSError as cause:
        log.error("cannot write the flight recorder to %s: %s", path, cause)
        return False
    log.warning("flight recorder written to %s", path)
    return True


def write_private(path: str, content: bytes) -> None:
    """Replace a file by one that only the owner of this process can read. Creates its folder; raises OSError."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    # A signal handler may interrupt a dump with another one, so each call writes its own file. Its name does not contain
    # the final one, so that torch's analyser ignores it.
    unfinished = os.path.join(folder, f".{secrets.token_hex(8)}.unfinished")
    try:
        with open(unfinished, "xb", opener=_create_private) as file:
            file.write(content)
        # The rename is atomic: a reader sees the whole earlier dump or this whole one.
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def _create_private(path: str, flags: int) -> int:
    """Create a file that only its owner can read. Raises FileExistsError if the name exists, also as a symbolic link."""
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
