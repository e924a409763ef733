"""Awaiting in the tasks of trio, and of anyio on trio.

The library has an asyncio loop of its own, the background loop. It drives the operations of a program that runs trio. A
trio task sleeps until a callback of another thread wakes it. trio is no dependency: a program that awaits in a trio task
has imported it. Callers use this module only where no asyncio loop is running, so asyncio programs pay nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from asyncdist.base.background_loop import background_loop

T = TypeVar("T")


def _running_trio() -> Any:
    """Return the module `trio` if the caller is a trio task, else None."""
    trio = sys.modules.get("trio")
    return trio if trio is not None and trio.lowlevel.in_trio_task() else None


def checkpoint() -> Generator[Any, None, None]:
    """Let other tasks run, and raise ``trio.Cancelled`` if the caller's scope is cancelled. For ``__await__`` methods."""
    trio = _running_trio()
    if trio is None:
        yield
    else:
        yield from trio.lowlevel.checkpoint().__await__()


class TrioSignal:
    """An event for which a trio task waits, and which any thread sets. Only a trio task may create one.

    Raises:
        RuntimeError: The caller is no trio task.
    """

    def __init__(self) -> None:
        trio = _running_trio()
        if trio is None:
            raise RuntimeError("no running event loop: await this in a coroutine of asyncio, of trio, or of anyio")
        self._trio, self._event, self._token = trio, trio.Event(), trio.lowlevel.current_trio_token()

    def set(self, _: object = None) -> None:
        """Wake the task. The parameter lets a work and an asyncio task take this method as their callback."""
        # trio may have ended since.
        with contextlib.suppress(self._trio.RunFinishedError):
            self._token.run_sync_soon(self._event.set)

    async def wait(self, seconds: float = math.inf, *, shield: bool = False) -> bool:
        """Wait at most ``seconds``; return whether the signal is set. ``shield`` delays a cancellation until then."""
        with self._trio.move_on_after(seconds, shield=shield):
            await self._event.wait()
        return bool(self._event.is_set())


async def run_on_background_loop(coroutine: Coroutine[Any, Any, T], *, shield: bool = False) -> T:
    """Run a coroutine of asyncio on the background loop, for a trio task, and return its result.

    Cancelling the task cancels the coroutine and waits for its end. If the coroutine has a result nevertheless, this
    function returns it, so that the caller can close it; the task is then cancelled where it awaits next.

    Args:
        shield: Whether a cancellation of the task waits for the coroutine instead of cancelling it.
    """
    tasks: list[asyncio.Task[T]] = []
    try:
        ended, background = TrioSignal(), background_loop()
    except BaseException:
        coroutine.close()
        raise

    async def start() -> None:
        tasks.append(asyncio.ensure_future(coroutine))
        tasks[0].add_done_callback(ended.set)

    async def cancel() -> None:
        tasks[0].cancel()

    background.submit(start())
    try:
        await ended.wait(shield=shield)
    # trio.Cancelled, or an interrupt of the user.
    except BaseException:
        background.submit(cancel())
        await ended.wait(shield=True)
        if tasks[0].cancelled():
            raise
    return tasks[0].result()
