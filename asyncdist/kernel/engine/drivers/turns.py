"""The turns of one machine: who may drive it at the moment, and what every driver does under the lock."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from threading import get_ident
from time import monotonic

from asyncdist.base.callables import Callback
from asyncdist.base.descriptors import is_exhausted
from asyncdist.base.waker import Waker
from asyncdist.kernel.engine.drivers.waiting import Waiting
from asyncdist.kernel.engine.machine import Machine
from asyncdist.kernel.memory.user_modes import leave_user_modes
from asyncdist.kernel.torch_private import count_dispatch_modes, forward_ad_level, innermost_transform
from asyncdist.kernel.transport.base import Advance, Wait

LONGEST_ATTEMPT = 10e-3
"""Seconds for which a call sleeps for its peers before it becomes an operation, which others can see."""
TIME_SLICE = 1e-3
"""Seconds for which the machine continues in an event loop before the loop's other callbacks run."""


holds = operator.methodcaller("_is_owned")
"""Whether the calling thread holds an RLock. The locks of `Turns` are not acquired twice by a thread."""


def give_back(lock: threading.RLock) -> bool:
    """Release a lock if the calling thread holds it, and return whether it did.

    A signal handler may raise between the return of ``acquire(False)`` and the next instruction. Therefore the call stands
    inside the ``try`` whose ``finally`` calls this, and the locks are RLocks, which know who holds them.
    """
    try:
        lock.release()
    except RuntimeError:
        return False
    return True


class Turns:
    """The state that the drivers of one machine share; see `asyncdist.kernel.engine.progress` for its rules.

    Args:
        schedule_loop: Schedules the loop driver, if it is not scheduled.

    Attributes:
        waiting: How the drivers wait for peers.
        lock: The lock under which a thread touches the machine.
        driver_lock: The lock that an inline driver holds while it drives.
        inbox: Actions that the thread which holds the lock runs.
        standby: The events of blocked threads that stand by while another thread drives.
        sleeping: Whether the inline driver sleeps in ``poll``, or is about to.
        waker: Wakes the inline driver; None until a driver first sleeps.
        driving: The thread that holds ``driver_lock`` for `Progress.drive`; 0 for none.
        attempting: The thread that makes an attempt; 0 for none. It holds ``driver_lock`` only if it sleeps in it.
        slice_exhausted: Whether this turn of the loop has used up its time slice.
        in_trio: Whether trio tasks issue and await operations. An inline attempt then ends after a time slice.
    """

    def __init__(self, machine: Machine, schedule_loop: Callback) -> None:
        self.machine = machine
        self.waiting = Waiting()
        self.lock = threading.RLock()
        self.driver_lock = threading.RLock()
        self.inbox: deque[Callback] = deque()
        self.standby: deque[threading.Event] = deque()
        self.sleeping = False
        self.waker: Waker | None = None
        self.driving = self.attempting = 0
        self.slice_exhausted = False
        self.in_trio = False
        self._schedule_loop = schedule_loop

    # -- under the lock ------------------------------------------------------------------------

    @property
    def is_driven(self) -> bool:
        """Whether an inline driver drives, its sleep included."""
        return bool(self.driving or self.attempting)

    def assert_held(self) -> None:
        """Check that the lock is held, as far as a lock tells. ``python -O`` leaves the check out."""
        assert holds(self.lock), "this needs the lock of the world's Progress: pass it to submit() or post()"

    def turn(self, ready: Iterable[int] | None, advance: Advance | None = None) -> bool:
        """Run the actions that other threads have added, and drive the machine once; return whether anything moved.

        Args:
            ready: The descriptors that are ready; None if they are unknown.
            advance: Drives a part of the machine; None for all of it.
        """
        uses_modes = count_dispatch_modes() or innermost_transform() is not None or forward_ad_level() >= 0
        left = leave_user_modes() if uses_modes else None
        try:
            return self.turn_without_modes(ready, advance)
        finally:
            if left is not None:
                left.close()

    def turn_without_modes(self, ready: Iterable[int] | None, advance: Advance | None = None) -> bool:
        """Do what `turn` does, in a thread that has left the user's modes (`leave_user_modes`)."""
        inbox, moved = self.inbox, False
        try:
            # Other threads may add actions faster than this one runs them.
            for _ in range(len(inbox)):
                inbox.popleft()()
                moved = True
            return (advance or self.machine.advance)(ready) or moved
        except BaseException as cause:
            self.interrupt(cause)
            if not is_exhausted(cause):
                raise
            return True

    def expire(self) -> float:
        """Run what is due, and return the monotonic time."""
        if (now := monotonic()) >= self.machine.next_deadline():
            self.machine.expire(now)
        return now

    def prepare_sleep(self) -> list[Wait] | None:
        """Return the descriptors on which an inline driver sleeps; None to continue driving."""
        waits = self.machine.waits()
        try:  # before `sleeping` is set, because a thread that reads `sleeping` rings the waker
            self.waker = self.waker or Waker()
        except OSError as cause:
            self.interrupt(cause)
            if not is_exhausted(cause):
                raise
            return None
        self.sleeping = waits is not None
        return waits

    def interrupt(self, cause: BaseException) -> None:
        """Fail everything: ``cause`` has interrupted a turn."""
        self.machine.interrupted(cause)
        # This driver ends. Another driver must complete the failed operations for the threads that wait for them.
        self._schedule_loop()
        self.wake()

    # -- without the lock ----------------------------------------------------------------------

    def take(self) -> bool | None:
        """Drive the machine once if the lock is free; return whether anything moved, None if it is not free."""
        if holds(self.lock):
            return None
        try:
            if not self.lock.acquire(False):
                return None
            moved = self.turn(None)
        finally:
            give_back(self.lock)
        self.deliver()
        return moved

    def deliver(self) -> None:
        """Run the callbacks of completed operations, each one even if others raise."""
        if self.machine.finished:
            self._run_each(iter(self.machine.take_finished()))

    def _run_each(self, callbacks: Iterator[Callback]) -> None:
        try:
            for callback in callbacks:
                callback()
        except BaseException:
            # This driver ends. The threads and tasks that wait need the other callbacks, and another driver.
            self._schedule_loop()
            self.wake()
            self._run_each(callbacks)
            raise

    def sleep(self, waits: Sequence[Wait], until: float) -> list[int] | None:
        """Sleep until a descriptor is ready, the waker rings or a deadline passes; return the ready descriptors, or
        None if they are unknown or a deadline has passed before."""
        try:
            waker = self.waker
            if waker is None or self.inbox:  # a thread added an action after this driver's last turn
                return None
            seconds = min(until, self.machine.next_deadline()) - monotonic()
            if seconds <= 0:
                return None
            return self.waiting.sleep(waker, waits, seconds)
        finally:
            self.sleeping = False

    def wake(self) -> None:
        """Wake an inline driver that has been asleep since before this turn: the turn may have completed its work."""
        if self.sleeping and (waker := self.waker) is not None:
            waker.ring()


class Promises:
    """The threads that have promised to drive what they start, so that it does not wake the event loop. Thread-safe.

    Args:
        hand_over: Called at the end of each promise: lets another driver continue what is pending.
    """

    def __init__(self, hand_over: Callback) -> None:
        self._hand_over = hand_over
        self._threads: set[int] = set()

    def is_made_here(self) -> bool:
        """Return whether the calling thread has made a promise."""
        return bool(self._threads) and get_ident() in self._threads

    @contextlib.contextmanager
    def make(self, *, made: bool = True) -> Iterator[None]:
        """Let the calling thread promise, within this context, to wait for each operation that it starts.

        It does nothing else that lasts. Without ``made`` it has made no promise there: it waits for something else.
        """
        thread = get_ident()
        before = thread in self._threads
        self._set(thread, made)
        try:
            yield
        finally:
            self._set(thread, before)

    def _set(self, thread: int, made: bool) -> None:
        if made:
            self._threads.add(thread)
        elif thread in self._threads:
            self._threads.discard(thread)
            self._hand_over()
