"""Threads that drive while the loop that should is stopped, and that run functions which may block on an operation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.kernel.engine.machine import Finishable

if TYPE_CHECKING:
    from asyncdist.kernel.engine.progress import Progress

STALL_CHECK_INTERVAL = 0.05
"""Seconds between two checks, by a task that awaits on another loop, whether the driver loop is stopped."""

# A function that runs here may wait for another one that runs here, so no number of threads is enough.
_blocking_calls = DaemonThreadPool("asyncdist-futures", max_threads=32, grows=True)


def call_in_thread(function: Callable[[], object]) -> None:
    """Run a function that may block on another operation in a daemon thread, never on the driving thread."""
    # An interpreter that shuts down starts no thread.
    with contextlib.suppress(RuntimeError):
        _blocking_calls.submit(function)


def drive_for_stopped_loop(progress: Progress, work: Finishable) -> None:
    """Drive for one interval in a daemon thread if the driver loop is stopped and no such thread drives yet."""
    home = progress.home

    def drive() -> None:
        try:
            progress.drive(work, monotonic() + STALL_CHECK_INTERVAL)
        finally:
            home.replaced = False

    if home.is_stopped and not home.replaced:
        home.replaced = True
        call_in_thread(drive)


class StallCheck:
    """A timer of an event loop that waits for a work: it lets a thread drive while the driver loop is stopped."""

    def __init__(self, work: Finishable, progress: Progress, loop: asyncio.AbstractEventLoop) -> None:
        self._work, self._progress, self._loop = work, progress, loop
        self._check()

    def _check(self) -> None:
        drive_for_stopped_loop(self._progress, self._work)
        self._timer = self._loop.call_later(STALL_CHECK_INTERVAL, self._check)

    def cancel(self) -> None:
        self._timer.cancel()


def drive_for(work: Finishable, progress: Progress | None, loop: asyncio.AbstractEventLoop) -> StallCheck | None:
    """Make sure that ``work``, for which ``loop`` waits, is driven; return the check to cancel after the wait."""
    if progress is None:
        return None
    progress.ensure_driven()
    return StallCheck(work, progress, loop) if progress.home and progress.loop is not loop else None
