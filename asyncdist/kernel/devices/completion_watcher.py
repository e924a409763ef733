"""The thread that polls for completion, timeout and failure of pending device operations, and polls single events.

`DeviceGroup` adds each operation when it is issued, and decides what a failure means. A caller that waits for events alone,
as `DeviceLending` does, passes no group.

The thread polls often only while something waits for an enqueued operation: a callback, an ``await``, a hook. A blocking
caller does not, and a thread that polls beside it would take the interpreter from it several times in each call. The
operations that nothing waits for are finished by the calls that follow them, or by the thread some milliseconds later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.kernel.devices.work import DeviceWork
from asyncdist.kernel.engine.operation import Plan
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.tracing.recorder import Entry
from asyncdist.kernel.transport.device_streams import DeviceEvent, completes_soon

log = logging.getLogger("asyncdist")

# Polling interval in seconds while something waits; it doubles while nothing completes.
_SHORTEST, _LONGEST = 20e-6, 2e-3
# The interval while nothing waits.
_UNHURRIED = 10e-3
# How many operations that nothing waits for a call finishes.
_MOST_RETIRED = 4
# Seconds after which an operation is slow: the group then checks that its peers are still there.
_SLOW = 0.05
# Seconds for which the idle thread waits for another operation.
_IDLE_TIMEOUT = 5.0


@dataclass(slots=True, eq=False)
class Pending:
    """An issued operation. ``plan`` and ``held`` keep its tensors alive until the completion event has passed.

    Attributes:
        issued: Monotonic time of the call, in seconds.
        deadline: Monotonic time at which the operation times out.
        numbered: Whether it is a collective with a sequence number; False for a message, which has a tag.
        event: Completion event; None until all device work is enqueued.
        problem_since: Monotonic time at which a peer failure was first seen while it waited; 0 if none was.
    """

    work: DeviceWork
    plan: Plan
    entry: Entry
    issued: float
    deadline: float
    numbered: bool = True
    event: DeviceEvent | None = None
    value: Any = None
    held: Any = None
    problem_since: float = 0.0

    def enqueued(self, value: Any, event: DeviceEvent) -> None:
        """Record that all device work is enqueued, with ``event`` recorded behind it."""
        self.value, self.event = value, event
        self.work.enqueued(value, event)

    def has_passed(self) -> bool:
        """Return whether the device has completed the operation, without an error."""
        try:
            return self.event is not None and self.event.query()
        # The polling thread reports the failure of the device.
        except Exception:
            return False

    def end(self) -> None:
        """Complete the operation, whose completion event has passed."""
        try:
            if self.entry.finish():
                self.entry.run_hooks()
        finally:
            self.work.finish(self.value)

    @property
    def is_awaited(self) -> bool:
        """Whether something waits for the device to complete the operation."""
        return self.event is not None and (self.work.has_callbacks or self.entry.has_hooks)


class WatchingGroup(Protocol):
    """What is told of the operations that a watcher watches, on its thread."""

    def check_health(self, pending: Pending) -> None:
        """Note that one of the oldest operations has lasted for 50 ms, again and again."""

    def on_timeout(self, pending: Pending) -> None:
        """Note that the deadline of an operation has passed."""

    def fail(self, pending: Pending, cause: BaseException) -> None:
        """Note that the device reports a failure."""

    def on_calm(self) -> None:
        """Note that no operation is slow any more."""


class CompletionWatcher:
    """Poll pending operations and events, in a daemon thread that ends some seconds after the last one.

    Without a group there are events only.
    """

    def __init__(self, name: str, group: WatchingGroup | None = None) -> None:
        self._thread = DaemonThreadPool(name, max_threads=1, idle_timeout=0.0)
        self._group = group
        self._pending: list[Pending] = []
        self._steps: list[tuple[DeviceEvent, Work]] = []
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._polling = self._hurried = self._closed = self._was_slow = False
        self._pause = _SHORTEST

    def add(self, pending: Pending) -> None:
        """Watch an operation until it completes or is removed. Finish some of the earlier ones that are complete."""
        for earlier in self._pending[:_MOST_RETIRED]:
            if earlier.is_awaited or not earlier.has_passed():
                break
            self._remove_and_finish(earlier)
        pending.work.hurry = self.hurry
        with self._lock:
            self._pending.append(pending)
            self._ensure_polling()

    def enqueued(self, pending: Pending, value: Any, event: DeviceEvent) -> None:
        """Record that an operation is enqueued. If something waits, poll for a moment here: no thread must wake up then."""
        pending.enqueued(value, event)
        if not pending.is_awaited:
            return
        try:
            has_passed = completes_soon(event)
        # The thread reports the failure of the device.
        except Exception:
            has_passed = False
        if has_passed:
            self._remove_and_finish(pending)
        else:
            self.hurry()

    def _remove_and_finish(self, pending: Pending) -> None:
        with self._lock:
            if pending not in self._pending:
                # Another thread has seen its completion and removed it.
                return
            self._pending.remove(pending)
        pending.end()

    def entries(self) -> list[Entry]:
        """Return the flight-recorder entries of all pending operations. Thread-safe."""
        return [one.entry for one in list(self._pending)]

    def when_passed(self, event: DeviceEvent) -> Work:
        """Return a work that completes when the device has passed ``event``.

        A caller that does not want to wait any more finishes the work.
        """
        step = Work()
        with self._changed:
            self._steps.append((event, step))
            self._ensure_polling()
        self.hurry()
        return step

    def hurry(self) -> None:
        """Let the thread poll at once, and often until something completes: something waits."""
        with self._changed:
            self._hurried, self._pause = True, _SHORTEST
            self._changed.notify()

    def _ensure_polling(self) -> None:
        """Start the thread if it does not run. The caller holds the lock."""
        if not self._polling:
            self._polling = True
            self._thread.submit(self._run)

    def remove_unfinished(self) -> list[Pending]:
        """Stop watching; return the operations that the device has not completed, and finish the others."""
        with self._changed:
            pending, self._pending = self._pending, []
            self._steps.clear()
        unfinished = []
        for one in pending:
            if one.has_passed():
                one.end()
            else:
                unfinished.append(one)
        return unfinished

    def close(self) -> None:
        """End the thread as soon as nothing is pending."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.shutdown(wait=False)

    def _run(self) -> None:
        while (pending := self._still_pending()) is not None:
            try:
                self._poll(pending)
            # A callback may raise SystemExit, which must not end the thread: other works need it.
            except BaseException:
                log.exception("polling %r failed", pending[0].entry.op if pending else "an event")
            # The idle thread must not keep tensors alive.
            del pending

    def _still_pending(self) -> list[Pending] | None:
        """Return the pending operations; None to end the thread, after a while without any, and without events.

        The thread looks for them now and then, because to wake it would delay the caller that adds one.
        """
        with self._changed:
            until = monotonic() + _IDLE_TIMEOUT
            while not (self._pending or self._steps or self._was_slow):
                if self._closed or monotonic() > until:
                    self._polling = False
                    return None
                self._changed.wait(_UNHURRIED)
            return list(self._pending)

    def _poll(self, pending: list[Pending]) -> None:
        have_ended = [self._poll_one(one) for one in pending]
        if self._finish_steps() or any(have_ended):
            self._pause = _SHORTEST
            return
        oldest = dict.fromkeys([*pending[:1], *[one for one in pending if one.numbered][:1]])
        self._note_slow([one for one in oldest if monotonic() - one.issued > _SLOW])
        is_awaited = any(one.is_awaited for one in pending)
        with self._changed:
            if is_awaited or self._steps:
                pause, self._pause = self._pause, min(2 * self._pause, _LONGEST)
            else:
                pause = _UNHURRIED
            if not self._hurried:
                self._changed.wait(pause)
            self._hurried = False

    def _note_slow(self, operations: Sequence[Pending]) -> None:
        was_slow, self._was_slow = self._was_slow, bool(operations)
        if self._group is None:
            return
        for one in operations:
            self._group.check_health(one)
        if was_slow and not operations:
            self._group.on_calm()

    def _finish_steps(self) -> bool:
        """Finish the intermediate steps that the device has passed; return whether there was one."""
        with self._changed:
            steps = list(self._steps)
        any_ended = False
        for one in steps:
            if _step_ended(*one):
                any_ended = True
                with self._changed:
                    self._steps = [other for other in self._steps if other is not one]
                one[1].run_callbacks()
        return any_ended

    def _poll_one(self, pending: Pending) -> bool:
        """Return whether an operation has completed or failed."""
        try:
            has_passed = pending.event is not None and pending.event.query()
        except Exception as cause:
            if self._group is not None:
                self._group.fail(pending, cause)
            return True
        if has_passed:
            self._remove_and_finish(pending)
            return True
        if monotonic() >= pending.deadline and self._group is not None:
            self._group.on_timeout(pending)
        return False


def _step_ended(event: DeviceEvent, step: Work) -> bool:
    if step.is_completed():
        return True
    try:
        if not event.query():
            return False
        step.finish()
    except Exception as cause:
        step.finish(error=cause)
    return True
