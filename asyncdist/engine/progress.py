"""Who moves the bytes: one machine of pending operations, driven by one thread at a time.

A *machine* (the mesh of one rank) knows how to move everything that can move without waiting, and which file
descriptors to wait for when nothing can. `Progress` sees to it that somebody drives it:

* a thread that blocks in ``wait()`` drives it itself and sleeps in ``poll`` (the inline driver), so that a blocking
  call never hops to another thread and back;
* an event loop drives it with ``add_reader`` and ``add_writer`` (the loop driver) when work is awaited or left to
  itself. That is the loop in which the world was made, or the runtime's background loop for blocking programs;
* who merely issues an operation makes a first attempt on the spot.

An operation belongs to none of them: begun by one it may be finished by another. The rules:

1. The machine is touched only under ``_lock``, and nobody sleeps while holding it.
2. What has to happen under the lock is put into ``_inbox``; whoever gets the lock does it. Nobody queues for the lock
   just to issue: after releasing it one looks at the inbox once more.
3. At most one inline driver at a time (``_seat``); other blocked threads follow and are given the seat in turn.
4. While there is an inline driver the loop keeps its hands off; who leaves the seat arms the loop if work is left.
5. Users' callbacks run without the lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

from asyncdist.algorithms.schedule import Schedule
from asyncdist.engine.driver_loop import DriverLoop
from asyncdist.engine.idle_watch import IdleWatch
from asyncdist.engine.loop_watcher import LoopWatcher
from asyncdist.engine.machine import Failing, Finishable, Machine, Wait
from asyncdist.engine.waker import Waker
from asyncdist.errors import LoopThreadError

_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: None)
_SLICE = 1e-3  # seconds for which the loop driver goes on before it lets the loop's other callbacks run
_SPREAD_EVERY = 1e-3  # seconds after which who waits looks again whether its core is the right one


class Progress:
    """Sees to it that exactly one driver at a time advances a machine, and that there is one when it is needed.

    ``home`` is the loop that drives when nobody blocks, until it is closed; ``None`` takes the runtime's background
    loop, and only while something is pending.
    """

    def __init__(self, machine: Machine, home: asyncio.AbstractEventLoop | None = None) -> None:
        self._machine = machine
        self._spin = self._loop_spin = self._spread_at = 0.0
        self._polls, self._spins = 512, 1
        self._spread: Callable[[], None] | None = None
        self.home = DriverLoop(home, self._on_home_left)
        self._lock = threading.Lock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._driver_lock = threading.Lock()
        self._standby: deque[threading.Event] = deque()
        self._sleeping = self._yielding = self._scheduled = self._slice_exhausted = self._closed = False
        self._waker: Waker | None = None
        self._loop_watcher = LoopWatcher(self._drive_on_loop)
        self.idle_watch = IdleWatch(machine, self._lock, self._driver_lock, self._loop_watcher)

    def spin_for(self, spin: float, loop_spin: float, spread: Callable[[], None] | None) -> None:
        """Set for how many seconds an inline driver tries again before it sleeps, and the home loop before it turns.

        Where there is a ``spread``, peers need our core while we wait: they get it more often, and that is called too.
        """
        self._spread = spread
        self._spin, self._loop_spin = spin, loop_spin if self.home else 0.0
        # Looks before the core is offered; and at the call itself, in less time than making an operation takes.
        self._polls, self._spins = (2, 1) if spread or not spin else (512, 32)

    # -- for everyone --------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that drives when nobody blocks."""
        return self.home.loop

    def _on_home_left(self, home: asyncio.AbstractEventLoop) -> None:
        """Go on in the background: what was asked of a loop that has ended will never come."""
        self._scheduled, self._loop_spin = False, 0.0
        if home.is_closed():
            self._loop_watcher.forget()
        else:
            self._loop_watcher.leave(home)
        if not self._closed:
            self._schedule_loop()

    def submit(self, action: Callable[[], None]) -> None:
        """Do ``action`` under the lock: now if it is free, else whoever holds it does."""
        self._inbox.append(action)
        while self._inbox and self._lock.acquire(blocking=False):
            self._take_turn()
        self._wake_idle()

    def post(self, action: Callable[[], None]) -> None:
        """Have a driver do ``action`` soon; safe to call while another machine's lock is held."""
        self._inbox.append(action)
        self._wake()
        if not self._driver_lock.locked() and (self.home or self._loop_watcher.watched or self._machine.busy()):
            self._schedule_loop()

    def retire(self, sock: socket.socket) -> None:
        """Close a socket once no loop watches it. Called under the lock."""
        if self._loop_watcher.retire(sock):
            self._schedule_loop()

    def _turn(self, ready: Iterable[int] | None) -> bool:
        inbox, moved = self._inbox, False
        try:
            while inbox:
                inbox.popleft()()
                moved = True
            return self._machine.advance(ready) or moved
        except BaseException as cause:
            self._machine.interrupted(cause)
            self._schedule_loop()  # whoever waits for what has failed by this is to hear of it from another driver
            self._wake()
            raise

    def _take_turn(self) -> bool:
        try:  # the lock is ours
            moved = self._turn(None)
        finally:
            self._lock.release()
        self._deliver()
        return moved

    def _deliver(self) -> None:
        if self._machine.finished:
            for callback in self._machine.take_finished():
                callback()

    def _expire(self) -> float:
        now = monotonic()
        if now >= self._machine.next_deadline():
            self._machine.expire(now)
        return now

    def _offer_core(self, now: float) -> None:
        _yield_core()
        if self._spread and now >= self._spread_at:
            self._spread_at = now + _SPREAD_EVERY
            self._spread()

    # -- the inline driver ---------------------------------------------------------------------

    def refuse_loop_thread(self, what: str) -> None:
        """Raise LoopThreadError if a blocking wait in this thread would stop the very loop that it waits for."""
        running = asyncio._get_running_loop()
        if running is not None and running is self.loop:
            raise LoopThreadError(what)

    def run(self, action: Callable[[], None], work: Finishable, until: float) -> None:
        """Run ``action``, which starts ``work``, and drive until ``work`` is completed."""
        self._inbox.append(action)
        self.drive(work, until)

    def attempt(self, schedule: Schedule, group: Failing, *, wait: bool) -> bool:
        """Run a schedule that needs no links in this thread; ``wait`` lets it wait for peers as long as one spins.

        Not begun if its group has failed: where one was destroyed just now, its memory is another's.
        Returns whether it is over; else it is as far as it got, and perhaps not begun: an operation goes on with it.
        """
        if not self._driver_lock.acquire(False):
            return False
        try:
            if not self._lock.acquire(False):
                return False
            try:
                if group.error is not None or self._inbox or self._machine.operations:
                    return False
                until, polls, enough = 0.0, 0, self._polls if wait else self._spins
                end = 0.0 if wait or not asyncio._get_running_loop() else monotonic() + _SLICE  # a loop is to turn
                for step in schedule:
                    if step == ():
                        polls, until = 0, 0.0
                        if end and monotonic() >= end:
                            self._slice_exhausted = True
                            return False
                        continue
                    polls += 1
                    if polls == enough:
                        polls, now = 0, monotonic()
                        until = until or (now + self._spin if wait else now)
                        if now >= until:
                            return False
                        self._offer_core(now)
                return True
            except BaseException as cause:
                if not isinstance(cause, Exception):
                    self._machine.interrupted(cause)
                    self._schedule_loop()
                raise
            finally:
                self._lock.release()
        finally:
            self._driver_lock.release()
            if self._standby or self._inbox:
                self._hand_over()

    def drive(self, work: Finishable, until: float) -> None:
        """Block until ``work`` is completed or the monotonic time ``until`` has come, driving meanwhile."""
        while not work.is_completed():
            if self._driver_lock.acquire(blocking=False):
                try:
                    self._drive_locked(work, until)
                finally:
                    self._driver_lock.release()
                    self._hand_over()
                return
            if not self._follow(work, until):
                return

    def _drive_locked(self, work: Finishable, until: float) -> None:
        ready: Iterable[int] | None = None
        now = spin_until = 0.0
        while True:
            waits: list[Wait] | None = None
            with self._lock:
                moved = self._turn(ready)
                if not work.is_completed():
                    now = self._expire()
                    if moved:
                        spin_until = now + self._spin
                    elif now >= spin_until:
                        waits = self._machine.waits()
                        self._waker = self._waker or Waker()  # before the word: who reads it finds a waker to ring
                        self._sleeping = waits is not None
                    else:  # a peer may share it; two that both want to run are soon moved apart
                        self._offer_core(now)
            self._deliver()
            if work.is_completed() or now >= until:
                self._sleeping = False
                return
            ready = None if waits is None else self._sleep(waits, until)

    def _sleep(self, waits: list[Wait], until: float) -> list[int] | None:
        """Sleep until a descriptor is ready, somebody rings, or it is time; return the ready ones, None if not known."""
        try:
            waker = self._waker
            if waker is None or self._inbox:  # put there between our turn and our falling asleep
                return None
            return waker.sleep(waits, min(until, self._machine.next_deadline()) - monotonic())
        finally:
            self._sleeping = False

    def _follow(self, work: Finishable, until: float) -> bool:
        """Wait until another driver has completed ``work`` or left its seat; False if time is up."""
        event = threading.Event()
        self._standby.append(event)

        def completed(_: object) -> None:
            event.set()

        work.add_done_callback(completed)
        try:
            self.submit(lambda: None)  # what `run` has put into the inbox must not wait for the sleeper
            if self._driver_lock.locked() and not work.is_completed():
                event.wait(None if until == math.inf else max(0.0, until - monotonic()))
            return monotonic() < until
        finally:
            self._standby.remove(event)
            work.remove_done_callback(completed)

    def _hand_over(self) -> None:
        for event in list(self._standby):
            event.set()
        if self._inbox or self._machine.busy():  # a follower may have what it waits for, and not take the seat
            self.ensure_driven()

    def _wake(self) -> None:
        """Wake an inline driver that fell asleep over what it saw before our turn, which may have ended its work."""
        if self._sleeping and (waker := self._waker) is not None:
            waker.ring()

    def _wake_idle(self) -> None:
        """Wake whoever fell asleep before our turn, in which we have told the peers that nobody has to be rung for."""
        self._wake()
        if self._yielding and not self._driver_lock.locked():
            self._schedule_loop()

    # -- the loop driver -----------------------------------------------------------------------

    def ensure_driven(self) -> None:
        """See that the loop drives what is pending, unless somebody blocks and does it anyway."""
        if self._driver_lock.locked() or self._closed:
            return
        if asyncio._get_running_loop() is self.loop and not self._slice_exhausted:
            self._drive_on_loop()
        else:
            self._schedule_loop()

    def try_now(self, work: Finishable) -> None:
        """Try for a moment to complete ``work`` on the spot, unless this turn of the loop has had its slice."""
        now = monotonic()
        until, end = now + self._loop_spin, now + _SLICE
        while not (self._slice_exhausted or self._driver_lock.locked()) and self._lock.acquire(blocking=False):
            moved = self._take_turn()
            if work.is_completed():
                break
            now = monotonic()
            self._slice_exhausted = now >= end
            if now >= until and not moved:
                break
            if not moved:
                self._offer_core(now)
        self._wake_idle()
        if (
            self._inbox and not self._driver_lock.locked()
        ):  # put there while we held the lock, by who could not wait for it
            self._schedule_loop()

    def _schedule_loop(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            loop = self.loop
            with contextlib.suppress(RuntimeError):  # the loop was closed under us: nothing is left to drive
                soon = loop.call_soon if asyncio._get_running_loop() is loop else loop.call_soon_threadsafe
                soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        self._scheduled = self._slice_exhausted = False
        self._drive_on_loop()

    def _drive_on_loop(self, descriptor: int | None = None) -> None:
        self._yielding = False
        if asyncio._get_running_loop() is not self.loop:  # what the home loop had still to call when it was left
            return
        if self._driver_lock.locked():
            self._loop_watcher.watch(self.loop, {})
            return
        now = monotonic()
        until, spin_until = now + (0.0 if self._slice_exhausted else _SLICE), now + self._loop_spin
        with self._lock:
            if self._closed:  # perhaps while we waited for the lock; the machine's sockets are closed too
                return
            if not self.home:
                self.idle_watch.begin(self.loop)
            moved = self._turn(None if descriptor is None else (descriptor,))
            while now < until and (moved or now < spin_until) and self._machine.busy() and not self._machine.finished:
                now = monotonic()
                if moved:
                    spin_until = now + self._loop_spin
                else:
                    self._offer_core(now)
                moved = self._turn(None)
            self._slice_exhausted = now >= until
            self._expire()
            wanted = self._machine.waits() if self.home or self._machine.busy() else []
            self._yielding = wanted is not None and self._machine.busy()
            at = self._machine.next_deadline()
            if wanted is not None:  # under the lock: who retires a socket would close it under the loop's eyes
                self._loop_watcher.watch(self.loop, dict(wanted))
        self._loop_watcher.set_timer(self.loop, at)
        self._deliver()
        self._wake()
        if moved or wanted is None or self._inbox or self._slice_exhausted:
            self._schedule_loop()

    def close(self) -> None:
        """Stop driving; afterwards no loop watches anything of this machine's."""
        if self._closed:
            return
        loop = self.loop
        if asyncio._get_running_loop() is loop or not loop.is_running():
            self._leave_loop()
        elif self._is_registered_on_loop():
            done = threading.Event()

            def leave() -> None:
                self._leave_loop()
                done.set()

            loop.call_soon_threadsafe(leave)
            done.wait()
        self._closed = True
        with self._lock:  # what was left to a driver that has none to follow it
            while self._inbox:
                self._inbox.popleft()()
        self._waker = None
        self.home.close()

    def _is_registered_on_loop(self) -> bool:
        """Return whether the loop has anything of ours; if not, it gets nothing any more, though it waits for the lock."""
        with self._lock:
            looks = self._loop_watcher.looks or self._scheduled or self.idle_watch.runs
            self._closed = not looks
        return looks

    def _leave_loop(self) -> None:
        self.idle_watch.end()
        self._loop_watcher.leave(self.loop)
        self._closed = True
