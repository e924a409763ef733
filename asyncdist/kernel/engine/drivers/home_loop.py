"""The event loop that drives background operations: the user's loop while it is alive, then the background loop.

Used by `loop_driver`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import AsyncGenerator, Callable
from typing import Any

from asyncdist.base.background_loop import background_loop
from asyncdist.base.callables import Callback


class HomeLoop:
    """The loop that drives one machine: the user's loop until it ends, then the background loop.

    Args:
        loop: The user's loop; None for a blocking program.
        on_left: Called once with the user's loop, when that loop is about to end or is found to be closed.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop | None, on_left: Callable[[asyncio.AbstractEventLoop], None]
    ) -> None:
        self._user_loop = loop
        self._on_left = on_left
        self._leaving = threading.Lock()
        self.replaced = False
        """Whether a thread drives at the moment because the user's loop is not running."""
        self._shutdown_hook = (
            LoopShutdownHook(self._on_shutdown) if loop is not None and asyncio._get_running_loop() is loop else None
        )

    def __bool__(self) -> bool:
        """Whether there is a user's loop that has not ended."""
        return self._user_loop is not None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        user_loop = self._user_loop
        if user_loop is not None and user_loop.is_closed():
            self._leave(user_loop)
            user_loop = None
        return user_loop or background_loop().loop

    @property
    def is_stopped(self) -> bool:
        """Whether no loop drives background operations: the user's loop is not running, but is not closed."""
        user_loop = self._user_loop
        return user_loop is not None and not user_loop.is_running() and not user_loop.is_closed()

    def _on_shutdown(self) -> None:
        if self._user_loop is not None and self._shutdown_hook is not None:
            self._leave(self._user_loop)

    def _leave(self, user_loop: asyncio.AbstractEventLoop) -> None:
        with self._leaving:  # two threads may find the loop closed at the same time
            if self._user_loop is user_loop:
                self._user_loop = None
                self._on_left(user_loop)

    def close(self) -> None:
        """Remove the shutdown hook."""
        hook, self._shutdown_hook = self._shutdown_hook, None
        if hook is not None:
            hook.end()


class LoopShutdownHook:
    """Calls ``on_shutdown`` when the running loop shuts down its asynchronous generators, as `asyncio.run` does at its end.

    This is the only signal before the loop is closed, after which no registration can be removed from it.
    """

    def __init__(self, on_shutdown: Callback) -> None:
        self._generator = self._wait(on_shutdown)
        with warnings.catch_warnings():
            # asyncio warns if a loop that has shut down its generators continues. `HomeLoop.loop` then sees its end.
            warnings.simplefilter("ignore", ResourceWarning)
            self._step(self._generator.__anext__())

    @staticmethod
    async def _wait(on_shutdown: Callback) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            try:
                on_shutdown()
            except KeyboardInterrupt as interruption:
                # asyncio would raise it and also log that the task of this generator failed.
                asyncio.get_running_loop().call_soon(_raise, interruption)

    @staticmethod
    def _step(awaitable: Any) -> None:
        # StopIteration: the step is complete. RuntimeError: the loop is shutting down the generator.
        with contextlib.suppress(StopIteration, RuntimeError):
            awaitable.send(None)

    def end(self) -> None:
        """Remove the hook. This calls ``on_shutdown`` if it has not been called."""
        self._step(self._generator.aclose())


def _raise(error: BaseException) -> None:
    raise error
