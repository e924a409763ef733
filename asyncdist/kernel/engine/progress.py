"""The progress engine: drives the pending operations of one rank, on one thread at a time.

A `Machine` (the rank's `Endpoint`) moves everything that can move without waiting, and names the file descriptors to wait
for when nothing can. `Progress` makes sure that a *driver* calls it:

* The inline driver is a thread that blocks in ``wait()``. It drives the machine itself and sleeps in ``poll``, so a
  blocking call needs no thread switch.
* The loop driver (`LoopDriver`) is an event loop that drives through ``add_reader`` and ``add_writer`` while no thread
  blocks. It is the loop in which the world was opened, or the runtime's background loop for blocking programs.
* A thread that only issues an operation tries once, inline, to complete it. `Attempts` does so for short collectives.

An operation belongs to no driver: one driver may begin it and another complete it. The rules:

1. A thread touches the machine only under ``lock``. No thread sleeps while it holds ``lock``.
2. An action that needs the lock goes into the queue ``inbox``. The thread that holds the lock runs it. No thread waits for
   the lock in order to issue: after it releases the lock, a thread checks the queue again.
3. At most one inline driver exists: the holder of ``driver_lock``, or the thread that makes an attempt. Other blocked
   threads stand by and take over in turn.
4. While an inline driver exists, the loop does not drive. The thread that stops driving schedules the loop if work is left.
5. Callbacks of the user run without the lock.

`Turns` holds the state that the drivers share.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import _get_running_loop
from collections.abc import Iterable
from threading import get_ident
from time import monotonic

from asyncdist.base.call_site import refuse_await
from asyncdist.base.callables import Callback, Predicate
from asyncdist.base.deadline import wait_until_set
from asyncdist.errors import LoopThreadError, UsageError
from asyncdist.kernel.engine.drivers.attempts import Attempts
from asyncdist.kernel.engine.drivers.loop_driver import LoopDriver, LoopState
from asyncdist.kernel.engine.drivers.turns import TIME_SLICE, Promises, Turns, give_back, holds
from asyncdist.kernel.engine.machine import Finishable, Machine
from asyncdist.kernel.transport.base import Wait

_INTERRUPTED = (
    "this call cannot wait: a signal handler, a finalizer or a trace function made it while its thread was in the middle "
    "of another call of asyncdist; what it has started continues. Let it only set a flag, and make the call afterwards"
)


class Progress:
    """Ensures that a machine has exactly one driver while operations are pending.

    Args:
        home: The event loop that drives while no thread blocks, until that loop ends. By default the background loop
            drives, and only while an operation is pending.

    Attributes:
        attempt: Runs a short collective inline; see `Attempts.run`.
        home: The loop that drives while no thread blocks.
        loop_driver: Drives from that loop.
        promises: The threads that have promised to drive what they start.
        retire: Closes a socket once no loop watches it. Called under the lock.
        turns: The state that the drivers share.
        waiting: How the drivers wait for peers.
    """

    def __init__(self, machine: Machine, home: asyncio.AbstractEventLoop | None = None) -> None:
        self._machine = machine
        self.turns = turns = Turns(machine, self._schedule_loop)
        self.waiting = turns.waiting
        self.loop_driver = LoopDriver(turns, home)
        self.home, self.retire = self.loop_driver.home, self.loop_driver.retire
        self.promises = Promises(self._hand_over)
        # Bound here, because a forwarding method would cost each call a Python frame.
        self.attempt = Attempts(turns, self.loop_driver, self._hand_over).run

    # -- for every thread ----------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that drives while no thread blocks."""
        return self.home.loop

    def submit(self, action: Callback) -> None:
        """Run ``action`` under the lock: now if the lock is free, else on the thread that holds it."""
        turns = self.turns
        turns.inbox.append(action)
        while turns.inbox and turns.take() is not None:
            pass
        self._wake_idle()

    def look(self, action: Predicate) -> None:
        """Run ``action`` under the lock, before the actions in the queue; let a driver continue if it returns True.

        The thread that holds the lock runs it if the lock is not free. The calling thread must go on beating, so it
        neither drives nor runs callbacks.
        """
        turns = self.turns
        try:
            if holds(turns.lock) or not turns.lock.acquire(False):
                turns.inbox.appendleft(action)
            elif action():
                turns.inbox.append(_nothing)
        except BaseException as cause:
            turns.interrupt(cause)
            raise
        finally:
            give_back(turns.lock)
        if turns.inbox:
            turns.wake()
            if not turns.is_driven:
                self._schedule_loop()

    def post(self, action: Callback) -> None:
        """Let a driver run ``action`` soon. Safe to call while the lock of another machine is held."""
        turns = self.turns
        turns.inbox.append(action)
        turns.wake()
        watched = self.loop_driver.watcher.watched
        if not turns.is_driven and (self.home or watched or self._machine.busy()):
            self._schedule_loop()

    def ensure_driven(self) -> None:
        """Let the loop drive the pending operations, unless a blocked thread drives them already."""
        turns, driver = self.turns, self.loop_driver
        if turns.is_driven or driver.state is LoopState.CLOSED or self.promises.is_made_here():
            return
        running = _get_running_loop()
        if running is not None and running is self.loop and not turns.slice_exhausted:
            driver.drive()
        else:
            driver.resume()

    def try_now(self, work: Finishable) -> None:
        """Try for a moment to complete ``work`` inline, unless this turn of the loop has used its time slice."""
        turns, now = self.turns, monotonic()
        until, end = now + (self.waiting.await_spin if turns.in_trio or self.home else 0.0), now + TIME_SLICE
        while not (turns.slice_exhausted or turns.is_driven) and (moved := turns.take()) is not None:
            if work.is_completed():
                break
            now = monotonic()
            turns.slice_exhausted = now >= end
            if now >= until and not moved:
                break
            if not moved:
                self.waiting.offer_core(now)
        self._wake_idle()
        if turns.inbox and not turns.is_driven:
            self._schedule_loop()

    def _schedule_loop(self) -> None:
        self.loop_driver.schedule()

    def _wake_idle(self) -> None:
        """Wake any driver that has been asleep since before this turn: since the turn, peers no longer wake this rank."""
        self.turns.wake()
        if self.loop_driver.state is LoopState.RESTING and not self.turns.is_driven:
            self._schedule_loop()

    # -- the inline driver ---------------------------------------------------------------------

    def refuse_loop_thread(self, what: str) -> None:
        """Raise LoopThreadError if a blocking wait in this thread would stop the very loop that it waits for.

        In a coroutine, raise UsageError if the program awaits a call of the blocking API.
        """
        if (running := _get_running_loop()) is not None:
            refuse_await()
            if running is self.loop:
                raise LoopThreadError(what)

    def drive(self, work: Finishable, until: float, start: Callback | None = None) -> None:
        """Drive, or wait for another driver, until ``work`` is completed or the monotonic time is ``until``.

        A callback, or a signal handler that has interrupted the thread's sleep, may call it in a call of `drive`.

        Args:
            work: What the thread waits for.
            until: The time at which it stops waiting.
            start: Starts the work; None if it has started.

        Raises:
            UsageError: The caller has interrupted this thread within a turn, which cannot go on before it returns.
        """
        turns, thread = self.turns, get_ident()
        if start is not None:
            turns.inbox.append(start)
        elif work.is_completed():
            return
        if turns.attempting == thread or holds(turns.lock):
            raise UsageError(_INTERRUPTED)
        if turns.driving == thread:
            self._drive_within(work, until)
            return
        try:
            while turns.attempting or not turns.driver_lock.acquire(False):
                if not self._follow(work, until) or work.is_completed():
                    return
            turns.driving = thread
            self._drive_locked(work, until)
        finally:
            if turns.driving == thread:
                turns.driving = 0
            if give_back(turns.driver_lock):
                self._hand_over()

    def _drive_within(self, work: Finishable, until: float) -> None:
        """Drive in a callback or a signal handler, which has interrupted the sleep of this thread's outer `drive`."""
        try:
            self._drive_locked(work, until)
        finally:
            # The outer call may sleep on, although its work is complete.
            if (waker := self.turns.waker) is not None:
                waker.ring()

    def _drive_locked(self, work: Finishable, until: float) -> None:
        turns, waiting = self.turns, self.waiting
        ready: Iterable[int] | None = None
        spin_until = (now := monotonic()) + waiting.spin
        while True:
            waits: list[Wait] | None = None
            with self.turns.lock:
                moved = turns.turn(ready)
                completed = work.is_completed()
                if not completed:
                    now = turns.expire()
                    if moved:
                        spin_until = now + waiting.spin
                    elif now >= spin_until:
                        waits = turns.prepare_sleep()
                    else:  # a peer may need this core
                        waiting.offer_core(now)
                    if now >= waiting.look_at:
                        waiting.look(now)
            if self._machine.finished:
                turns.deliver()
            if completed or work.is_completed() or now >= until:
                turns.sleeping = False
                return
            ready = None if waits is None else turns.sleep(waits, until)

    def _follow(self, work: Finishable, until: float) -> bool:
        """Wait until another driver has completed ``work`` or stopped driving; return False if the time is up."""
        turns, event = self.turns, threading.Event()
        turns.standby.append(event)

        def completed(_: object) -> None:
            event.set()

        work.add_done_callback(completed)
        try:
            self.submit(_nothing)  # run the action that `drive` added: the driver may be asleep
            if turns.is_driven and not work.is_completed():
                wait_until_set(event, until - monotonic())
            return monotonic() < until
        finally:
            turns.standby.remove(event)
            work.remove_done_callback(completed)

    def _hand_over(self) -> None:
        """Let other drivers continue: this thread has stopped driving."""
        for event in list(self.turns.standby):
            event.set()
        if self.turns.inbox or self._machine.busy():
            self.ensure_driven()

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop driving. Afterwards no loop watches a descriptor of this machine."""
        if self.loop_driver.state is LoopState.CLOSED:
            return
        self.loop_driver.close()
        with self.turns.lock:  # no driver will run the remaining actions
            while self.turns.inbox:
                self.turns.inbox.popleft()()
        self.turns.waker = None
        self.home.close()


def _nothing() -> None:
    """Do nothing: the driver that runs this also continues what is pending, and runs callbacks."""
