"""Life cycle of one rank's NCCL communicator. No caller waits for NCCL without a limit.

NCCL waits for the other ranks while it creates a communicator, and this wait cannot be cancelled. NCCL may also wait for
them when it destroys a communicator. So each communicator has a daemon thread, which makes both calls and is abandoned if
they do not return.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from asyncdist.base import lifecycle
from asyncdist.base.callables import AnyFunction
from asyncdist.base.daemon_threads import start_daemon_thread
from asyncdist.base.lifecycle import WeakRegistry
from asyncdist.errors import GroupAbortedError, TransportUnavailableError
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.transport.device_streams import Streams, becomes_idle
from asyncdist_transports.nccl.bindings import Bindings

log = logging.getLogger("asyncdist")

Call = tuple[Any, ...]
"""A method of cupy's NcclCommunicator, and its arguments without the last one, the stream."""

# Seconds for which an abort waits for an NCCL call to return.
_ABORT_TIMEOUT = 0.5
# Seconds in which the device may complete queued work after the group was destroyed.
_CLOSE_TIMEOUT = 10.0
# Seconds for which an exiting process waits for NCCL.
_EXIT_TIMEOUT = 5.0

communicators: WeakRegistry[Communicator] = WeakRegistry()
"""The communicators of this process. Their threads hold references to those that have not ended."""


class Communicator:
    """An NCCL communicator, created in the background; its calls go to the communication stream of ``streams``.

    One thread at a time may call `enqueue` or `split`. All other methods are thread-safe. ``ready`` completes when the
    communicator can be used, or its creation has failed; ``ended`` when it is destroyed or aborted. Its thread holds a
    reference until then, because cupy destroys a communicator that is collected, which may block.

    Args:
        streams: Device and stream for all calls.
        make: Creates and returns cupy's communicator, or None for a rank in no subgroup. Runs in the communicator's thread.
        first: Calls that check that the communicator works.
        rank: This rank's global rank, for errors.
    """

    def __init__(
        self, bindings: Bindings, streams: Streams, make: AnyFunction, first: Sequence[Call], rank: int
    ) -> None:
        self._bindings, self._rank = bindings, rank
        self._streams, self._stream = streams, streams.handle
        self.ready = Work()
        self._raw: Any = None
        self._error: Exception | None = None
        self._ending = threading.Event()
        self._aborted = False
        self._inside = threading.Lock()
        """Held during NCCL calls."""
        communicators.add(self)
        self.ended: Future[None] = start_daemon_thread(functools.partial(self._run, make, first), "asyncdist-nccl")

    # -- calls ---------------------------------------------------------------------------------

    def enqueue(self, *calls: Call) -> None:
        """Enqueue calls in the communication stream, several as one NCCL group.

        NCCL may block here for a peer that it has not communicated with yet. Raises GroupAbortedError.
        """
        if not calls:
            return
        self._refuse_if_ended()
        with self._inside:
            self._refuse_if_ended()
            try:
                with self._bindings.group() if len(calls) > 1 else contextlib.nullcontext():
                    for name, *arguments in calls:
                        getattr(self._raw, name)(*arguments, self._stream)
            except self._bindings.errors as cause:
                raise self._failure(cause) from cause

    def _refuse_if_ended(self) -> None:
        if self._ending.is_set():
            raise GroupAbortedError("the NCCL communicator was closed or aborted")

    # -- errors ------------------------------------------------------------------------------------

    def async_error(self) -> Exception | None:
        """Return why the creation failed, or NCCL's error (``ncclCommGetAsyncError``); None without a failure."""
        if self._error is not None:
            return self._error
        if not self.ready.is_completed() or not self._inside.acquire(blocking=False):
            # The thread that is in NCCL gets the error.
            return None
        try:
            if not self._ending.is_set() and self._raw is not None:
                self._raw.check_async_error()
        except self._bindings.errors as cause:
            return self._failure(cause)
        finally:
            self._inside.release()
        return None

    def _failure(self, cause: Exception) -> GroupAbortedError:
        reason = str(cause)
        if isinstance(cause, KeyError):
            reason = "its communicators are nonblocking, which cupy does not support"
        error = GroupAbortedError(f"NCCL failed: {reason}; NCCL_DEBUG=WARN logs more", peer=self._rank)
        error.__cause__ = cause
        return error

    # -- the end -------------------------------------------------------------------------------

    def abort(self) -> None:
        """Cancel the device's work, and the NCCL call in which a thread is. Returns at once."""
        self._aborted = True
        self._ending.set()

    def close(self) -> None:
        """Destroy the communicator when the device has completed the queued work. Returns at once."""
        self._ending.set()

    def _run(self, make: AnyFunction, first: Sequence[Call]) -> None:
        try:
            # The context selects the device, too.
            with self._streams.on_comm_stream():
                self._raw = make()
            # It may reference another communicator.
            del make
            if self._raw is None:
                self._ending.set()
            else:
                self.enqueue(*first)
        except Exception as cause:
            failure = cause if isinstance(cause, GroupAbortedError) else self._failure(cause)
            self._error = TransportUnavailableError(failure.reason)
            self.abort()
        self.ready.finish(error=self._error)
        # Retrieves the error, because no caller has to wait for the work.
        self.ready.exception()
        self.ready.run_callbacks()
        self._ending.wait()
        try:
            if self._raw is not None:
                self._end()
        except self._bindings.errors:
            log.exception("NCCL did not end a communicator")

    def _end(self) -> None:
        if not self._aborted and becomes_idle(self._streams, _CLOSE_TIMEOUT, lambda: self._aborted):
            with self._inside:
                self._raw.destroy()
            return
        # An abort should not overlap another call, but it is the only way to end a call that is stuck.
        held = self._inside.acquire(timeout=_ABORT_TIMEOUT)
        try:
            self._raw.abort()
        finally:
            if held:
                self._inside.release()

    # -- subgroups -----------------------------------------------------------------------------

    def split(self, colour: int, key: int) -> Any:
        """Return cupy's communicator for the ranks with the same colour, ordered by key. Collective; blocks.

        Returns None for a negative colour. The device must have completed all work in the stream.
        """
        self._refuse_if_ended()
        with self._inside:
            self._refuse_if_ended()
            return self._raw.commSplit(colour, key)


def abort_all() -> None:
    """Abort all communicators of a process that exits, so that it does not wait for a peer."""
    still_open = communicators.living()
    for communicator in still_open:
        communicator.abort()
    # A creation that has not returned cannot be cancelled.
    wait([communicator.ended for communicator in still_open if communicator.ready.is_completed()], _EXIT_TIMEOUT)


lifecycle.at_exit(lifecycle.Stage.COMMUNICATORS, abort_all)
