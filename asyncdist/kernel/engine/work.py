"""The handle of a started operation: a program awaits it, blocks until it is complete, or adds a callback to it.

The awaited and the blocking API return the same `Work`. The driver that finishes the operation completes its work once.
Waiting does not own the operation: a waiter that is cancelled or times out stops waiting, and the operation continues.
Groups, device groups and transports create works; the executor and the completion watcher complete them. This module
imports `engine.progress` for its type only, and torch only in `get_future`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Generator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic

from asyncdist.base import lifecycle
from asyncdist.base.deadline import Timeout, seconds
from asyncdist.base.error_text import describe_error
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.errors import GroupError, UsageError, WaitTimeoutError
from asyncdist.kernel.engine import trio_tasks
from asyncdist.kernel.engine.drivers.stalled_loop import (
    STALL_CHECK_INTERVAL,
    call_in_thread,
    drive_for,
    drive_for_stopped_loop,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import torch
    from typing_extensions import TypeVar

    from asyncdist.kernel.engine.progress import Progress

    T_co = TypeVar("T_co", covariant=True, default=Any)

    class _Awaited(Coroutine[Any, Any, T_co]):
        """The type of a work for type checkers, because asyncio makes tasks of coroutines only."""

        def send(self, value: Any, /) -> Any: ...

        def throw(self, *error: Any) -> Any: ...

else:
    from typing import TypeVar

    # typing.TypeVar takes a default in Python 3.13 and later.
    T_co = TypeVar("T_co", covariant=True)
    _Awaited = Generic

log = logging.getLogger("asyncdist")

_YIELD_INTERVAL = 1e-3
"""Seconds for which awaits of completed works return at once, before one of them yields to the event loop."""


class _LoopTurn(threading.local):
    """The time of the first await of a completed work in the present turn of this thread's event loop; None before it."""

    since: float | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self.since = monotonic()
        loop.call_soon(self.end)

    def end(self) -> None:
        self.since = None


class _CallbackTurn(threading.local):
    """The completed work whose callbacks this thread runs; None if it runs none."""

    work: Work | None = None


_loop_turn = _LoopTurn()
_callback_turn = _CallbackTurn()
_callbacks_lock = threading.RLock()
"""One lock for the callbacks of all works: it is held briefly, and threads rarely compete for it."""
lifecycle.renew_in_children(globals(), "_callbacks_lock", threading.RLock)


class Work(ProcessBound, _Awaited[T_co]):
    """The handle of one operation, which has started and progresses without further calls.

    A work can be awaited any number of times, without a task: several with `asyncio.gather`, for a limited time with
    `asyncio.wait_for`. `asyncio.wait` accepts works as they are. In the event loop in which the world was opened,
    `asyncio.create_task` and `asyncio.TaskGroup` make tasks that await a work. Tasks of trio await works too.

    The value of a work, which ``await``, `result` and `get_future` return, is what the operation wrote: a tensor, or a
    list of tensors or objects. The value of a receive is the sender's global rank, and that of a barrier is None. In
    annotations ``Work[T]`` is a work whose value has the type ``T``, and ``Work`` one whose value has any type.

    Example:
        >>> work = group.all_reduce(gradients)
        >>> await asyncio.wait_for(work, 10)  # in a coroutine; elsewhere: work.wait(10)
    """

    _elsewhere = "await it, or call wait(), and send its value instead"

    # Most works never set these. An assignment for each in `__init__` would slow down small calls.
    _progress: Progress | None = None
    _done = False
    _retrieved = False
    _was_seen = False
    _value: Any = None
    _error: BaseException | None = None
    _unretrieved: _UnretrievedError | None = None
    _callbacks: list[Callable[[Work], object]] | None = None
    _future: Any = None

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress

    # -- completion, called by the executor and the completion watcher -------------------------

    def finish(self, value: Any = None, error: BaseException | None = None) -> bool:
        """Complete the work; return whether the caller must call `run_callbacks`, after it has released its locks."""
        if error is not None and not self._retrieved:
            self._unretrieved = _UnretrievedError(error)
        self._value, self._error, self._done = value, error, True
        return bool(self._callbacks)

    def _mark_retrieved(self) -> None:
        """Record that the program has retrieved the outcome, or has stopped waiting for it: no error is logged."""
        self._retrieved = True
        if self._unretrieved is not None:
            self._unretrieved.error = None

    def run_callbacks(self) -> None:
        """Call each callback of the completed work once; log an exception that one raises.

        A KeyboardInterrupt or SystemExit leaves after the other callbacks have run: tasks and threads wait for them.
        """
        while self._callbacks:
            with _callbacks_lock:
                callbacks, self._callbacks = self._callbacks, None
            left = iter(callbacks or ())
            outer, _callback_turn.work = _callback_turn.work, self
            try:
                for callback in left:
                    try:
                        callback(self)
                    except Exception:
                        log.exception("a callback of an operation that %s raised", self._state())
            except BaseException:
                with _callbacks_lock:
                    self._callbacks = [*left, *(self._callbacks or ())]
                self.run_callbacks()
                raise
            finally:
                _callback_turn.work = outer

    # -- state and outcome ---------------------------------------------------------------------

    @property
    def is_driven(self) -> bool:
        """Whether a thread that waits drives the operation; False if another thread completes it."""
        return self._progress is not None

    @property
    def has_callbacks(self) -> bool:
        """Whether callbacks run when the operation is complete."""
        return bool(self._callbacks)

    def is_completed(self) -> bool:
        """Return whether the operation has succeeded or failed."""
        return self._done

    def done(self) -> bool:
        """Return whether the operation has succeeded or failed, as `asyncio.Future` does."""
        return self.is_completed()

    def cancelled(self) -> bool:
        """Return False: a waiter can be cancelled, but not an operation. `asyncio.wait` asks for it."""
        return False

    def cancel(self, msg: Any = None) -> bool:
        """Return False, as a completed `asyncio.Future` does. `asyncio.gather` calls it when it is cancelled."""
        return False

    @property
    def _asyncio_future_blocking(self) -> bool | None:
        """None for a pending work. In a loop a completed one is a future to asyncio, which makes no task to await it."""
        return False if self.is_completed() and asyncio._get_running_loop() is not None else None

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop, as a future's: any loop may await a completed work."""
        return asyncio.get_running_loop()

    def close(self) -> None:
        """Do nothing: the operation continues. From Python 3.13, a TaskGroup that makes no more tasks calls it."""

    def is_success(self) -> bool:
        """Return whether the operation has succeeded."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Return the operation's error; None if it is pending or has succeeded."""
        self._mark_retrieved()
        return self._error

    def result(self) -> T_co:
        """Return the operation's value.

        Raises:
            UsageError: The operation is pending.
            Exception: The operation's error, if it failed.
        """
        if not self._done:
            raise UsageError("the operation is pending: await it, or call wait() first")
        return self._outcome()

    def _outcome(self) -> T_co:
        self._was_seen = True
        if self._error is not None:
            self._mark_retrieved()
            raise self._error
        value: T_co = self._value
        return value

    # -- waiting -------------------------------------------------------------------------------

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the operation is complete and return True, as torch does; `result` returns its value.

        Args:
            timeout: Seconds or a timedelta; None means no limit. It limits only this wait, not the operation.

        Raises:
            WaitTimeoutError: The operation was not completed in time, and continues.
            LoopThreadError: The calling thread's event loop drives the operation, which may be complete already: a
                program that may wait there only if its peers were faster would fail by chance. A callback of the
                operation may wait for it.
            Exception: The operation's error, if it failed.
        """
        progress = self._progress
        if progress is not None:
            self._refuse_loop_thread(progress)
            if not self._done:
                limit = seconds(timeout)
                progress.drive(self, math.inf if limit == math.inf else monotonic() + limit)
                if not self._done:
                    raise WaitTimeoutError(
                        f"the wait timed out after {limit:g} s, and the operation continues: wait again or abort the group"
                    )
        self._outcome()
        return True

    def _refuse_loop_thread(self, progress: Progress) -> None:
        """Raise LoopThreadError on the thread of the loop that drives, except in a callback of this completed work."""
        if _callback_turn.work is not self:
            progress.refuse_loop_thread("this operation")

    def synchronize(self, timeout: Timeout = None) -> None:
        """Block until the data has arrived, as torch's `synchronize` does; like `wait`, but returns nothing."""
        self.wait(timeout)

    def __await__(self) -> Generator[Any, None, T_co]:
        if not self._done and self._progress is not None:
            self._progress.try_now(self)
        if not self._done:
            yield from self._suspend(self._progress)
        elif (loop := asyncio._get_running_loop()) is None:
            # In trio every await is a checkpoint.
            yield from trio_tasks.checkpoint()
        elif not self._was_seen:
            since = _loop_turn.since
            if since is None:
                _loop_turn.begin(loop)
            # A task that awaits one completed work after another would starve the other tasks of its loop.
            elif monotonic() > since + _YIELD_INTERVAL:
                yield
                _loop_turn.end()
        if self._error is not None:
            return self._outcome()
        self._was_seen = True
        value: T_co = self._value
        return value

    def _suspend(self, progress: Progress | None) -> Generator[Any, None, None]:
        loop = asyncio._get_running_loop()
        if loop is None:
            yield from self._suspend_in_trio(progress).__await__()
            return
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def completed(_: Work) -> None:
            if asyncio._get_running_loop() is loop:
                wake()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self._add_callback(completed)
        stall_check = drive_for(self, progress, loop)
        try:
            if not self._done:
                yield from woken
        except BaseException:
            self._mark_retrieved()
            raise
        finally:
            self.remove_done_callback(completed)
            if stall_check is not None:
                stall_check.cancel()

    async def _suspend_in_trio(self, progress: Progress | None) -> None:
        completed = trio_tasks.TrioSignal()
        self._add_callback(completed.set)
        try:
            if progress is not None:
                progress.ensure_driven()
            while not await completed.wait(
                STALL_CHECK_INTERVAL if progress is not None and progress.home else math.inf
            ):
                assert progress is not None
                drive_for_stopped_loop(progress, self)
        except BaseException:
            self._mark_retrieved()
            raise
        finally:
            self.remove_done_callback(completed.set)

    def add_done_callback(self, callback: Callable[[Work[T_co]], object]) -> None:
        """Call ``callback(work)`` when the operation is complete, or at once in the calling thread if it is complete.

        Any thread may call the callback, so it must not block. The event loop of the calling thread calls callbacks of
        asyncio itself, such as that of `asyncio.wait`.
        """
        if getattr(callback, "__module__", "") == "asyncio.tasks" and (loop := asyncio._get_running_loop()) is not None:
            if self.is_completed():
                loop.call_soon(callback, self)
                return
            callback = _LoopCallback(self, loop, callback)
        self._add_callback(callback)

    def _add_callback(self, callback: Callable[[Work[T_co]], object]) -> None:
        with _callbacks_lock:
            if self._callbacks is None:
                self._callbacks = [callback]
            else:
                self._callbacks.append(callback)
        # Another thread may have completed the work. The thread that removes the list calls the callbacks.
        if self._done:
            self.run_callbacks()

    def remove_done_callback(self, callback: Callable[[Work[T_co]], object]) -> None:
        """Do not call a callback that has not been called yet."""
        with _callbacks_lock:
            if self._callbacks is None or callback not in self._callbacks:
                return
            removed = self._callbacks.pop(self._callbacks.index(callback))
        if isinstance(removed, _LoopCallback):
            removed.cancel()

    def get_future(self) -> torch.futures.Future[T_co]:
        """Return a `torch.futures.Future` of the operation's value; every call returns the same future.

        A daemon thread completes it and runs its callbacks, which may therefore block. The future of a completed work is
        complete.
        """
        import torch

        with _callbacks_lock:
            first = self._future is None
            future: torch.futures.Future[T_co] = torch.futures.Future() if first else self._future
            self._future = future
            if first and self.is_completed():  # no thread has had time to add a callback
                _complete_future(self)
                return future
        if first:
            self.add_done_callback(lambda work: call_in_thread(lambda: _complete_future(work)))
        return future

    def _state(self) -> str:
        return "is pending" if not self._done else f"failed ({self._error})" if self._error else "is completed"

    def __repr__(self) -> str:
        # In a loop in which no world was opened, asyncio.create_task accepts only coroutines and shows this text.
        return f"<Work that {self._state()}: await it as it is, it needs no task>"


class _LoopCallback:
    """A callback of asyncio, which only the event loop's own thread may call. It equals the callback."""

    def __init__(self, work: Work, loop: asyncio.AbstractEventLoop, callback: Callable[[Work], object]) -> None:
        self._loop, self._callback = loop, callback
        self._stall_check = None if work.is_completed() else drive_for(work, work._progress, loop)

    def __call__(self, work: Work) -> None:
        if asyncio._get_running_loop() is self._loop:
            self._run(work)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._run, work)

    def _run(self, work: Work) -> None:
        self.cancel()
        self._callback(work)

    def cancel(self) -> None:
        if self._stall_check is not None:
            self._stall_check.cancel()

    def __eq__(self, other: object) -> bool:
        return other is self or other == self._callback

    __hash__ = None  # type: ignore[assignment]


class _UnretrievedError:
    """Logs the error of a failed work if the work is deleted before the program has retrieved the error.

    One failure may end many operations of a group: it is logged for one of them.
    """

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def __del__(self) -> None:
        error = self.error
        if error is None or (isinstance(error, GroupError) and not error.begin_log()):
            return
        log.error("an operation failed and its error was never retrieved: %s", describe_error(error))


def completed(value: Any = None, progress: Progress | None = None) -> Work:
    """Return a completed work, for a call that is complete when it returns."""
    work = Work.__new__(Work)
    work._value, work._done, work._progress = value, True, progress
    return work


def again(work: Work) -> Work:
    """Return a completed work for another call with the same value, which takes a quarter of the time of a new one."""
    work._was_seen = False
    return work


DONE: Work[Any] = completed()
"""The work of any call that is complete and whose caller needs no value."""


def joined(works: Sequence[Work]) -> Work[list[Any]]:
    """Return a work that completes when all ``works`` are complete.

    Its value is the list of their values. Its error is that of the first failed work in the order of ``works``; the errors
    of the other works are then not logged as never retrieved.
    """
    pending = [work for work in works if not work.is_completed()]
    driven = all(work._progress is not None for work in works)
    whole = Work(works[0]._progress if works else None) if driven else _SequentialWork(works)
    left = len(pending)

    def end() -> None:
        errors = [error for work in works if (error := work.exception()) is not None]
        whole.finish([work._value for work in works], errors[0] if errors else None)
        whole.run_callbacks()

    def one_ended(_: Work) -> None:
        nonlocal left
        with _callbacks_lock:
            left -= 1
            if left:
                return
        end()

    for work in pending:
        work.add_done_callback(one_ended)
    if not pending:
        end()
    return whole


class _SequentialWork(Work[list[Any]]):
    """Blocks for several works in turn, because some of them (`DeviceWork`) override the methods that block."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def result(self) -> list[Any]:
        self._mark_retrieved()
        return [work.result() for work in self._works]

    def wait(self, timeout: Timeout = None) -> bool:
        self._each(lambda work: work.wait, timeout)
        return True

    def synchronize(self, timeout: Timeout = None) -> None:
        self._each(lambda work: work.synchronize, timeout)

    def _each(self, method_of: Callable[[Work], Callable[[float], object]], timeout: Timeout) -> None:
        self._mark_retrieved()
        until = monotonic() + seconds(timeout)
        for work in self._works:
            method_of(work)(max(0.0, until - monotonic()))


def _complete_future(work: Work) -> None:
    future, error = work._future, work.exception()
    if error is None:
        future.set_result(work.result())
    else:
        future.set_exception(error)
