"""The process's background thread with an event loop: made when first needed, wound down when the process ends.

It serves what must go on while the program's own threads compute: an embedded store, and collectives that were issued
from blocking code with ``async_op=True``. Programs with a loop of their own need it only for the embedded store.

A process that ends starts no second one, for whoever still asks; and it waits only so long for the one that it has.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncdist.base import lifecycle
from asyncdist.errors import LoopThreadError, UsageError

T = TypeVar("T")

_AT_EXIT = 2.0
"""Seconds that a process that ends waits for its loop: a task may not take its end, or a user's callback may block."""

new_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    from uvloop import new_event_loop as new_loop
except ImportError:  # Windows, or an interpreter that uvloop does not know yet
    from asyncio import new_event_loop as new_loop


class BackgroundLoop:
    """One event loop in a thread of its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop: asyncio.AbstractEventLoop = new_loop()
        self._told = threading.Lock()  # taken once, and kept, by who tells the loop to stop
        self._thread = threading.Thread(target=self._main, name="asyncdist-runtime", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self.loop.close()
            if not lifecycle.ending():
                raise  # else this is Python 3.12.0 or 3.12.1, which start no thread for a process that ends

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            _end_tasks(self.loop)
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            _end_tasks(self.loop)
            with warnings.catch_warnings():
                # Where a warning of a connection left on it is an error, uvloop does not close that, and waits for ever.
                warnings.simplefilter("ignore", ResourceWarning)
                self.loop.close()

    @property
    def closed(self) -> bool:
        return not self._thread.is_alive() or self.pid != os.getpid()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop and return its future. Raises UsageError once the process has ended the loop."""
        if self.closed:
            coroutine.close()
            raise UsageError("this process is ending, and its background loop has ended: call this before that")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and return its result; an interrupt of the caller cancels it.

        Raises LoopThreadError on the loop's own thread, where waiting would never end, and TimeoutError after
        ``timeout`` seconds, which cancels the coroutine too.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise LoopThreadError("a blocking call")
        future = self.submit(coroutine)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Call a plain function on the loop's thread and return its result."""

        async def caller() -> T:
            return function()

        return self.run(caller())

    def close(self, timeout: float | None = None) -> None:
        """Cancel what is left, stop the loop and join its thread, or leave that to itself after ``timeout`` seconds.

        What does not take its end is not torn apart: the thread goes with the process.
        """
        if self.closed:
            return
        if self._told.acquire(blocking=False):  # told twice, it would stop in the middle of winding down
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout)


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel every task, and those that come of it, such as a connection's that is tried to be made again."""
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks))


def on_loop(loop: asyncio.AbstractEventLoop | None, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Start a coroutine on the running loop (None), or on that of another thread; return a future of the running one."""
    if loop is None or loop is asyncio.get_running_loop():
        return asyncio.ensure_future(coroutine)
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


_current: BackgroundLoop | None = None
_lock = threading.Lock()


def background_loop() -> BackgroundLoop:
    """Return the process's runtime; start it if there is none (also after a fork, which leaves threads behind).

    One that is being closed is still the one, for what is left on its loop; and in a process that ends there is no other
    after it: whoever asks then finds its loop closed.
    """
    global _current
    with _lock:
        if _current is None or (_current.closed and not lifecycle.ending()):
            _current = BackgroundLoop()
        return _current


def close_background_loop(timeout: float | None = None) -> None:
    """Stop the process's runtime if there is one, as `BackgroundLoop.close` does; the next `background_loop()` starts a new one."""
    with _lock:
        current = _current
    if current is not None:
        current.close(timeout)


lifecycle.at_exit(lifecycle.Stage.LOOP, lambda: close_background_loop(_AT_EXIT))
