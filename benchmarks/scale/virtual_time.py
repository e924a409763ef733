"""An event loop of asyncio whose time passes only when all tasks wait: programs of many hours run in seconds."""

from __future__ import annotations

import asyncio
import gc
import heapq
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


class _Idle(selectors.DefaultSelector):
    """A selector that does not wait: it calls a function when nothing is left to run."""

    def __init__(self, pass_time: Callable[[], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0:
            self._pass_time()
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop. It has no use for sockets or other threads: nothing outside can happen at a virtual time."""

    def __init__(self) -> None:
        self._now, self._number = 0.0, 0
        # Pairs of numbers are compared in C, and asyncio's own timers in Python, which would take half of the time.
        self._later: list[tuple[float, int, asyncio.TimerHandle]] = []
        super().__init__(_Idle(self._pass_time))

    def time(self) -> float:
        return self._now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._number += 1
        heapq.heappush(self._later, (when, self._number, handle))
        return handle

    def _pass_time(self) -> None:
        """Go to the time of the next calls, and make them ready."""
        later, ready = self._later, self._ready  # type: ignore[attr-defined]
        while later and not ready:
            self._now = max(self._now, later[0][0])
            while later and later[0][0] <= self._now:
                if not (handle := heapq.heappop(later)[2]).cancelled():
                    ready.append(handle)
        if not ready:
            raise RuntimeError("all simulated ranks wait for each other")


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
