"""An event loop of asyncio whose time passes only when all tasks wait: programs of many hours run in seconds."""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Idle(selectors.DefaultSelector):
    """A selector that does not wait: it adds what it should have waited to ``now``."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all simulated ranks wait for each other")
        self.now += max(0.0, timeout)
        return super().select(0.0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop. It has no use for sockets or other threads: nothing outside can happen at a virtual time."""

    def __init__(self) -> None:
        self._idle = _Idle()
        super().__init__(self._idle)

    def time(self) -> float:
        return self._idle.now


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, from 0."""
    # Half of the time would go to looks at all simulated ranks again and again.
    collects = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(coroutine)
    finally:
        gc.collect()
        if collects:
            gc.enable()
