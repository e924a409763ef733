"""Selects the event loop that drives background operations: the user's loop while it is alive, then the runtime's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import AsyncGenerator, Callable
from typing import Any

from asyncdist.base.background_loop import background_loop


class DriverLoop:
    """The loop of one machine: ``loop`` until it ends, if there is one, and the runtime's background loop after that.

    ``left(loop)`` is called once, when that loop is about to end or was found to be closed.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop | None, left: Callable[[asyncio.AbstractEventLoop], None]
    ) -> None:
        self._own = loop
        self._left = left
        self._leaving = threading.Lock()
        self.replaced = False
        """Whether a thread drives at the moment because the loop is not running."""
        self._shutdown_hook = (
            LoopShutdownHook(self._end) if loop is not None and asyncio._get_running_loop() is loop else None
        )

    def __bool__(self) -> bool:
        """Whether the user's loop has not ended."""
        return self._own is not None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        own = self._own
        if own is not None and own.is_closed():
            self._leave(own)
            own = None
        return own or background_loop().loop

    @property
    def is_stopped(self) -> bool:
        """Whether no loop drives background operations: the user's loop is not running, but is not closed."""
        own = self._own
        return own is not None and not own.is_running() and not own.is_closed()

    def _end(self) -> None:
        if self._own is not None and self._shutdown_hook is not None:
            self._leave(self._own)

    def _leave(self, own: asyncio.AbstractEventLoop) -> None:
        with self._leaving:  # once, also if two threads see it
            if self._own is own:
                self._own = None
                self._left(own)

    def close(self) -> None:
        """Stop watching for the end of the loop."""
        hook, self._shutdown_hook = self._shutdown_hook, None
        if hook is not None:
            hook.end()


class LoopShutdownHook:
    """Calls ``leave`` when the running loop shuts down its asynchronous generators, as `asyncio.run` does at its end.

    There is no other sign of that end before the loop is closed, when nothing can be taken back from it any more.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self._generator = self._wait(leave)
        with warnings.catch_warnings():
            # asyncio warns where a loop goes on after it has shut them down once; our end is then seen when it is closed.
            warnings.simplefilter("ignore", ResourceWarning)
            self._step(self._generator.__anext__())

    @staticmethod
    async def _wait(leave: Callable[[], None]) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            leave()

    @staticmethod
    def _step(awaitable: Any) -> None:
        with contextlib.suppress(StopIteration, RuntimeError):  # it has got there; or is being shut down just now
            awaitable.send(None)

    def end(self) -> None:
        """Wait no longer: ``leave`` is called now, if it has not been."""
        self._step(self._generator.aclose())
