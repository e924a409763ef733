"""The process's background thread with an event loop: started on first use, ended at the exit of the process.

It runs an embedded store, and the collectives that blocking code issues with ``async_op=True``, while the program's own
threads compute. A program with its own event loop needs it only for the embedded store.

A service that must answer while that thread is busy, such as a rank's status port, runs on `observing_loop`, a second
loop of the same kind.

A process that exits starts no further background loop, and waits at most `_AT_EXIT` seconds for those that it has.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from asyncdist.base import lifecycle
from asyncdist.base.call_site import refuse_await
from asyncdist.base.callables import Supplier
from asyncdist.base.deadline import LONGEST_SLEEP, Deadline
from asyncdist.base.descriptors import ClosingOnError, naming_exhaustion
from asyncdist.base.interrupts import shorten_interrupts
from asyncdist.errors import LoopThreadError, UsageError

log = logging.getLogger("asyncdist")

T = TypeVar("T")

_AT_EXIT = 2.0
"""Seconds for which a process waits at exit for its loop: a task may ignore its cancellation, a callback may block."""

_RUNTIME = "asyncdist-runtime"
"""The name of the thread of `background_loop`."""
LOOP_PATIENCE = 10.0
"""Seconds for which a thread waits for a loop of another thread that runs no callback."""

new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop


class BackgroundLoop:
    def __init__(self, name: str = _RUNTIME) -> None:
        shorten_interrupts()
        self.pid = os.getpid()
        with naming_exhaustion():
            self.loop: asyncio.AbstractEventLoop = new_loop()
        self._stop_requested = threading.Lock()
        """Acquired once, and never released, by the thread that stops the loop."""
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self.loop.close()
            if not lifecycle.ending():
                raise
            # Python 3.12.0 and 3.12.1 start no thread in a process that exits.

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self._run_until_stopped()
        finally:
            _end_tasks(self.loop)
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            _end_tasks(self.loop)
            with warnings.catch_warnings():
                # If a warning about an open connection is an error, uvloop leaves the connection open and never returns.
                warnings.simplefilter("ignore", ResourceWarning)
                self.loop.close()

    def _run_until_stopped(self) -> None:
        while True:
            try:
                self.loop.run_forever()
                return
            # asyncio lets KeyboardInterrupt and SystemExit of a callback or task end the loop, which others need.
            except BaseException:
                log.exception("a callback or task on %s raised", self._thread.name)
                if self._stop_requested.locked():
                    return

    @property
    def closed(self) -> bool:
        return not self._thread.is_alive() or self.pid != os.getpid()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop and return its future. Raises UsageError if the process exits and has ended it."""
        if self.closed:
            coroutine.close()
            raise UsageError("this process is exiting, and its background loop has ended: call this earlier")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and return its result. An interrupt of the caller cancels the coroutine.

        Raises:
            LoopThreadError: The caller is the loop's own thread, where waiting would never end.
            UsageError: The user's program awaits the result of a call of the blocking API.
            TimeoutError: ``timeout`` seconds passed. The coroutine is cancelled.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise LoopThreadError("a blocking call")
        if asyncio._get_running_loop() is not None:
            with ClosingOnError(coroutine):
                refuse_await()
        future = self.submit(coroutine)
        deadline = Deadline.after(timeout)
        try:
            while not future.done() and not deadline.expired():
                with contextlib.suppress(TimeoutError):
                    return future.result(min(deadline.remaining(), LONGEST_SLEEP))
            return future.result(0.0)
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Supplier[T]) -> T:
        """Call a plain function on the loop's thread and return its result."""

        async def caller() -> T:
            return function()

        return self.run(caller())

    def close(self, timeout: float | None = None) -> None:
        """Cancel the loop's tasks, stop the loop and join its thread; wait at most ``timeout`` seconds.

        A loop that has not ended by then keeps running until the process ends.
        """
        if self.closed:
            return
        # A second stop would interrupt the loop while it cancels its tasks.
        if self._stop_requested.acquire(blocking=False):
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout)


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel every task, and the tasks that these start, such as one that reopens a lost connection."""
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks))


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def running_loop(what: str) -> asyncio.AbstractEventLoop:
    """Return the running loop of asyncio, which ``what`` needs. Raises UsageError if none runs, as in a program of trio."""
    loop = asyncio._get_running_loop()
    if loop is None:
        raise UsageError(
            f"{what} needs a running event loop of asyncio, and none runs in this thread: call it in a coroutine that "
            "asyncio.run() runs; a program of trio gives one a thread: trio.to_thread.run_sync(asyncio.run, main())"
        )
    return loop


def on_loop(loop: asyncio.AbstractEventLoop | None, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Start a coroutine on ``loop``, by default the running loop; return a future of the running loop."""
    if loop is None or loop is asyncio.get_running_loop():
        return asyncio.ensure_future(coroutine)
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


def result_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop that runs in another thread, wait for it, and return its result.

    Raises:
        UsageError: The loop has not run for `LOOP_PATIENCE` seconds: it has ended, or its thread waits for this one.
    """
    turned = threading.Event()
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    while not concurrent.futures.wait([future], LOOP_PATIENCE).done:
        turned.clear()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(turned.set)
        if not turned.wait(LOOP_PATIENCE) and future.cancel():
            raise UsageError(
                f"the event loop that this call needs has run nothing for {LOOP_PATIENCE:g} s: let it run, and let its "
                "thread not wait for this one"
            )
    return future.result()


async def run_in_background(coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None = None) -> T:
    """Run a coroutine on the background loop, and return its result.

    A cancelled caller cancels the coroutine and waits for its end, so that nothing of it goes on behind the caller's back.
    If the coroutine ended before it was cancelled, ``undo`` is called with its result, which the caller does not get.
    """
    with ClosingOnError(coroutine):
        running_loop(getattr(coroutine, "__qualname__", "this call"))
        background = background_loop()
    task: asyncio.Task[Any] | None = None
    is_cancelled = False

    async def tracked() -> T:
        nonlocal task
        task = asyncio.current_task()
        if is_cancelled:
            coroutine.close()
            raise asyncio.CancelledError
        return await coroutine

    def cancel() -> None:
        nonlocal is_cancelled
        is_cancelled = True
        if task is not None:
            task.cancel()

    future = asyncio.wrap_future(background.submit(tracked()))
    try:
        # Cancelling the future itself would not wait for the end of the coroutine.
        await asyncio.wait([future])
    except asyncio.CancelledError:
        background.loop.call_soon_threadsafe(cancel)
        await asyncio.wait([future])
        if not future.cancelled() and future.exception() is None and undo is not None:
            undo(future.result())
        raise
    return future.result()


_loops: dict[str, BackgroundLoop] = {}
"""The loops of the process, by the names of their threads."""
_lock = threading.Lock()
lifecycle.renew_in_children(globals(), "_lock", threading.Lock)


def background_loop(name: str = _RUNTIME) -> BackgroundLoop:
    """Return the process's background loop; start it on first use, also in a forked child.

    A closing loop is still returned, for its remaining work. While the process exits, a closed loop is not replaced, and
    the caller gets the closed one.
    """
    with _lock:
        loop = _loops.get(name)
        if loop is None or (loop.closed and not lifecycle.ending()):
            loop = _loops[name] = BackgroundLoop(name)
        return loop


def observing_loop() -> BackgroundLoop:
    """Return the loop of what observes this process, on which no operation and no callback of the program runs."""
    return background_loop("asyncdist-observer")


def close_background_loop(timeout: float | None = None, name: str = _RUNTIME) -> None:
    """Close the process's background loop, if there is one; the next call of `background_loop` starts another."""
    with _lock:
        loop = _loops.get(name)
    if loop is not None:
        loop.close(timeout)


def _close_at_exit() -> None:
    for name in list(_loops):
        close_background_loop(_AT_EXIT, name)


lifecycle.at_exit(lifecycle.Stage.LOOP, _close_at_exit)
