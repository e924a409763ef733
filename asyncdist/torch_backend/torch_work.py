"""`torch.distributed.Work` over an asyncdist `Work`: what the methods of `ProcessGroup` return.

`torch_group` creates it. Programs and tests match the words with which torch's gloo reports timeouts, lost peers and
missing ranks. The methods of torch's classes add them to the messages of asyncdist's errors, which keep their own text.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed

from asyncdist.base.lifecycle import ProcessBound
from asyncdist.errors import GroupError, MismatchError, OperationTimeoutError, PeerLostError
from asyncdist.groups import Group
from asyncdist.kernel import DeviceWork, call_in_thread, excluded_from_compile
from asyncdist.kernel.engine import work as started
from asyncdist.torch_backend.callback_order import CallbackOrder

_NONE = timedelta(0)
"""torch's value for "no timeout"."""
_NOTHING: deque[torch.futures.Future[None]] = deque()


@excluded_from_compile
class Work(ProcessBound, torch_distributed.Work):
    """The handle of one operation: block in `wait`, or await it.

    Args:
        work: The operation.
        outputs: The tensors that it writes; `result` and the future return them.
        source: The group of a receive.
        order: The order of the callbacks of its future; None for a message.
    """

    _elsewhere = "call wait(), and send the tensors instead"
    _pending = _NOTHING
    """What completes the future, until that is done."""

    def __init__(
        self,
        work: started.Work,
        outputs: list[torch.Tensor],
        source: Group | None = None,
        order: CallbackOrder | None = None,
    ) -> None:
        super().__init__()
        self._work, self._outputs, self._source, self._order = work, outputs, source, order
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta = _NONE) -> bool:
        """Block until the operation is complete and return True; raise its error if it failed.

        On a device, order the current stream after the operation and return without blocking. ``timeout`` limits only
        this wait: after a WaitTimeoutError the operation is still running.
        """
        try:
            return self._work.wait(timeout or None)
        except GroupError as error:
            add_words(error)
            raise
        finally:
            if self._future is not None:
                self._complete_future()

    def synchronize(self) -> None:
        """Order the current stream after the operation on a device; block on the CPU."""
        self._work.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has succeeded or failed."""
        completed = self._work.is_completed()
        if completed and self._future is not None:
            self._complete_future()
        return completed

    done = is_completed

    def add_done_callback(self, callback: Callable[[started.Work], object]) -> None:
        """Call ``callback`` with asyncdist's work when the operation is complete. `asyncio.wait` calls this method."""
        self._work.add_done_callback(callback)

    def remove_done_callback(self, callback: Callable[[started.Work], object]) -> None:
        """Do not call a callback that has not been called yet."""
        self._work.remove_done_callback(callback)

    def is_success(self) -> bool:
        """Return whether the operation has succeeded."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return the operation's error, None if it has succeeded or is still running."""
        add_words(error := self._work.exception())
        return error

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors; raise the operation's error, or UsageError while it is running."""
        try:
            self._work.result()
        except GroupError as error:
            add_words(error)
            raise
        return self._outputs

    def _source_rank(self) -> int:
        """Return the sender's rank in the group, for a receive from any rank."""
        sender = self._work.result()
        return sender if self._source is None else self._source.group_rank(sender)

    source_rank = _source_rank

    def __await__(self) -> Generator[Any, None, Any]:
        return self._work.__await__() if self._future is None else self._await_with_future()

    def _await_with_future(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self._work.__await__())
        finally:
            self._complete_future()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the output tensors; every call returns the same one.

        Its callbacks run on a thread where they may block on other operations, those of a group in the order in which they
        were attached. A failure is raised inside ``then``: a failure set by ``set_exception`` makes DDP's reducer abort the
        process.
        """
        if self._future is None:
            done: torch.futures.Future[Any] = torch.futures.Future()
            if self._work.is_success():
                done.set_result(self._outputs)
                self._future = done
            elif isinstance(self._work, DeviceWork):
                self._future = self._device_future(self._work)
                return self._future
            else:
                self._future = done.then(lambda _: self.result())
                self._pending = deque([done])
                self._work.add_done_callback(lambda _: call_in_thread(self._complete_in_thread))
            if self._order is not None:
                self._order.add(self._future)
        else:
            self._complete_future()
        return self._future

    def _complete_future(self) -> None:
        """Complete the future if the operation is: the program may learn of that before a thread of the pool does."""
        future = self._future
        if future is None or future.done() or not self._work.is_completed():
            return
        try:
            self._pending.pop().set_result(None)
        except IndexError:
            # Another thread is about to complete it.
            with contextlib.suppress(Exception):
                future.wait()

    def _complete_in_thread(self) -> None:
        self._complete_future()
        if self._order is not None:
            self._order.proceed()

    def _device_future(self, work: DeviceWork) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that completes when the operation is enqueued on the device, as torch's own futures do.

        Device work that its callbacks, or code after its ``wait()``, enqueue is ordered after the operation.
        """
        devices: Any = list({tensor.device for tensor in self._outputs if tensor.is_cuda})
        queued: torch.futures.Future[Any] = torch.futures.Future(devices=devices)

        def complete() -> None:
            with work.ordered_after():
                queued.set_result(self._outputs)

        future = queued.then(lambda _: self.result())
        work.when_enqueued(lambda: call_in_thread(complete))
        return future

    def __repr__(self) -> str:
        return repr(self._work)


@excluded_from_compile
class _Done(Work):
    def wait(self, timeout: timedelta = _NONE) -> bool:
        return True


DONE = _Done(started.completed(), [])
"""The Work that a completed synchronous call returns; torch waits for it once and discards it."""


def add_words(error: BaseException | None) -> None:
    """Add the words of a time-out or of a lost peer to the error of an operation. Idempotent: several callers see one."""
    if isinstance(error, OperationTimeoutError):
        direction = "send" if error.op == "send" else "recv"
        _add(error, f"Timed out waiting {_milliseconds(error.timeout)}ms for {direction} operation to complete")
    elif isinstance(error, PeerLostError):
        _add(error, "Connection closed by peer")


def add_monitored_barrier(error: GroupError, ranks: Sequence[int], rank: int, wait_all_ranks: bool) -> None:
    """Add the words of a monitored barrier that failed on this rank; a MismatchError stays as it is.

    Args:
        ranks: Global ranks of the group, of which ``rank`` is the place of this process.
        wait_all_ranks: Name every missing rank, instead of the first one in the order of ranks.
    """
    if isinstance(error, MismatchError):
        return
    words = "" if list(ranks) == list(range(len(ranks))) else "with the group's own rank numbers, "
    if rank != 0:
        words += (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            "rank 0. Please check rank 0 logs for faulty rank."
        )
    elif isinstance(error, OperationTimeoutError) and error.timeout == 0 and not wait_all_ranks:
        words = "Rank 0 timed out in monitoredBarrier after 0 ms. No ranks successfully processed in monitoredBarrier."
    elif isinstance(error, OperationTimeoutError):
        missing = sorted(ranks.index(each) for each in error.awaited)
        named = f"Ranks {', '.join(map(str, missing))}" if wait_all_ranks else f"Rank {missing[0]}"
        words += f"[Rank 0]: {named} failed to pass monitoredBarrier in {_milliseconds(error.timeout)} ms"
    elif isinstance(error, PeerLostError):
        named = f"{'Ranks' if wait_all_ranks else 'Rank'} {ranks.index(error.peer)}"
        words += f"[Rank 0]: {named} failed to pass monitoredBarrier"
    else:
        return
    _add(error, words)


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _add(error: GroupError, words: str) -> None:
    if words not in error.reason:
        error.reason += f"; in gloo's words: {words}"
