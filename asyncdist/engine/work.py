"""The handle of one started operation: await it, block on it, or hang a callback on it.

A `Work` has no colour. It is completed once, by whichever driver finishes the operation; waiting for it in any way
never owns it: a cancelled or timed-out waiter stops waiting, and the operation goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Generator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.base.deadline import Timeout, seconds
from asyncdist.errors import UsageError, WaitTimeoutError

if TYPE_CHECKING:
    import torch

    from asyncdist.engine.progress import Progress

log = logging.getLogger("asyncdist")

_STALL_CHECK = (
    0.05  # seconds between two looks of who awaits on another loop at whether the one that drives stands still
)
_TURN = 1e-3  # seconds for which a task may await what is over at once, until it lets its loop turn


class _Turns(threading.local):
    """The time at which an await of a work last let this thread's loop turn."""

    last = 0.0


_turns = _Turns()
_changing_callbacks = threading.RLock()  # of any work: held for a moment, and by few


class Work:
    """One operation, started and going on by itself.

    Await it as it is, as often as you like; several by `asyncio.gather`, for a limited time by `asyncio.wait_for`. What
    takes futures or tasks only, as `asyncio.wait` does, takes ``asyncio.ensure_future(work)``.

    Its value (of ``await``, `result` and `get_future`) is what the operation wrote: the tensor, the list of tensors or
    objects; of a receive, the sender's global rank; None of a barrier.
    """

    # Class attributes for what most works never set: a call in shared memory takes as long as a dozen assignments.
    _progress: Progress | None = None
    _done = False
    _seen = False
    _value: Any = None
    _error: BaseException | None = None
    _unseen: _Unseen | None = None
    _callbacks: list[Callable[[Work], object]] | None = None
    _future: Any = None

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress

    # -- completing (the executor's side) ------------------------------------------------------

    def finish(self, value: Any = None, error: BaseException | None = None) -> bool:
        """Complete the work; return whether callbacks are due (`run_callbacks`)."""
        if error is not None and not self._seen:
            self._unseen = _Unseen(error)
        self._value, self._error, self._done = value, error, True
        return bool(self._callbacks)

    def _mark_seen(self) -> None:
        """Note that the program has seen, or declined to see, how the operation ended."""
        self._seen = True
        if self._unseen is not None:
            self._unseen.error = None

    def run_callbacks(self) -> None:
        """Call what was hung on the completed work, once; an exception in a callback is logged."""
        while self._callbacks:
            with _changing_callbacks:
                callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks or ():
                try:
                    callback(self)
                except Exception:
                    log.exception("a callback of an operation that %s raised", self._state())

    # -- looking -------------------------------------------------------------------------------

    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or badly."""
        return self._done

    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Return what the operation failed with; None if it went well or still goes on."""
        self._mark_seen()
        return self._error

    def result(self) -> Any:
        """Return the operation's value; raise what it failed with, or UsageError while it goes on."""
        if not self._done:
            raise UsageError("the operation still goes on: await it, or call wait() first")
        return self._outcome()

    def _outcome(self) -> Any:
        if self._error is not None:
            self._mark_seen()
            raise self._error
        return self._value

    # -- waiting -------------------------------------------------------------------------------

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the operation has ended and return True, as torch does; `result` has its value.

        ``timeout`` (seconds or timedelta) limits the waiting only: WaitTimeoutError leaves the operation going.
        Raises what the operation failed with, and LoopThreadError on the thread whose loop drives it.
        """
        if not self._done and self._progress is not None:
            self._progress.refuse_loop_thread("this operation")
            limit = seconds(timeout)
            self._progress.drive(self, math.inf if limit == math.inf else monotonic() + limit)
            if not self._done:
                raise WaitTimeoutError(
                    f"not completed within {limit:g} s; the operation goes on, wait again or abort the group"
                )
        self._outcome()
        return True

    def synchronize(self, timeout: Timeout = None) -> None:
        """Block until the data is there, as torch's does: `wait` without its answer."""
        self.wait(timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._done and self._progress is not None:
            self._progress.try_now(self)
        if not self._done and self._progress is not None:
            yield from self._suspend(self._progress)
            _turns.last = monotonic()
        elif monotonic() > _turns.last + _TURN:
            # A task that awaits one short operation after the other would starve the other tasks of the loop.
            yield
            _turns.last = monotonic()
        return self._outcome()

    def _suspend(self, progress: Progress | None) -> Generator[Any, None, None]:
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def completed(_: Work) -> None:
            if asyncio._get_running_loop() is loop:
                wake()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(completed)
        stall_check: asyncio.TimerHandle | None = None

        def check_for_stall(progress: Progress) -> None:
            nonlocal stall_check
            _replace_home(progress, self)
            stall_check = loop.call_later(_STALL_CHECK, check_for_stall, progress)

        if progress is not None:
            progress.ensure_driven()
            if progress.home and progress.loop is not loop:
                check_for_stall(progress)
        try:
            if not self._done:
                yield from woken
        except BaseException:
            self._mark_seen()
            raise
        finally:
            self.remove_done_callback(completed)
            if stall_check is not None:
                stall_check.cancel()

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Call ``callback(work)`` when the operation has ended, at once if it has; from any thread, so keep it short."""
        with _changing_callbacks:
            if self._callbacks is None:
                self._callbacks = [callback]
            else:
                self._callbacks.append(callback)
        if self._done:  # it may have ended since: the thread that takes the list calls it
            self.run_callbacks()

    def remove_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Do not call a callback that has not been called yet."""
        with _changing_callbacks:
            if self._callbacks is not None and callback in self._callbacks:
                self._callbacks.remove(callback)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a `torch.futures.Future` of the operation's value; one and the same at every call.

        A daemon thread completes it, never the loop's thread: its callbacks run inline and may block.
        """
        import torch

        with _changing_callbacks:
            first = self._future is None
            future: torch.futures.Future[Any] = torch.futures.Future() if first else self._future
            self._future = future
        if first:
            self.add_done_callback(_complete_later)
        return future

    def _state(self) -> str:
        return "goes on" if not self._done else f"failed ({self._error})" if self._error else "is completed"

    def __repr__(self) -> str:
        # asyncio.create_task, which takes coroutines only, shows this text in its error.
        return f"<Work that {self._state()}: await it as it is, it needs no task>"


class _Unseen:
    """Logs the error of a failed work that is collected before the program has retrieved it."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def __del__(self) -> None:
        if self.error is not None:
            log.error("an operation failed and its error was never retrieved: %s", self.error)


def completed(value: Any = None) -> Work:
    """Return a work that has ended already, for what needed no communication."""
    work = Work.__new__(Work)
    work._value, work._done = value, True
    return work


def joined(works: Sequence[Work]) -> Work:
    """Return a work that completes with the last of ``works``; its value is the list of their values, its error the
    first."""
    pending = [work for work in works if not work.is_completed()]
    driven = all(work._progress is not None for work in pending)
    whole = Work(pending[0]._progress if pending else None) if driven else _Several(works)
    left = len(pending)

    def end() -> None:
        error = next((one for work in works if (one := work.exception()) is not None), None)
        whole.finish([work._value for work in works], error)
        whole.run_callbacks()

    def one_ended(_: Work) -> None:
        nonlocal left
        with _changing_callbacks:
            left -= 1
            if left:
                return
        end()

    for work in pending:
        work.add_done_callback(one_ended)
    if not pending:
        end()
    return whole


class _Several(Work):
    """Works some of which are waited for in a way of their own: one after the other."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def result(self) -> list[Any]:
        return [work.result() for work in self._works]

    def wait(self, timeout: Timeout = None) -> bool:
        until = monotonic() + seconds(timeout)
        for work in self._works:
            work.wait(max(0.0, until - monotonic()))
        return True

    def synchronize(self, timeout: Timeout = None) -> None:
        until = monotonic() + seconds(timeout)
        for work in self._works:
            work.synchronize(max(0.0, until - monotonic()))

    def __await__(self) -> Generator[Any, None, Any]:
        for work in self._works:
            yield from work.__await__()
        return self.result()


# -- threads for what may block -----------------------------------------------------------------------

# What is called may wait for another call of its kind, so one thread would not do.
_apart = DaemonThreadPool("asyncdist-futures", max_threads=32)


def call_apart(function: Callable[[], object]) -> None:
    """Run a function that may block on another operation in a daemon thread, never on the driving thread."""
    with contextlib.suppress(RuntimeError):  # an interpreter that shuts down starts no thread
        _apart.submit(function)


def _replace_home(progress: Progress, work: Work) -> None:
    """Drive in a daemon thread for a moment if the home loop is not running, unless one does already."""
    home = progress.home

    def drive() -> None:
        try:
            progress.drive(work, monotonic() + _STALL_CHECK)
        finally:
            home.replaced = False

    if home.stands_still and not home.replaced:
        home.replaced = True
        call_apart(drive)


def _complete_later(work: Work) -> None:
    call_apart(lambda: _complete(work))


def _complete(work: Work) -> None:
    future, error = work._future, work.exception()
    if error is None:
        future.set_result(work.result())
    else:
        future.set_exception(error)
