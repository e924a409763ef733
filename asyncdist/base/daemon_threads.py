"""Threads for calls that may block. A process that ends does not wait for what these wait for.

The threads of ``concurrent.futures`` are joined before anything else when a process ends. One that waits for a peer keeps
its process then, which has not said goodbye yet, and with it that peer, if it is at its end too and waits for us. So ours
are daemons: first everybody is told that the process ends, which ends what waits for peers, and then they get a moment.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from asyncdist.base import lifecycle

P = ParamSpec("P")
T = TypeVar("T")
Future = concurrent.futures.Future

_AT_EXIT = 2.0
"""Seconds that a process that ends leaves to the calls that go on."""


class DaemonThreadPool(concurrent.futures.Executor):
    """Daemon threads that make calls, ``most`` at a time. A thread comes when it is needed, and goes with `shutdown`."""

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._changed = threading.Condition()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._over = False
        self._open: set[Future[Any]] = set()
        _all.add(self)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a call made in one of the threads; return its future. Raises RuntimeError when there is none any more."""
        future: Future[T] = Future()
        with self._changed:
            if self._over:
                raise RuntimeError(f"the threads {self._name!r} have been let go")
            if self._idle <= len(self._calls) and len(self._threads) < self._most:
                self._start()
            self._open.add(future)
            self._calls.append((future, functools.partial(function, *args, **kwargs)))
            self._changed.notify()
        future.add_done_callback(self._open.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and let the threads go after those that were taken."""
        with self._changed:
            self._over = True
            cancelled = list(self._calls) if cancel_futures else []
            self._changed.notify_all()
        for future, _ in cancelled:
            future.cancel()
        if wait:
            for thread in self._threads:
                thread.join()

    @property
    def open(self) -> set[Future[Any]]:
        """The calls that have not ended."""
        return set(self._open)

    def _start(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._run, name=f"{self._name}_{number}", daemon=True)
        thread.start()  # the interpreter refuses that near its end
        self._threads.append(thread)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._calls or self._over)
                self._idle -= 1
                if not self._calls:
                    return
                future, call = self._calls.popleft()
            _make(future, call)
            del future, call  # or what they hold lives on while we wait


async def run_in_daemon_thread(function: Callable[[], T]) -> T:
    """Make a call that may take long and does nothing but answer, in a thread of its own: who is cancelled leaves it."""
    errands = DaemonThreadPool(
        "asyncdist-apart", most=1
    )  # and not the loop's own: those keep their threads, and wait for them
    try:
        return await asyncio.get_running_loop().run_in_executor(errands, function)
    finally:
        errands.shutdown(wait=False)


def _make(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        value = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(value)


_all: weakref.WeakSet[DaemonThreadPool] = weakref.WeakSet()


def _at_exit() -> None:
    concurrent.futures.wait([future for errands in list(_all) for future in errands.open], timeout=_AT_EXIT)


lifecycle.at_exit(lifecycle.Stage.ERRANDS, _at_exit)
