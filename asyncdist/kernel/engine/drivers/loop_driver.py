"""Drives a machine from an event loop while no thread blocks.

The driver is in one of five states (`LoopState`)::

                 schedule()             _run_scheduled()
      IDLE ------------------> SCHEDULED ---------------> IDLE
        |                          ^
        | the loop has driven, and | schedule()
        v an operation is pending  |
      RESTING or DEFERRING --------+          any state --- close() ---> CLOSED

The loop drives the machine in ``_run_scheduled``, when a watched descriptor is ready, and when the timer fires. In
RESTING the peers signal new data, because the machine has requested it; a turn of another thread ends that, so the
thread schedules the loop again.

DEFERRING serves blocking programs that make one call after another while they expect a message, such as the stages of a
pipeline. To watch descriptors for the message would wake the background loop at each call. So the loop does not watch
them before the program has made no call for a moment. Until then the calls drive the receive.

`HomeLoop` replaces the user's loop by the background loop when the user's loop ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import math
import socket
import threading
from asyncio import _get_running_loop
from time import monotonic

from asyncdist.base.background_loop import LOOP_PATIENCE
from asyncdist.base.deadline import Deadline
from asyncdist.base.descriptors import is_exhausted
from asyncdist.errors import UsageError
from asyncdist.kernel.engine.drivers.home_loop import HomeLoop
from asyncdist.kernel.engine.drivers.idle_watch import IdleWatch
from asyncdist.kernel.engine.drivers.loop_watcher import LoopWatcher
from asyncdist.kernel.engine.drivers.turns import LONGEST_ATTEMPT, TIME_SLICE, Turns, holds
from asyncdist.kernel.transport.base import Wait


class LoopState(enum.Enum):
    """The next step of the loop driver."""

    IDLE = enum.auto()
    """Nothing is pending, or another thread drives."""
    SCHEDULED = enum.auto()
    """The loop is about to call `_run_scheduled`."""
    RESTING = enum.auto()
    """An operation is pending, and peers signal new data on the watched descriptors."""
    DEFERRING = enum.auto()
    """Only receives are pending, and the program makes calls. The timer fires soon, and no descriptor is watched."""
    CLOSED = enum.auto()
    """The machine is closed. No state follows."""


_IDLE, _SCHEDULED, _RESTING, _DEFERRING, _CLOSED = LoopState

_LOOP_CHECK_INTERVAL = 0.05
"""Seconds between two checks, by a thread that waits for the loop, whether the loop has ended."""
_DEFERRAL = 1e-3
"""Seconds without a call after which the loop watches descriptors for messages that the program expects."""


class LoopDriver:
    """The loop driver of one machine.

    Args:
        home: The event loop to drive from, until that loop ends; None for the background loop.
    """

    def __init__(self, turns: Turns, home: asyncio.AbstractEventLoop | None) -> None:
        self._turns, self._machine = turns, turns.machine
        self.home = HomeLoop(home, self._on_home_left)
        self.state = _IDLE
        self.watcher = LoopWatcher(self.drive)
        self.idle_watch = IdleWatch(turns, self.watcher)
        self._last_call: object = None

    def _on_home_left(self, home: asyncio.AbstractEventLoop) -> None:
        """Continue on the background loop: a loop that has ended runs no more callbacks."""
        if home.is_closed():
            self.watcher.forget()
        else:
            self.watcher.leave(home)
        if self.state is not _CLOSED:
            self.state = _IDLE
            self.schedule()

    # -- for every thread ----------------------------------------------------------------------

    def schedule(self) -> None:
        """Let the loop drive soon."""
        if self.state in (_IDLE, _RESTING, _DEFERRING):
            loop = self._existing_loop()
            if loop is None:
                return
            self.state = _SCHEDULED
            with contextlib.suppress(RuntimeError):  # another thread has closed the loop
                call_soon = loop.call_soon if _get_running_loop() is loop else loop.call_soon_threadsafe
                call_soon(self._run_scheduled)

    def resume(self) -> None:
        """Let the loop continue what is pending, after a thread has driven."""
        if self.state is not _DEFERRING or self._turns.inbox or not self._machine.only_receives():
            self.schedule()

    def _existing_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the loop; if the process has no descriptors for the background loop, fail all operations and return
        None."""
        try:
            return self.home.loop
        except OSError as cause:
            if not is_exhausted(cause):
                raise
            self._turns.inbox.append(functools.partial(self._machine.interrupted, cause))
            return None

    def retire(self, sock: socket.socket) -> None:
        """Close a socket once no loop watches it. Called under the lock."""
        self._turns.assert_held()
        if self.watcher.retire(sock):
            self.schedule()

    # -- on the loop ---------------------------------------------------------------------------

    def _run_scheduled(self) -> None:
        if self.state is _SCHEDULED:
            self.state = _IDLE
        self._turns.slice_exhausted = False
        self.drive()

    def drive(self, descriptor: int | None = None) -> None:
        """Drive for a time slice, unless a thread does, and choose when to drive again. Called on the loop's thread.

        Args:
            descriptor: The descriptor that is ready; None if none is known.
        """
        turns, machine = self._turns, self._machine
        if self.state is _RESTING:
            self.state = _IDLE  # before the look at the driver lock; see `Attempts.run`
        loop = self.home.loop
        # A callback that the home loop had scheduled before it was left.
        if _get_running_loop() is not loop:
            return
        if turns.is_driven:
            self.watcher.watch(loop, {})
            # It may be an attempt, which hands over nothing but receives, and timers must run after it.
            again = _DEFERRAL if self.state is _DEFERRING else LONGEST_ATTEMPT if machine.timers else math.inf
            self.watcher.set_timer(loop, monotonic() + again)
            return
        if holds(turns.lock):  # a signal handler has interrupted a turn, after which the loop is scheduled
            return
        with turns.lock:
            if self.state is _CLOSED:  # another thread may have closed the machine while this one waited for the lock
                return
            if self.state is _DEFERRING:
                self.state = _IDLE
            if not self.home:
                self.idle_watch.begin(loop)
            moved = self._take_turns(descriptor)
            now = turns.expire()
            if now >= turns.waiting.look_at:
                turns.waiting.look(now)
            at = machine.next_deadline()
            wanted: list[Wait] | None = []
            if not moved and self._defers():
                at = min(at, now + _DEFERRAL)
            else:
                wanted = machine.waits() if self.home or machine.busy() else self.idle_watch.wanted()
                if wanted is not None and self.state is _IDLE and machine.busy():
                    self.state = _RESTING
            if wanted is not None:  # under the lock, because `retire` closes sockets that the loop does not watch
                self.watcher.watch(loop, dict(wanted))
        self.watcher.set_timer(loop, at)
        turns.deliver()
        turns.wake()
        if moved or wanted is None or turns.inbox or turns.slice_exhausted:
            self.schedule()

    def _defers(self) -> bool:
        """Return whether only receives are pending, and the program has made a call since the loop last drove."""
        last_call = self.idle_watch.last_call
        if self.home or self._turns.in_trio or last_call is None or not self._machine.operations:
            return False
        before, self._last_call = self._last_call, last_call()
        if self._last_call is before or self.state is not _IDLE or not self._machine.only_receives():
            return False
        self.state = _DEFERRING
        return True

    def _take_turns(self, descriptor: int | None) -> bool:
        """Drive the machine under the lock until the time slice ends or it waits; return whether it moved last."""
        turns, machine = self._turns, self._machine
        now, spin = monotonic(), turns.waiting.await_spin if self.home else 0.0
        until, spin_until = now + (0.0 if turns.slice_exhausted else TIME_SLICE), now + spin
        moved = turns.turn(None if descriptor is None else (descriptor,))
        while now < until and (moved or now < spin_until) and machine.busy() and not machine.finished:
            now = monotonic()
            if moved:
                spin_until = now + spin
            else:
                turns.waiting.offer_core(now)
            moved = turns.turn(None)
        turns.slice_exhausted = now >= until
        return moved

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop driving. Afterwards no loop watches a descriptor of this machine."""
        left = False
        while not left:
            loop = self.home.loop
            if _get_running_loop() is loop or not loop.is_running():
                self._leave(loop)
                break
            if not self._is_registered():
                break
            left = self._leave_on(loop)
        self.state = _CLOSED

    def _leave_on(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Leave a loop of another thread in that thread; return False if the loop has ended instead.

        Raises:
            UsageError: The loop runs nothing, as when its thread waits for this one. It leaves when it runs again.
        """
        done = threading.Event()

        def leave() -> None:
            if self.home.loop is loop:
                self._leave(loop)
                done.set()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(leave)
        deadline = Deadline.after(LOOP_PATIENCE)
        while not done.wait(_LOOP_CHECK_INTERVAL):
            if self.home.loop is not loop or not loop.is_running():
                return False
            if deadline.expired():
                raise UsageError(
                    f"the event loop of this world has run nothing for {LOOP_PATIENCE:g} s while another thread "
                    "destroys the world: destroy it on the loop, or let the loop's thread not wait for the thread that does"
                )
        return True

    def _is_registered(self) -> bool:
        """Return whether the loop holds a callback of this machine; if not, close, so that it never gets one."""
        with self._turns.lock:
            registered = self.watcher.is_registered or self.state is _SCHEDULED or self.idle_watch.runs
            if not registered:
                self.state = _CLOSED
        return registered

    def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        self.idle_watch.end()
        self.watcher.leave(loop)
        self.state = _CLOSED
