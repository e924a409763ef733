"""Calls of several operations, which a coroutine awaits and a thread waits for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

from asyncdist.base.background_loop import background_loop
from asyncdist.base.callables import Supplier
from asyncdist.base.deadline import Timeout, seconds, wait_until_set
from asyncdist.errors import LoopThreadError, WaitTimeoutError
from asyncdist.kernel.engine import trio_tasks
from asyncdist.kernel.engine.progress import Progress
from asyncdist.kernel.engine.work import Work

T = TypeVar("T")


class Procedure(Generic[T]):
    """A call that begins when it is awaited or waited for. Use each once.

    Args:
        begin: Returns the coroutine of the call.
        progress: Drives the operations that the call waits for; None if another call has refused the loop's thread.
    """

    def __init__(self, begin: Supplier[Coroutine[Any, Any, T]], progress: Progress | None = None) -> None:
        self._begin = begin
        self._progress = progress

    def __await__(self) -> Generator[Any, None, T]:
        if asyncio._get_running_loop() is not None:
            return self._begin().__await__()
        return trio_tasks.run_on_background_loop(self._begin()).__await__()

    def wait(self) -> T:
        """Run the call on the background loop, and return its result.

        Raises:
            LoopThreadError: The calling thread's event loop drives the operations of the group.
        """
        if self._progress is not None:
            self._progress.refuse_loop_thread("this call")
        return background_loop().run(self._begin())


class BackgroundCall(Work[T]):
    """A call that has begun on a loop, as a `Work`. A waiter that stops waiting does not end it.

    Args:
        coroutine: The call.
        loop: The running loop; None for the background loop.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__()
        self._ended = threading.Event()
        background = background_loop()
        self._loop = background.loop if loop is None else loop
        submitted = background.submit(coroutine) if loop is None else asyncio.run_coroutine_threadsafe(coroutine, loop)
        submitted.add_done_callback(self._end)

    def _end(self, future: concurrent.futures.Future[T]) -> None:
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        self.finish(future.result() if error is None else None, error)
        self._ended.set()
        self.run_callbacks()

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the call has ended, and return True; see `Work.wait`."""
        if asyncio._get_running_loop() is self._loop:
            raise LoopThreadError("a blocking call")
        limit = seconds(timeout)
        if not wait_until_set(self._ended, limit):
            raise WaitTimeoutError(f"the call has not ended within {limit:g} s and goes on: wait again")
        self._outcome()
        return True
