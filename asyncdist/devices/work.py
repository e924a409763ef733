"""The handle of an operation on a device: in a queue first, and over when the device has passed its event."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from asyncdist.base.deadline import Timeout, seconds
from asyncdist.engine.work import Work
from asyncdist.errors import UsageError, WaitTimeoutError
from asyncdist.memory.torch_compile import excluded_from_compile
from asyncdist.transport.device_streams import DeviceEvent, Streams

if TYPE_CHECKING:
    from asyncdist.engine.progress import Progress


_MOMENT = 5.0  # seconds; it takes milliseconds


@excluded_from_compile
class DeviceWork(Work):
    """One operation on a device, started and going on by itself.

    `wait` orders the caller's current stream behind it, as torch users expect; `synchronize` and ``await`` last until
    the data is there.
    """

    _enqueue_lock: ClassVar[threading.Lock] = threading.Lock()  # of any work: held for a moment

    def __init__(self, streams: Streams, home: Progress | None = None) -> None:
        super().__init__(None)
        self._streams = streams
        self._home = home
        self._enqueued = threading.Event()
        self._event: DeviceEvent | None = None
        self._enqueue_callbacks: list[Callable[[], object]] | None = []

    # -- the line's side -----------------------------------------------------------------------

    def enqueued(self, value: Any, event: DeviceEvent) -> None:
        """Note that everything the device is to do stands in its queues, up to ``event``."""
        self._value, self._event = value, event
        self._set_enqueued()

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        if not self._done:
            super().finish(value, error)
            self._set_enqueued()
            self.run_callbacks()

    def _set_enqueued(self) -> None:
        with self._enqueue_lock:
            due, self._enqueue_callbacks = self._enqueue_callbacks or [], None
        self._enqueued.set()
        for call in due:
            call()

    # -- the queue -----------------------------------------------------------------------------

    def when_enqueued(self, call: Callable[[], object]) -> None:
        """Have something called, once, when the operation stands in the device's queue or has failed; keep it short."""
        with self._enqueue_lock:
            if self._enqueue_callbacks is not None:
                self._enqueue_callbacks.append(call)
                return
        call()

    def ordered_after(self) -> AbstractContextManager[object]:
        """Put what torch does in this thread meanwhile behind the operation, once it is in the queue, and only that."""
        return contextlib.nullcontext() if self._event is None else self._streams.ordered_after(self._event)

    # -- looking -------------------------------------------------------------------------------

    def is_completed(self) -> bool:
        """Return whether the device has done it, or it has failed."""
        return self._done or self._is_passed()

    def _is_passed(self) -> bool:
        try:
            return self._event is not None and self._event.query()
        except Exception:  # the device has failed: who looks after the operation finds that out too
            return False

    @property
    def failed(self) -> bool:
        return self._error is not None

    def is_success(self) -> bool:
        """Return whether the device has done it."""
        return self.is_completed() and self._error is None

    def result(self) -> Any:
        """Return the value: tensors whose data is there for what waited; UsageError before `wait` could have returned."""
        if not self._enqueued.is_set():
            raise UsageError("the operation still goes on: await it, or call wait() first")
        return self._outcome()

    # -- waiting -------------------------------------------------------------------------------

    def wait(self, timeout: Timeout = None) -> bool:
        """Order the caller's current stream behind the operation, and return True; the device goes on meanwhile.

        The host waits until the operation is in the device's queue, ``timeout`` seconds at most: WaitTimeoutError leaves
        it going. Raises what the operation failed with, and LoopThreadError where that needs the loop of this thread.
        """
        self._wait_until_enqueued(timeout)
        self._outcome()
        if self._event is not None and not self._done:
            self._streams.wait_event(self._event)
        return True

    def synchronize(self, timeout: Timeout = None) -> None:
        """Block until the data is there. ``timeout`` limits only the time until the operation is in the queue."""
        self._wait_until_enqueued(timeout)
        self._outcome()
        if self._event is not None:
            try:
                self._event.synchronize()
            except Exception:
                self._wait_until_finished()  # who looks after the operation says what the device's failure means for the group
                self._outcome()
                raise
        self._outcome()

    def _wait_until_finished(self) -> None:
        told = threading.Event()
        self.add_done_callback(lambda _: told.set())
        told.wait(_MOMENT)

    def _wait_until_enqueued(self, timeout: Timeout) -> None:
        if self._home is not None and not self._enqueued.is_set():
            self._home.refuse_loop_thread("this operation")
        limit = seconds(timeout)
        if not self._enqueued.wait(None if limit == math.inf else limit):
            raise WaitTimeoutError(
                f"not completed within {limit:g} s; the operation goes on, wait again or abort the group"
            )

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._done:
            yield from self._suspend(None)
        return self._outcome()
