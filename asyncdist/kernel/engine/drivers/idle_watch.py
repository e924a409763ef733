"""Watches the peers of a blocking program between its calls, when no thread drives its operations."""

from __future__ import annotations

import asyncio
from time import monotonic

from asyncdist.base.callables import Callback
from asyncdist.kernel.engine.drivers.loop_watcher import LoopWatcher
from asyncdist.kernel.engine.drivers.turns import Turns, give_back, holds
from asyncdist.kernel.transport.base import Wait

PERIOD = 0.3
"""Seconds between two checks for calls. After one period without a call the loop watches the descriptors."""
LONG_PERIOD = 1.0
"""Seconds between two checks while the loop watches the descriptors already, or a thread drives."""


class IdleWatch:
    """Makes an event loop watch a machine's descriptors while the program makes no calls.

    Without it, a blocking program detects a lost peer only at its next call. To cost a call nothing, the watch compares
    ``last_call()`` with its value one period before. The loop watches the descriptors only after a period without a call,
    and stops at the first event on one of them after a call.

    Attributes:
        last_call: Returns an object that differs from one call to the next; None until `Endpoint.finalize` sets it.
    """

    def __init__(self, turns: Turns, loop_watcher: LoopWatcher) -> None:
        self._turns, self._machine, self._loop_watcher = turns, turns.machine, loop_watcher
        self.last_call: Callback | None = None
        self._seen: object = None
        self._complete = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        """Whether the loop holds a timer for the next check."""
        return self._timer is not None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to check for calls. Call it on the loop's thread."""
        if self._timer is None and self.last_call is not None:
            self._seen = self.last_call()
            self._timer = loop.call_later(PERIOD, self._check, loop)

    def end(self) -> None:
        """Stop checking. Call it on the loop's thread, or after the loop has stopped."""
        self.last_call = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wanted(self) -> list[Wait] | None:
        """Return the descriptors to watch after an event on one of them; None if something has moved."""
        if not self._complete or self.last_call is None or self.last_call() is not self._seen:
            return []
        wanted = self._machine.waits()
        # Withdraw the request of `waits` that peers signal new data, which would cost them a system call.
        self._machine.advance(())
        return wanted

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self.last_call is None:
            return
        before, self._seen = self._seen, self.last_call()
        quiet = self._seen is before
        driven = self._turns.is_driven or self._machine.busy()
        # A call may have opened connections that the loop does not watch yet.
        self._complete = self._complete and quiet and bool(self._loop_watcher.watched)
        if quiet and not driven and not self._complete:
            lock = self._turns.lock
            try:
                if not holds(lock) and lock.acquire(False):
                    self._watch(loop)
            finally:
                give_back(lock)
        period = LONG_PERIOD if driven or self._complete else PERIOD
        self._timer = loop.call_later(period, self._check, loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._complete = True
        wanted = self.wanted()
        if wanted is None:
            self._complete = False
        else:
            self._loop_watcher.watch(loop, dict(wanted))
        if self._machine.busy():
            self._loop_watcher.set_timer(loop, monotonic())
