"""The process's background thread with an event loop: made when first needed, joined before the interpreter goes down.

It serves what must go on while the program's own threads compute: an embedded store, and collectives that were issued
from blocking code with ``async_op=True``. Programs with a loop of their own need it only for the embedded store.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncdist.errors import LoopThreadError

T = TypeVar("T")

new_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    from uvloop import new_event_loop as new_loop
except ImportError:  # Windows, or an interpreter that uvloop does not know yet
    from asyncio import new_event_loop as new_loop


class Runtime:
    """One event loop in a thread of its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop: asyncio.AbstractEventLoop = new_loop()
        self._thread = threading.Thread(target=self._main, name="asyncdist-runtime", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            _cancel_all(self.loop)
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    @property
    def closed(self) -> bool:
        return not self._thread.is_alive() or self.pid != os.getpid()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop and return its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result; an interrupt of the caller cancels it.

        Raises LoopThreadError on the loop's own thread, where waiting would never end.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise LoopThreadError("a blocking call")
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Call a plain function on the loop's thread and return its result."""

        async def caller() -> T:
            return function()

        return self.run(caller())

    def close(self) -> None:
        """Cancel what is left, stop the loop and join its thread."""
        if self.closed:
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


_current: Runtime | None = None
_lock = threading.Lock()


def runtime() -> Runtime:
    """Return the process's runtime; start it if there is none (also after a fork, which leaves threads behind)."""
    global _current
    with _lock:
        if _current is None or _current.closed:
            _current = Runtime()
        return _current


def close_runtime() -> None:
    """Stop the process's runtime if there is one; the next `runtime()` starts a new one."""
    global _current
    with _lock:
        current, _current = _current, None
    if current is not None:
        current.close()


atexit.register(close_runtime)
