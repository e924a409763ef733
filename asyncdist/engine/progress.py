"""The progress engine: drives the pending operations of one rank, on one thread at a time.

A `Machine` (the rank's `Endpoint`) moves everything that can move without waiting, and names the file descriptors to wait
for when nothing can. `Progress` makes sure that a *driver* calls it:

* The inline driver is a thread that blocks in ``wait()``. It drives the machine itself and sleeps in ``poll``, so a
  blocking call needs no thread switch.
* The loop driver is an event loop that drives through ``add_reader`` and ``add_writer`` while no thread blocks. It is
  the loop in which the world was opened, or the runtime's background loop for blocking programs.
* A thread that only issues an operation tries once, inline, to complete it.

An operation belongs to no driver: one driver may begin it and another complete it. The rules:

1. A thread touches the machine only under ``lock``. No thread sleeps while it holds ``lock``.
2. An action that needs the lock goes into the queue ``_inbox``. The thread that holds the lock runs it. No thread waits for
   the lock in order to issue: after it releases the lock, a thread checks the queue again.
3. At most one inline driver exists: the holder of ``_driver_lock``. Other blocked threads stand by and take over in turn.
4. While an inline driver exists, the loop does not drive. The thread that stops driving schedules the loop if work is left.
5. Callbacks of the user run without the lock.

The loop driver is in one of four states (`LoopState`)::

               _schedule_loop()            _run_scheduled()
      IDLE ---------------------> SCHEDULED ---------------> IDLE
        |                             ^
        | the loop has driven, and    | _schedule_loop()
        v an operation is pending     |
      RESTING ------------------------+          any state --- close() ---> CLOSED

The loop drives the machine in ``_run_scheduled``, when a watched descriptor is ready, and when the timer fires. In
RESTING the peers signal new data, because the machine has asked for it; a turn of another thread ends that, so the
thread schedules the loop again. `DriverLoop` replaces the user's loop by the background loop when the user's loop ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
import threading
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import NamedTuple

from asyncdist.algorithms.schedule import END_ATTEMPT, Schedule
from asyncdist.base.descriptors import is_exhausted
from asyncdist.engine.drivers.driver_loop import DriverLoop, LoopState
from asyncdist.engine.drivers.idle_watch import IdleWatch
from asyncdist.engine.drivers.loop_watcher import LoopWatcher
from asyncdist.engine.drivers.promises import Promises
from asyncdist.engine.drivers.waiting import MOST_POLLS, Waiting
from asyncdist.engine.drivers.waker import Waker
from asyncdist.engine.machine import Calls, Finishable, Machine
from asyncdist.errors import LoopThreadError
from asyncdist.transport.base import Wait

_SLICE = 1e-3
"""Seconds for which the loop driver continues before the loop's other callbacks run."""
_LONGEST_ATTEMPT = 10e-3
"""Seconds for which a call sleeps for its peers before it becomes an operation, which others can see."""


class _Sleep(NamedTuple):
    """How an attempt sleeps: on which descriptors, and whether its schedule reads what arrives there itself."""

    waits: Sequence[Wait]
    are_read: bool


_IDLE, _SCHEDULED, _RESTING, _CLOSED = LoopState


class Progress:
    """Ensures that a machine has exactly one driver while operations are pending.

    Args:
        machine: The machine to drive.
        home: The event loop that drives while no thread blocks, until that loop ends. By default the background loop
            drives, and only while an operation is pending.
    """

    def __init__(self, machine: Machine, home: asyncio.AbstractEventLoop | None = None) -> None:
        self._machine = machine
        self.waiting = Waiting()
        self.home = DriverLoop(home, self._on_home_left)
        self.lock = threading.Lock()
        self._inbox: deque[Callable[[], object]] = deque()
        self._driver_lock = threading.Lock()
        self._standby: deque[threading.Event] = deque()
        self.state = _IDLE
        self._sleeping = False
        """Whether the inline driver sleeps in ``poll``, or is about to."""
        self._slice_exhausted = False
        """Whether this turn of the loop has used up its time slice."""
        self._in_trio = False
        """Whether trio tasks issue operations; see `serve_trio`."""
        self._waker: Waker | None = None
        self.promises = Promises(self._hand_over)
        self.loop_watcher = LoopWatcher(self.drive_on_loop)
        self.idle_watch = IdleWatch(machine, self.lock, self._driver_lock, self.loop_watcher)

    def serve_trio(self) -> None:
        """Let trio tasks issue and await operations: an inline attempt ends after a time slice, as in an asyncio loop."""
        self._in_trio = True

    # -- for every thread ----------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that drives while no thread blocks."""
        return self.home.loop

    def _on_home_left(self, home: asyncio.AbstractEventLoop) -> None:
        """Continue on the background loop: a loop that has ended runs no more callbacks."""
        if home.is_closed():
            self.loop_watcher.forget()
        else:
            self.loop_watcher.leave(home)
        if self.state is not _CLOSED:
            self.state = _IDLE
            self._schedule_loop()

    def submit(self, action: Callable[[], None]) -> None:
        """Run ``action`` under the lock: now if the lock is free, else on the thread that holds it."""
        self._inbox.append(action)
        while self._inbox and self.lock.acquire(blocking=False):
            self._take_turn()
        self._wake_idle()

    def look(self, action: Callable[[], bool]) -> None:
        """Run ``action`` under the lock, as `submit` does, but drive afterwards only if it returns True."""
        moved = True
        if self.lock.acquire(blocking=False):
            try:
                moved = action()
            except BaseException as cause:
                self._interrupt(cause)
                raise
            finally:
                self.lock.release()
        else:
            self._inbox.append(action)
        if moved or self._inbox:
            self.submit(lambda: None)

    def post(self, action: Callable[[], None]) -> None:
        """Let a driver run ``action`` soon. Safe to call while the lock of another machine is held."""
        self._inbox.append(action)
        self._wake()
        if not self._driver_lock.locked() and (self.home or self.loop_watcher.watched or self._machine.busy()):
            self._schedule_loop()

    def retire(self, sock: socket.socket) -> None:
        """Close a socket once no loop watches it. Called under the lock."""
        if self.loop_watcher.retire(sock):
            self._schedule_loop()

    def _turn(self, ready: Iterable[int] | None) -> bool:
        inbox, moved = self._inbox, False
        try:
            while inbox:
                inbox.popleft()()
                moved = True
            return self._machine.advance(ready) or moved
        except BaseException as cause:
            self._interrupt(cause)
            if not is_exhausted(cause):
                raise
            return True

    def _interrupt(self, cause: BaseException) -> None:
        self._machine.interrupted(cause)
        # This driver ends. Another driver must complete the failed operations for the threads that wait for them.
        self._schedule_loop()
        self._wake()

    def _take_turn(self) -> bool:
        """Drive the machine once and release the lock, which the caller has acquired."""
        try:
            moved = self._turn(None)
        finally:
            self.lock.release()
        self._deliver()
        return moved

    def _deliver(self) -> None:
        if self._machine.finished:
            for callback in self._machine.take_finished():
                callback()

    def _expire(self) -> float:
        if (now := monotonic()) >= self._machine.next_deadline():
            self._machine.expire(now)
        return now

    # -- the inline driver ---------------------------------------------------------------------

    def refuse_loop_thread(self, what: str) -> None:
        """Raise LoopThreadError if a blocking wait in this thread would stop the very loop that it waits for."""
        if (running := _get_running_loop()) is not None and running is self.loop:
            raise LoopThreadError(what)

    def attempt(
        self, schedule: Schedule, group: Calls, number: int, wait: bool, polls: int = MOST_POLLS, block: bool = False
    ) -> bool:
        """Run a native schedule, or a direct one over links, inline and without an operation object.

        The schedule is not started if its group has failed: the memory of a destroyed group may belong to another group.

        Args:
            schedule: The schedule to run.
            group: The channel of the group.
            number: The number of the collective in the group.
            wait: Whether to wait for peers for as long as an inline driver polls.
            polls: Polls after which a waiting thread looks at the clock and offers its core, at most.
            block: Whether to sleep for peers for a while where an inline driver sleeps at once.

        Returns:
            Whether the schedule is complete. If not, an operation continues it from where it stopped.
        """
        if not self._driver_lock.acquire(False):
            return False
        asleep_until, turns, ready = 0.0, False, None
        try:
            while self.lock.acquire(False):
                try:
                    if turns:
                        self._turn(ready)
                        self._expire()
                    outcome = self._run_inline(schedule, group, wait, polls, block)
                    if outcome is True:
                        group.started += 1
                        group.highest = number if number > group.highest else group.highest
                        return True
                except BaseException as cause:
                    if not isinstance(cause, Exception):
                        self._machine.interrupted(cause)
                        self._schedule_loop()
                    raise
                finally:
                    self.lock.release()
                if outcome is False:
                    return False
                asleep_until = asleep_until or monotonic() + _LONGEST_ATTEMPT
                if monotonic() >= asleep_until:
                    return False
                ready = self._sleep(outcome.waits, asleep_until)
                turns = ready is None or not outcome.are_read
            return False
        finally:
            self._sleeping = False
            self._driver_lock.release()
            if self._machine.finished:
                self._deliver()
            if self._standby or self._inbox:
                self._hand_over()

    def _run_inline(self, schedule: Schedule, group: Calls, wait: bool, most: int, block: bool) -> _Sleep | bool:
        """Run a schedule; return whether it is complete or an operation continues it, or how to sleep for its peers."""
        if group.error is not None or self._inbox or self._machine.operations:
            return False
        inbox, waiting = self._inbox, self.waiting
        until, polls, allowed = 0.0, 0, waiting.polls if wait else waiting.attempts
        enough = most if most < allowed else allowed
        # In an event loop the loop's other callbacks must run after each time slice.
        end = 0.0 if wait or not (_get_running_loop() or self._in_trio) else monotonic() + _SLICE
        sleep: _Sleep | None = None
        for step in schedule:
            if inbox or step is END_ATTEMPT:  # another thread needs the lock, or the schedule an operation
                return False
            if type(step) is not int:
                polls, until = 0, 0.0
                if end and monotonic() >= end:
                    self._slice_exhausted = True
                    return False
                continue
            polls += 1
            if polls < enough:
                continue
            if sleep is not None:
                return sleep
            polls, now = 0, monotonic()
            if now >= waiting.look_at:
                waiting.look(now)
            if block and not waiting.spin:
                sleep = self._prepare_sleep_in_attempt(group.members[step])
                if sleep is None or sleep.are_read:
                    return sleep or False
                # The schedule is polled once more before the sleep: a peer that has moved before does not signal.
                polls = enough - 1
                continue
            until = until or (now + waiting.spin if wait else now)
            if now >= until:
                return False
            waiting.offer_core(now)
        if sleep is not None:
            # Peers need not signal any more, which would cost them a system call.
            self._machine.advance(())
        return True

    def _prepare_sleep_in_attempt(self, peer: int) -> _Sleep | None:
        """Return how a schedule sleeps for a peer; None to continue it in an operation."""
        arrivals = self._machine.arrivals(peer) if self._waker is not None else ()
        if arrivals:
            self._sleeping = True
            return _Sleep(arrivals, are_read=True)
        waits = self._prepare_sleep()
        return None if waits is None else _Sleep(waits, are_read=False)

    def drive(self, work: Finishable, until: float, start: Callable[[], None] | None = None) -> None:
        """Drive, or wait for another driver, until ``work`` is completed or the monotonic time is ``until``.

        ``start`` starts the work; None if it has started.
        """
        if start is not None:
            self._inbox.append(start)
        elif work.is_completed():
            return
        while not self._driver_lock.acquire(blocking=False):
            if not self._follow(work, until) or work.is_completed():
                return
        try:
            self._drive_locked(work, until)
        finally:
            self._driver_lock.release()
            self._hand_over()

    def _drive_locked(self, work: Finishable, until: float) -> None:
        ready: Iterable[int] | None = None
        spin_until = (now := monotonic()) + self.waiting.spin
        while True:
            waits: list[Wait] | None = None
            with self.lock:
                moved = self._turn(ready)
                completed = work.is_completed()
                if not completed:
                    now = self._expire()
                    if moved:
                        spin_until = now + self.waiting.spin
                    elif now >= spin_until:
                        waits = self._prepare_sleep()
                    else:  # a peer may need this core
                        self.waiting.offer_core(now)
                    if now >= self.waiting.look_at:
                        self.waiting.look(now)
            if self._machine.finished:
                self._deliver()
            if completed or work.is_completed() or now >= until:
                self._sleeping = False
                return
            ready = None if waits is None else self._sleep(waits, until)

    def _prepare_sleep(self) -> list[Wait] | None:
        """Return the descriptors to sleep on; None to continue driving."""
        waits = self._machine.waits()
        try:  # before `_sleeping` is set, because a thread that reads `_sleeping` rings the waker
            self._waker = self._waker or Waker()
        except OSError as cause:
            self._interrupt(cause)
            if not is_exhausted(cause):
                raise
            return None
        self._sleeping = waits is not None
        return waits

    def _sleep(self, waits: Sequence[Wait], until: float) -> list[int] | None:
        """Sleep until a descriptor is ready, the waker rings or a deadline passes; return the ready descriptors, or
        None if they are unknown."""
        try:
            waker = self._waker
            if waker is None or self._inbox:  # a thread added an action after this driver's last turn
                return None
            seconds = min(until, self._machine.next_deadline()) - monotonic()
            return self.waiting.sleep(functools.partial(waker.sleep, waits, seconds))
        finally:
            self._sleeping = False

    def _follow(self, work: Finishable, until: float) -> bool:
        """Wait until another driver has completed ``work`` or stopped driving; return False if the time is up."""
        event = threading.Event()
        self._standby.append(event)

        def completed(_: object) -> None:
            event.set()

        work.add_done_callback(completed)
        try:
            self.submit(lambda: None)  # run the action that `drive` added: the driver may be asleep
            if self._driver_lock.locked() and not work.is_completed():
                event.wait(None if until == math.inf else max(0.0, until - monotonic()))
            return monotonic() < until
        finally:
            self._standby.remove(event)
            work.remove_done_callback(completed)

    def _hand_over(self) -> None:
        for event in list(self._standby):
            event.set()
        if self._inbox or self._machine.busy():
            self.ensure_driven()

    def _wake(self) -> None:
        """Wake an inline driver that has been asleep since before this turn: the turn may have completed its work."""
        if self._sleeping and (waker := self._waker) is not None:
            waker.ring()

    def _wake_idle(self) -> None:
        """Wake any driver that has been asleep since before this turn: since the turn, peers no longer wake this rank."""
        self._wake()
        if self.state is _RESTING and not self._driver_lock.locked():
            self._schedule_loop()

    # -- the loop driver -----------------------------------------------------------------------

    def ensure_driven(self) -> None:
        """Let the loop drive the pending operations, unless a blocked thread drives them already."""
        if self._driver_lock.locked() or self.state is _CLOSED or self.promises.is_made_here():
            return
        running = _get_running_loop()
        if running is not None and running is self.loop and not self._slice_exhausted:
            self.drive_on_loop()
        else:
            self._schedule_loop()

    def try_now(self, work: Finishable) -> None:
        """Try for a moment to complete ``work`` inline, unless this turn of the loop has used its time slice."""
        now = monotonic()
        until, end = now + (self.waiting.await_spin if self._in_trio or self.home else 0.0), now + _SLICE
        while not (self._slice_exhausted or self._driver_lock.locked()) and self.lock.acquire(blocking=False):
            moved = self._take_turn()
            if work.is_completed():
                break
            now = monotonic()
            self._slice_exhausted = now >= end
            if now >= until and not moved:
                break
            if not moved:
                self.waiting.offer_core(now)
        self._wake_idle()
        if self._inbox and not self._driver_lock.locked():
            self._schedule_loop()

    def _schedule_loop(self) -> None:
        if self.state in (_IDLE, _RESTING):
            loop = self._existing_loop()
            if loop is None:
                return
            self.state = _SCHEDULED
            with contextlib.suppress(RuntimeError):  # another thread has closed the loop
                call_soon = loop.call_soon if _get_running_loop() is loop else loop.call_soon_threadsafe
                call_soon(self._run_scheduled)

    def _existing_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return `loop`; if the process has no descriptors for the background loop, fail all operations and return None."""
        try:
            return self.loop
        except OSError as cause:
            if not is_exhausted(cause):
                raise
            self._inbox.append(functools.partial(self._machine.interrupted, cause))
            return None

    def _run_scheduled(self) -> None:
        if self.state is _SCHEDULED:
            self.state = _IDLE
        self._slice_exhausted = False
        self.drive_on_loop()

    def drive_on_loop(self, descriptor: int | None = None) -> None:
        if self.state is _RESTING:
            self.state = _IDLE
        # A callback that the home loop had scheduled before it was left.
        if _get_running_loop() is not self.loop:
            return
        if self._driver_lock.locked():
            self.loop_watcher.watch(self.loop, {})
            # It may be an attempt, which hands nothing over, and timers must run after it.
            self.loop_watcher.set_timer(self.loop, monotonic() + _LONGEST_ATTEMPT if self._machine.timers else math.inf)
            return
        now, spin = monotonic(), self.waiting.await_spin if self.home else 0.0
        until, spin_until = now + (0.0 if self._slice_exhausted else _SLICE), now + spin
        with self.lock:
            if self.state is _CLOSED:  # another thread may have closed the machine while this one waited for the lock
                return
            if not self.home:
                self.idle_watch.begin(self.loop)
            moved = self._turn(None if descriptor is None else (descriptor,))
            while now < until and (moved or now < spin_until) and self._machine.busy() and not self._machine.finished:
                now = monotonic()
                if moved:
                    spin_until = now + spin
                else:
                    self.waiting.offer_core(now)
                moved = self._turn(None)
            self._slice_exhausted = now >= until
            now = self._expire()
            if now >= self.waiting.look_at:
                self.waiting.look(now)
            wanted = self._machine.waits() if self.home or self._machine.busy() else self.idle_watch.wanted()
            if wanted is not None and self.state is _IDLE and self._machine.busy():
                self.state = _RESTING
            at = self._machine.next_deadline()
            if wanted is not None:  # under the lock, because `retire` closes sockets that the loop does not watch
                self.loop_watcher.watch(self.loop, dict(wanted))
        self.loop_watcher.set_timer(self.loop, at)
        self._deliver()
        self._wake()
        if moved or wanted is None or self._inbox or self._slice_exhausted:
            self._schedule_loop()

    def close(self) -> None:
        """Stop driving. Afterwards no loop watches a descriptor of this machine."""
        if self.state is _CLOSED:
            return
        loop = self.loop
        if _get_running_loop() is loop or not loop.is_running():
            self._leave_loop()
        elif self._is_registered_on_loop():
            done = threading.Event()

            def leave() -> None:
                self._leave_loop()
                done.set()

            loop.call_soon_threadsafe(leave)
            done.wait()
        self.state = _CLOSED
        with self.lock:  # no driver will run the remaining actions
            while self._inbox:
                self._inbox.popleft()()
        self._waker = None
        self.home.close()

    def _is_registered_on_loop(self) -> bool:
        """Return whether the loop holds a callback of this machine; if not, close, so that it never gets one."""
        with self.lock:
            registered = self.loop_watcher.is_registered or self.state is _SCHEDULED or self.idle_watch.runs
            if not registered:
                self.state = _CLOSED
        return registered

    def _leave_loop(self) -> None:
        self.idle_watch.end()
        self.loop_watcher.leave(self.loop)
        self.state = _CLOSED
