"""Hooks: functions that the program has called at the start and at the end of the operations of its groups.

A call without hooks that is complete when it returns appends a tuple to the flight recorder, any other operation an
`Entry`. The first hook replaces the two functions that make and append it (`GroupHooks.new_entry` and `GroupHooks.record`).
The entry is then an `ObservedEntry`, which remembers the hooks of its operation. The thread that completes the operation
calls them after it has released the locks of the engine.

With hooks, the entry also measures for which ranks each schedule waits, from the steps that the schedule yields.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from asyncdist.base import lifecycle
from asyncdist.kernel.algorithms.schedule import Recv, Reduce, Schedule, Send, Step, Wait
from asyncdist.kernel.memory.buffers import DTYPES
from asyncdist.kernel.tracing.recorder import Entry
from asyncdist.kernel.transport.native import PreparedCall
from asyncdist.kernel.transport.wire_format import dtype_number

log = logging.getLogger("asyncdist")

_NO_WAITS: Mapping[int, float] = MappingProxyType({})
_ids = itertools.count(1)
_START, _END, _ERROR = range(3)
"""The functions of a hook, by their place in `Hook.functions`."""


@functools.lru_cache(maxsize=1024)
def _dtype_of(fingerprint: int) -> torch.dtype | None:
    return DTYPES.get(dtype_number(fingerprint))


class OperationRecord(NamedTuple):
    """The description of one operation of a group on this rank, as hooks get it. It never changes.

    Attributes:
        id: Number of the operation in this process; the records of its start and of its end have the same.
        group: Name of the group.
        ranks: Global ranks of the group's members, in group order.
        rank: Global rank of this process in the world of the group.
        op: Name of the operation, such as ``all_reduce``.
        seq: Number of a collective in its group, from 1; tag of a message.
        nbytes: Size of the payload in bytes.
        dtype: Dtype of the tensors; None without tensors.
        peer: Global rank of the other side of a message. None for a collective, and for a receive from any rank.
        start: Time of the call, in seconds of `time.perf_counter`.
        end: Time of the completion on the same clock; None while the operation is pending.
        error: The error of a failed operation; else None.
        waits: Seconds for which the operation has waited for each global rank, as far as this rank knows: it waited for
            that rank to arrive, to send or to take data. Empty while the operation is pending, and on devices.
    """

    id: int
    group: str
    ranks: tuple[int, ...]
    rank: int
    op: str
    seq: int
    nbytes: int
    dtype: torch.dtype | None
    peer: int | None
    start: float
    end: float | None
    error: BaseException | None
    waits: Mapping[int, float]

    @property
    def duration(self) -> float:
        """Seconds from the call to the completion; up to now while the operation is pending."""
        return (perf_counter() if self.end is None else self.end) - self.start


HookFunction = Callable[[OperationRecord], object]
_Function = Callable[[Any], object]
"""A `HookFunction`, or a function that takes the entry."""


class Hook:
    """A registered hook. `remove` it when it is no longer needed; as a context manager it does so at the end."""

    __slots__ = ("_group", "_has_failed", "functions", "takes_entry")

    def __init__(
        self,
        on_start: _Function | None,
        on_end: _Function | None,
        on_error: _Function | None,
        group: GroupHooks | None,
        *,
        takes_entry: bool = False,
    ) -> None:
        self.functions: tuple[_Function | None, ...] = on_start, on_end, on_error
        self.takes_entry = takes_entry
        self._group = group
        self._has_failed = False
        self._set_registered(True)

    def remove(self) -> None:
        """Call this hook no more, also not for pending operations. Idempotent; any thread may call it."""
        self.functions = None, None, None
        self._set_registered(False)

    def _set_registered(self, is_registered: bool) -> None:
        """Add this hook to those of its group, or of all groups, or remove it."""
        with _lock:
            hooks = _everywhere if self._group is None else self._group.own
            if is_registered:
                hooks.append(self)
            elif self in hooks:
                hooks.remove(self)
            for group in _groups if self._group is None else [self._group]:
                group.update()

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def failed(self, function: _Function, entry: ObservedEntry) -> None:
        """Log the exception that is being handled, if it is the first one of this hook."""
        if not self._has_failed:
            self._has_failed = True
            log.exception(
                "hook %r raised in %s #%d of group %r on rank %d; its further exceptions are not logged",
                function, entry.op, entry.seq, entry.group, entry.of.rank,
            )  # fmt: skip


class ObservedEntry(Entry):
    """An operation of a group with hooks, and the ranks for which it waits.

    Each group with hooks has its own subclass, whose attribute ``of`` is the group.

    Attributes:
        spans: The waits: the global rank for which a part of the operation waited, since when, and until when.
    """

    __slots__ = ("_cause", "_id", "spans")

    of: GroupHooks
    has_hooks = True

    # `GroupHooks.record` sets them: a constructor would take as long again as that of `Entry`.
    _id: int
    spans: list[tuple[int, float, float]]
    _cause: BaseException

    def fail(self, error: BaseException) -> None:
        # Before `error`, which says for other threads that there is a cause.
        self._cause = error
        Entry.fail(self, error)

    def run_hooks(self) -> None:
        """Call the hooks of the end, once; further calls do nothing."""
        # `pop` lets exactly one of several threads take the hooks.
        hooks = self.of.pending.pop(self, None)
        if hooks is not None:
            self.call(hooks, _END if self.error is None else _ERROR)

    def call(self, hooks: tuple[Hook, ...], event: int) -> None:
        """Call the functions of ``hooks`` for an event; a KeyboardInterrupt or SystemExit leaves after all of them."""
        record: OperationRecord | None = None
        left: BaseException | None = None
        for hook in hooks:
            function = hook.functions[event]
            if function is not None:
                try:
                    if hook.takes_entry:
                        function(self)
                    else:
                        record = record or self.record()
                        function(record)
                except Exception:
                    hook.failed(function, self)
                except BaseException as error:
                    left = error
        if left is not None:
            raise left

    def record(self) -> OperationRecord:
        """Return the description of the operation, as it is now."""
        of, peer, finished = self.of, self.peer, self.finished
        if not self._id:
            self._id = next(_ids)
        # The constructor of a named tuple takes more than twice as long.
        return tuple.__new__(
            OperationRecord,
            (
                self._id,
                self.group,
                of.ranks,
                of.rank,
                self.op,
                self.seq,
                self.nbytes,
                _dtype_of(self.fingerprint),
                None if peer is None else of.ranks[peer],
                self.issued,
                finished or None,
                None if self.error is None else self._cause,
                MappingProxyType(self.waits()) if self.spans and finished else _NO_WAITS,
            ),
        )

    # -- waits -------------------------------------------------------------------------------------

    def waits(self) -> dict[int, float]:
        """Return the seconds for which the operation has waited for each global rank."""
        if len(self.spans) == 1:
            rank, since, until = self.spans[0]
            return {rank: until - since}
        waits: dict[int, float] = {}
        # Several parts that wait for the same rank at the same time count once.
        counted: dict[int, float] = {}
        for rank, since, until in sorted(self.spans):
            since = max(since, counted.get(rank, since))
            waits[rank] = waits.get(rank, 0.0) + max(0.0, until - since)
            counted[rank] = max(since, until)
        return waits

    def watch_all(self, schedules: Iterable[Schedule]) -> Iterable[Schedule]:
        """Return the parts of the operation, which then measure for which ranks they wait.

        A step that receives from several ranks counts for each of them. A wait for a receive from any rank counts for the
        sender. The number of the parts stays known where it was.
        """
        watched = map(self.watch, schedules)
        return list(watched) if isinstance(schedules, Collection) else watched

    def watching(self, call: PreparedCall) -> PreparedCall:
        """Return a prepared call that measures for which ranks its schedule waits."""

        def watched(*arguments: Any) -> Schedule | None:
            rest = call(*arguments)
            return None if rest is None else self.watch(rest)

        return watched

    def watch(self, schedule: Schedule) -> Schedule:
        """Run a schedule, and measure for which ranks it waits; see `watch_all`."""
        ranks, spans = self.of.ranks, self.spans
        awaited: Sequence[int] = ()
        last: Step | Wait = ()
        since = 0.0
        try:
            for step in schedule:
                while True:
                    if type(step) is not int or step != last:
                        now = perf_counter()
                        for peer in awaited:
                            spans.append((ranks[peer], since, now))
                        awaited, last, since = _peers(step), step, now
                    sender: Any = yield step
                    if sender is None:
                        break
                    spans.append((sender, since, perf_counter()))
                    step = schedule.send(sender)
        except StopIteration:
            return
        except BaseException:
            schedule.close()
            raise
        finally:
            if awaited:
                now = perf_counter()
                for peer in awaited:
                    spans.append((ranks[peer], since, now))


def _peers(step: Step | Wait) -> Sequence[int]:
    """Return the group ranks for which a step waits: those that it receives from, else those that it sends to."""
    if isinstance(step, int):
        return (step,)
    peers = [action.peer for action in step if type(action) is Recv or type(action) is Reduce]
    return peers or [action.peer for action in step if isinstance(action, Send)]


class GroupHooks:
    """The hooks of one group, and the function with which the group records an operation.

    Args:
        ranks: Global ranks of the members.
        rank: Global rank of this process.
        add: Appends an entry to the flight recorder.
        everywhere: Whether the hooks of all groups (`register_hook`) apply; False for groups of the library's own.

    Attributes:
        own: The hooks of this group alone.
        new_entry: Makes the entry of an operation: an `Entry`, or with hooks an `ObservedEntry`.
        record: Records an operation that starts, and calls the hooks. It returns the entry if it is observed, else None.
            The calling thread must hold no lock of the engine.
        hooks: The hooks that apply, in the order in which they are called.
        has_start: Whether one of them has a function for the start.
        pending: The observed operations that have not ended, each with the hooks of its start.
    """

    def __init__(
        self, ranks: tuple[int, ...], rank: int, add: Callable[[Entry], None], *, everywhere: bool = True
    ) -> None:
        self.ranks, self.rank = ranks, rank
        self._add, self._everywhere = add, everywhere
        self.own: list[Hook] = []
        self._observed: type[ObservedEntry] | None = None
        self.hooks: tuple[Hook, ...] = ()
        self.has_start = False
        self.pending: dict[ObservedEntry, tuple[Hook, ...]] = {}
        self.new_entry: Callable[[str, str, int, int, int], Entry] = Entry
        self.record: Callable[[Entry], ObservedEntry | None] = add
        if everywhere:
            with _lock:
                _groups.add(self)
                self.update()

    def update(self) -> None:
        """Choose the function that records. Called under the lock of this module."""
        self.hooks = (*_everywhere, *self.own) if self._everywhere else tuple(self.own)
        self.has_start = any(hook.functions[_START] is not None for hook in self.hooks)
        if self.hooks and self._observed is None:
            self._observed = type("ObservedEntry", (ObservedEntry,), {"of": self, "__slots__": ()})
        self.new_entry = self._observed if self.hooks and self._observed is not None else Entry
        self.record = self._observe if self.hooks else self._add

    def _observe(self, entry: Entry) -> ObservedEntry | None:
        self._add(entry)
        # The first hook may have been registered after `new_entry`.
        if not isinstance(entry, ObservedEntry):
            return None
        entry._id, entry.spans = 0, []
        hooks = self.pending[entry] = self.hooks
        if self.has_start:
            entry.call(hooks, _START)
        return entry


# -- hooks of all groups ------------------------------------------------------------------------------

_lock = threading.RLock()
"""Guards the hooks of all groups. A signal handler may register a hook while its thread holds the lock."""
lifecycle.renew_in_children(globals(), "_lock", threading.RLock)
_groups: weakref.WeakSet[GroupHooks] = weakref.WeakSet()
_everywhere: list[Hook] = []


def register_hook(
    on_start: HookFunction | None = None, on_end: HookFunction | None = None, on_error: HookFunction | None = None
) -> Hook:
    """Call functions at the start and at the end of every operation of every group of this process.

    It applies to the groups that exist and to those that are made later, in every world, also through
    torch.distributed. `Group.register_hook` describes the functions and serves for one group.

    Args:
        on_start: Called with the `OperationRecord` of an operation that starts, in the calling thread.
        on_end: Called with the record of an operation that has succeeded.
        on_error: Called with the record of an operation that has failed.

    Returns:
        The hook, to be removed with ``remove()``.

    Example:
        >>> hook = dist.register_hook(on_error=lambda record: alert(record.group, record.error))
    """
    return Hook(on_start, on_end, on_error, None)


def register_entry_hook(on_end: Callable[[ObservedEntry], object]) -> Hook:
    """Call a function of the library at the end of every operation of every group, without making a record of it."""
    return Hook(None, on_end, on_end, None, takes_entry=True)


def pending_operations() -> list[OperationRecord]:
    """Return the pending operations of the groups with hooks that apply to all groups. Any thread may call it."""
    with _lock:
        groups = list(_groups)
    return [entry.record() for group in groups for entry in list(group.pending)]
