"""The handle of a device operation. The operation is enqueued first, and complete when the device has passed its event.

`DeviceGroup` creates a `DeviceWork` for each operation; the user waits for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic
from typing import TYPE_CHECKING, Any

from asyncdist.base import lifecycle
from asyncdist.base.callables import Callback
from asyncdist.base.deadline import Timeout, seconds, wait_until_set
from asyncdist.errors import UsageError, WaitTimeoutError
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.memory.torch_compile import excluded_from_compile
from asyncdist.kernel.transport.device_streams import DeviceEvent, Streams
from asyncdist.kernel.transport.host_group import HostWork

if TYPE_CHECKING:
    from asyncdist.kernel.engine.progress import Progress


# Seconds for which `synchronize` waits for the group's error; it usually comes within milliseconds.
_ERROR_TIMEOUT = 5.0
# One lock for the callbacks of all device works.
_enqueue_lock = threading.Lock()
lifecycle.renew_in_children(globals(), "_enqueue_lock", threading.Lock)


@excluded_from_compile
class DeviceWork(Work):
    """One device operation, already issued; it progresses in the background.

    `wait` orders the caller's current stream after the operation, as `torch.distributed.Work.wait` does. `synchronize` and
    ``await`` return only when the data is there.
    """

    hurry: Callback = staticmethod(lambda: None)
    """Called when something waits for the device, once the operation is enqueued: the completion watcher then polls."""

    def __init__(self, streams: Streams, home: Progress | None = None, *, waits_for_peers: bool = True) -> None:
        super().__init__(None)
        self._waits_for_peers = waits_for_peers
        self._streams = streams
        self._home = home
        self._event: DeviceEvent | None = None
        self._awaited: HostWork | None = None
        self._waiters: list[threading.Event] = []
        """Set when `suspended` is called, and when the operation is enqueued or has failed."""
        self._enqueue_callbacks: list[Callback] | None = []
        """None once the operation is enqueued or has failed."""

    # -- the executor's side -----------------------------------------------------------------------

    def enqueued(self, value: Any, event: DeviceEvent) -> None:
        """Record that all device work is enqueued, with ``event`` recorded behind it. Called by the executor."""
        self._value, self._event = value, event
        self._set_enqueued()

    def suspended(self, awaited: HostWork) -> None:
        """Record the work for which the operation waits, which then continues it: a waiting thread drives it."""
        self._awaited = awaited
        for waiter in list(self._waiters):
            waiter.set()

    @property
    def has_callbacks(self) -> bool:
        """Whether callbacks wait for the completion, as an ``await`` does."""
        return bool(self._callbacks)

    def _add_callback(self, callback: Callable[[Any], object]) -> None:
        super()._add_callback(callback)
        # The watcher sets the event before it looks for callbacks.
        if self._event is not None and not self._done:
            self.hurry()

    def finish(self, value: Any = None, error: BaseException | None = None) -> bool:
        if not self._done:
            super().finish(value, error)
            self._set_enqueued()
            self.run_callbacks()
        return False

    def _set_enqueued(self) -> None:
        with _enqueue_lock:
            due, self._enqueue_callbacks = self._enqueue_callbacks, None
        for call in due or ():
            call()

    # -- order of streams ----------------------------------------------------------------------

    def when_enqueued(self, call: Callback) -> None:
        """Call ``call`` once, when the operation is enqueued or has failed. The callback must be short."""
        with _enqueue_lock:
            if self._enqueue_callbacks is not None:
                self._enqueue_callbacks.append(call)
                return
        call()

    def ordered_after(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's torch calls run after the operation only, if it is enqueued."""
        return contextlib.nullcontext() if self._event is None else self._streams.ordered_after(self._event)

    # -- state ---------------------------------------------------------------------------------

    def is_completed(self) -> bool:
        """Return whether the device has completed the operation, or it has failed."""
        return self._done or self._has_passed()

    def _has_passed(self) -> bool:
        try:
            return self._event is not None and self._event.query()
        # The completion watcher reports the device's failure.
        except Exception:
            return False

    @property
    def failed(self) -> bool:
        return self._error is not None

    def is_success(self) -> bool:
        """Return whether the device has completed the operation without an error."""
        return self.is_completed() and self._error is None

    def result(self) -> Any:
        """Return the value; the tensors hold the data for every stream that was ordered by `wait`.

        Raises:
            UsageError: The operation is not enqueued yet, so `wait` could not have returned.
        """
        if self._enqueue_callbacks is not None:
            raise UsageError("the operation is not completed: await it, or call wait() first")
        return self._outcome()

    # -- waiting -------------------------------------------------------------------------------

    def wait(self, timeout: Timeout = None) -> bool:
        """Order the caller's current stream after the operation, and return True. The device may still be running.

        Args:
            timeout: Seconds for which the host waits until the operation is enqueued; None waits without a limit.

        Raises:
            WaitTimeoutError: The operation was not enqueued in time. It keeps running.
            LoopThreadError: The calling thread runs the event loop of the world, and the host waits for peers until the
                operation is enqueued.
            GroupError: The operation failed.
        """
        self._wait_until_enqueued(timeout)
        self._outcome()
        # Of an event that has passed no stream needs to know.
        if self._event is not None and not self._done and not self._has_passed():
            self._streams.wait_event(self._event)
        return True

    def synchronize(self, timeout: Timeout = None) -> None:
        """Block until the operation is complete. ``timeout`` (seconds) limits only the wait until it is enqueued."""
        self._wait_until_enqueued(timeout)
        self._outcome()
        if self._event is not None:
            try:
                self._event.synchronize()
            except Exception:
                # The completion watcher turns the device's failure into the group's error.
                finished = threading.Event()
                self.add_done_callback(lambda _: finished.set())
                finished.wait(_ERROR_TIMEOUT)
                self._outcome()
                raise
        self._outcome()

    def _wait_until_enqueued(self, timeout: Timeout) -> None:
        # The kind of the call decides, not whether the peers were faster than the caller.
        if self._home is not None and self._waits_for_peers:
            self._refuse_loop_thread(self._home)
        if self._enqueue_callbacks is None:
            return
        limit = seconds(timeout)
        if not self._drive_until_enqueued(monotonic() + limit):
            raise WaitTimeoutError(
                f"the wait timed out after {limit:g} s, and the operation continues: wait again or abort the group"
            )

    def _drive_until_enqueued(self, until: float) -> bool:
        """Block until the operation is enqueued or has failed; return False at the monotonic time ``until``.

        While it waits for a work that its waiting threads drive, this thread drives that work.
        """
        moved = threading.Event()
        self._waiters.append(moved)
        self.when_enqueued(moved.set)
        try:
            while True:
                # What happens from here on sets it again.
                moved.clear()
                awaited, left = self._awaited, until - monotonic()
                if self._enqueue_callbacks is None:
                    return True
                if left <= 0:
                    return False
                if self._home is not None and awaited is not None and awaited.is_driven and not awaited.is_completed():
                    # The operation gets the error of the awaited work.
                    with self._home.promises.make(), contextlib.suppress(Exception):
                        awaited.wait(left)
                else:
                    # For as long as a device takes, this thread drives nothing.
                    with contextlib.nullcontext() if self._home is None else self._home.promises.make(made=False):
                        wait_until_set(moved, left)
        finally:
            self._waiters.remove(moved)
