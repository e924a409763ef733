"""Daemon threads: a pool, an executor that keeps order, a thread for a single call, and one for periodic calls.

They replace ``concurrent.futures.ThreadPoolExecutor``, whose threads the interpreter joins before it runs the process's
other exit handlers. A thread that waits for a peer would keep its process from closing its connections, and two such
processes would wait for each other. These threads are daemons. At exit the process notifies its peers first, which ends
the calls that wait for peers; then the remaining calls get `_AT_EXIT` seconds.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import math
import select
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, ParamSpec, TypeVar

from asyncdist.base import lifecycle
from asyncdist.base.callables import AnyFunction, Callback, Supplier
from asyncdist.base.descriptors import naming_exhaustion
from asyncdist.base.lifecycle import WeakRegistry
from asyncdist.base.waker import Waker

log = logging.getLogger("asyncdist")

P = ParamSpec("P")
T = TypeVar("T")
Future = concurrent.futures.Future

_AT_EXIT = 2.0
"""Seconds for which a process waits at its exit for calls that have not returned."""
_GROW_INTERVAL = 5e-3
"""Seconds without the begin of a call after which a pool that grows starts a further thread for the calls that wait."""
_EXTRA_IDLE_TIMEOUT = 1.0
"""Seconds after which such a thread ends when it has no call."""


class DaemonThreadPool(concurrent.futures.Executor):
    """Runs calls in at most ``max_threads`` daemon threads, each started when it is needed.

    A thread without a call ends after ``idle_timeout`` seconds; None keeps threads until `shutdown`. In a pool that
    ``grows`` calls may wait for one another: whenever no call has begun for a moment, a further thread starts, which ends
    when it is idle.
    """

    def __init__(self, name: str, max_threads: int, *, idle_timeout: float | None = None, grows: bool = False) -> None:
        self._name, self._max_threads, self._idle_timeout = name, max_threads, idle_timeout
        self._grows, self._is_watched = grows, False
        self._begun = self._begun_before = 0
        self._changed = threading.Condition()
        self._calls: deque[tuple[Future[Any], AnyFunction]] = deque()
        self._threads: list[threading.Thread] = []
        self._started = 0
        self._idle = 0
        self._closed = False
        self._unfinished: set[Future[Any]] = set()
        _pools.add(self)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``function`` in one of the threads. Raises RuntimeError if the pool is shut down, or no thread can start."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the thread pool {self._name!r} has been shut down")
            if self._idle <= len(self._calls):
                if len(self._threads) < self._max_threads:
                    self._start_thread()
                elif self._grows and not self._is_watched:
                    periodic_calls.start(self._grow, _GROW_INTERVAL)
                    self._is_watched = True
            self._unfinished.add(future)
            self._calls.append((future, functools.partial(function, *args, **kwargs)))
            self._changed.notify()
        future.add_done_callback(self._unfinished.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further calls; the threads end after the calls that were submitted."""
        with self._changed:
            self._closed = True
            cancelled = list(self._calls) if cancel_futures else []
            threads = list(self._threads)
            self._changed.notify_all()
        for future, _ in cancelled:
            future.cancel()
        if wait:
            for thread in threads:
                thread.join()

    @property
    def unfinished(self) -> set[Future[Any]]:
        """The futures of the calls that have not ended."""
        return set(self._unfinished)

    @property
    def num_idle(self) -> int:
        return self._idle

    def after_fork_in_child(self) -> None:
        """Forget the threads and their calls, which exist in the parent only."""
        self._changed = threading.Condition()
        self._idle, self._is_watched = 0, False
        for collection in (self._calls, self._threads, self._unfinished):
            collection.clear()

    def _grow(self) -> None:
        """Start one more thread if no call has begun since the last look; look again while calls wait for a thread."""
        with self._changed:
            if not self._calls:
                periodic_calls.stop(self._grow)
                self._is_watched = False
            elif self._begun == self._begun_before:
                # The process may be unable to start a thread now.
                with contextlib.suppress(RuntimeError):
                    self._start_thread()
            self._begun_before = self._begun

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}_{self._started}", daemon=True)
        # Listed first: a KeyboardInterrupt may leave `start` although the thread runs, and the thread removes itself.
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.remove(thread)
            raise
        self._started += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                timeout = self._idle_timeout if len(self._threads) <= self._max_threads else _EXTRA_IDLE_TIMEOUT
                self._changed.wait_for(lambda: self._calls or self._closed, timeout)
                self._idle -= 1
                if not self._calls:
                    self._threads.remove(threading.current_thread())
                    return
                future, call = self._calls.popleft()
                self._begun += 1
            _run_call(future, call)
            # An idle thread must not keep the arguments and the result alive.
            del future, call


class SerialExecutor:
    """Runs calls one at a time, in the order of `put`, in one thread or in the calling thread.

    Calls report their own failures: an exception that a call raises is only logged.
    """

    def __init__(self, name: str, *, idle_timeout: float = 5.0) -> None:
        self._name = name
        self._pool = DaemonThreadPool(name, max_threads=1, idle_timeout=idle_timeout)
        self._running = threading.Lock()

    def put(self, call: Callback, *, inline: bool = False) -> None:
        """Run a call after the earlier calls. With ``inline``, run it before this returns if no call is pending."""
        if not (inline and self.run_now(call)):
            self._pool.submit(self._run_queued, call)

    def run_now(self, call: AnyFunction, *args: Any) -> bool:
        """Run a call in this thread if no call is pending; return whether it was run."""
        if self._pool._unfinished or not self._running.acquire(blocking=False):
            return False
        self._run(call, *args)
        return True

    def close(self, last: Callback) -> None:
        """Run one more call, in this thread if no call is pending. The executor's thread ends after it."""
        self.put(last, inline=True)
        self._pool.shutdown(wait=False)

    def _run_queued(self, call: Callback) -> None:
        self._running.acquire()
        try:
            self._run(call)
        # Also SystemExit, which would stay unseen in the future of the pool.
        except BaseException:
            log.exception("a call in the executor %r failed", self._name)

    def _run(self, call: AnyFunction, *args: Any) -> None:
        try:
            call(*args)
        except Exception:
            log.exception("a call in the executor %r failed", self._name)
        finally:
            self._running.release()


class PeriodicCalls:
    """Calls functions in one daemon thread, periodically or for a ready descriptor, whatever the process's loops do.

    The thread starts with the first function, ends after the last, and does not exist in a forked child. A function must
    return soon, because it delays the others.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[Callback, tuple[float, float]] = {}
        self._watched: dict[int, Callback] = {}
        self._waker: Waker | None = None
        """Wakes the thread while it watches descriptors; otherwise it waits for `_changed`."""
        self._thread: threading.Thread | None = None

    def start(self, function: Callback, period: float, *, after: float = 0.0) -> None:
        """Call ``function`` in ``after`` seconds, and then every ``period`` seconds until `stop`.

        Raises RuntimeError if the process can start no thread.
        """
        with self._changed:
            self._start_thread()
            self._due[function] = (monotonic() + after, period)
            self._wake()

    def stop(self, function: Callback) -> None:
        """Stop calling a function. A call that has begun may still run. Idempotent."""
        with self._changed:
            self._due.pop(function, None)
            self._wake()

    def call_when_readable(self, descriptor: int, function: Callback) -> None:
        """Call ``function`` once, when a descriptor is ready to read. Call `forget` before you close the descriptor.

        Raises:
            RendezvousError: The process has no free descriptor.
            RuntimeError: The process can start no thread.
        """
        with self._changed:
            if self._waker is None:
                with naming_exhaustion():
                    self._waker = Waker()
            self._start_thread()
            self._watched[descriptor] = function
            self._wake()

    def forget(self, descriptor: int) -> None:
        """Watch a descriptor no more. Its call may have begun. Idempotent."""
        with self._changed:
            self._watched.pop(descriptor, None)
            self._wake()

    def _start_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="asyncdist-periodic", daemon=True)
            # A debugger that suspends every thread at a breakpoint leaves threads with these attributes running.
            thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
            thread.start()
            self._thread = thread

    def _wake(self) -> None:
        self._changed.notify()
        if self._waker is not None:
            self._waker.ring()

    def _run(self) -> None:
        while function := self._next():
            try:
                function()
            # Also SystemExit: the other functions need this thread.
            except BaseException:
                log.exception("a periodic call failed")
            # An idle thread must not keep the object of the function alive.
            del function

    def _next(self) -> Callback | None:
        """Wait for the next function that is due; return None after the last one has been stopped."""
        with self._changed:
            while self._due or self._watched:
                now, left = monotonic(), math.inf
                if self._due:
                    function, (at, period) = min(self._due.items(), key=lambda item: item[1][0])
                    if at <= now:
                        self._due[function] = (now + period, period)
                        return function
                    left = at - now
                    del function
                if (ready := self._wait(left)) is not None:
                    return ready
            self._thread = self._waker = None
            return None

    def _wait(self, seconds: float) -> Callback | None:
        """Wait for a change; return the function of a ready descriptor, if there is one."""
        if not self._watched or (waker := self._waker) is None:
            self._waker = None
            self._changed.wait(min(seconds, threading.TIMEOUT_MAX))
            return None
        waits = [(descriptor, select.POLLIN) for descriptor in self._watched]
        self._changed.release()
        try:
            ready = waker.sleep(waits, seconds)
        finally:
            self._changed.acquire()
        # Another thread may have forgotten the descriptor.
        return next((each for number in ready or () if (each := self._watched.pop(number, None)) is not None), None)

    def after_fork_in_child(self) -> None:
        """Forget the thread and the functions, which exist in the parent only."""
        self._forget()


def start_daemon_thread(function: Supplier[T], name: str, *, awaited_at_exit: bool = True) -> Future[T]:
    """Run a blocking call in a new thread, and return the future of its result.

    The process waits for the call at its exit, for at most `_AT_EXIT` seconds, if ``awaited_at_exit``.
    """
    pool = DaemonThreadPool(name, max_threads=1)
    if not awaited_at_exit:
        _pools.discard(pool)
    try:
        return pool.submit(function)
    finally:
        pool.shutdown(wait=False)


async def run_in_daemon_thread(function: Supplier[T]) -> T:
    """Run a blocking call without side effects in a new thread, and return its result.

    Cancelling the caller abandons the call: its thread ends when the call returns.
    """
    return await asyncio.wrap_future(start_daemon_thread(function, "asyncdist-call"))


def _run_call(future: Future[Any], call: AnyFunction) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        value = call()
    # A future of asyncio refuses it, and its waiter would never return. A coroutine that raises it does the same.
    except StopIteration as error:
        refused = RuntimeError(f"a call in a thread raised {error!r}")
        refused.__cause__ = error
        future.set_exception(refused)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(value)


_pools: WeakRegistry[DaemonThreadPool] = WeakRegistry()

periodic_calls = PeriodicCalls()
"""The periodic calls of the process."""


def _wait_at_exit() -> None:
    concurrent.futures.wait([future for pool in _pools.living() for future in pool.unfinished], timeout=_AT_EXIT)


def _after_fork() -> None:
    for pool in _pools.living():
        pool.after_fork_in_child()
    periodic_calls.after_fork_in_child()


lifecycle.after_fork(_after_fork)
lifecycle.at_exit(lifecycle.Stage.THREADS, _wait_at_exit)
