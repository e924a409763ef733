"""Streams, events and pinned memory of one device.

Device groups and backends use a device only through `Streams`. `CudaStreams` implements it with ``torch.cuda``; no other
module of the package calls that. Tests use an implementation on the host.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any, Protocol

import torch

from asyncdist.errors import UnsupportedError
from asyncdist.kernel.transport.small_copies import SmallCopies

# The number of streams of callers that are kept.
_KEPT_STREAMS = 256


class DeviceEvent(Protocol):
    """A position in a stream, like `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the device has passed the event. Raises the error that the device has failed with."""

    def synchronize(self) -> None:
        """Block the host until the device has passed the event, without the GIL."""


log = logging.getLogger("asyncdist")

_SPIN_SECONDS = 50e-6
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3


def becomes_idle(streams: Streams, timeout: float, is_cancelled: Callable[[], bool] = lambda: False) -> bool:
    """Block until the device has completed all work in the communication stream; return whether it has.

    Returns False after ``timeout`` seconds, once ``is_cancelled()`` is true, and if the device has failed.
    """
    until = monotonic() + timeout
    try:
        with streams.on_comm_stream():
            event = streams.record_event()
        return passes(event, lambda: is_cancelled() or monotonic() > until)
    # A failed device completes no more work. torch and CUDA report this by errors of several types.
    except Exception:
        return False


def passes(event: DeviceEvent, is_cancelled: Callable[[], bool]) -> bool:
    """Block until the device has passed an event; return whether it has. False once ``is_cancelled()`` is true."""
    if completes_soon(event):
        return True
    pause = _SHORTEST_PAUSE
    while not event.query():
        if is_cancelled():
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def completes_soon(event: DeviceEvent) -> bool:
    """Return whether the device passes an event within 50 us. The calling thread polls: that costs less than a wake-up."""
    until = monotonic() + _SPIN_SECONDS
    while not event.query():
        if monotonic() > until:
            return False
    return True


def cuda_missing() -> str | None:
    """Return why this process has no CUDA device; None if it has one."""
    if torch.cuda.is_available():
        return None
    reason = "sees no CUDA device" if torch.backends.cuda.is_built() else "is built without CUDA"
    return f"torch {torch.__version__} {reason}"


class Streams(ABC):
    """One device and the communication stream of one group. Thread-safe.

    "The current stream" is the calling thread's current stream: the user's stream, or the communication stream within
    `on_comm_stream`.
    """

    device: torch.device

    @abstractmethod
    def with_new_stream(self) -> Streams:
        """Return the same device with another communication stream."""

    @abstractmethod
    def on_comm_stream(self) -> AbstractContextManager[object]:
        """Return a context in which the communication stream is this thread's current stream."""

    @abstractmethod
    def record_event(self, event: Any = None) -> DeviceEvent:
        """Record an event in the current stream and return it: ``event``, of a device's driver, or a new one."""

    @abstractmethod
    def wait_event(self, event: Any) -> None:
        """Make later work in the current stream wait for an event of this process; None is an event that has passed.

        No stream may wait for an event of another process: if that process is killed, the event never passes, and the
        stream cannot be freed any more.
        """

    @abstractmethod
    def is_idle(self) -> bool:
        """Return whether the device has completed all work in the current stream."""

    def position(self) -> DeviceEvent | None:
        """Record an event in the current stream; None if the device has completed all work in it.

        Where processes share a device, an event makes the device change to the process of the stream, which takes more
        than 0.1 ms on an H200.
        """
        return None if self.is_idle() else self.record_event()

    @abstractmethod
    def ordered_after(self, event: DeviceEvent) -> AbstractContextManager[object]:
        """Return a context in which this thread's torch calls run after the event, and after nothing else."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a CUDA graph."""

    @abstractmethod
    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory of ``count`` elements, pinned so that copies do not block the host.

        Falls back to pageable memory, with which copies block the host. Raises RuntimeError if memory runs out.
        """

    def copy_to_device(self, tensor: torch.Tensor, pinned: torch.Tensor) -> DeviceEvent:
        """Enqueue a copy from flat memory of `pinned` to a flat tensor in the current stream; return the event after it."""
        tensor.copy_(pinned, non_blocking=True)
        return self.record_event()

    @abstractmethod
    def record_stream(self, tensor: torch.Tensor) -> None:
        """Keep the allocator from reusing the memory of ``tensor`` before the communication stream has used it."""

    @property
    @abstractmethod
    def handle(self) -> int:
        """The communication stream's handle (``cudaStream_t``) for other libraries."""

    @property
    @abstractmethod
    def current_handle(self) -> int:
        """The current stream's handle."""

    @property
    @abstractmethod
    def uuid(self) -> str:
        """Identifier of the device, independent of its index in this process."""


class _CurrentStream:
    """A context in which a stream of the current device is the calling thread's current one.

    `torch.cuda.stream` does the same for any device, and takes several times as long.
    """

    __slots__ = ("_before", "_stream")

    def __init__(self, before: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
        self._before, self._stream = before, stream

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._before)


class CudaStreams(Streams):
    """A CUDA device, used through ``torch.cuda``."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UnsupportedError(f"no transport here carries tensors on {device}: move it with .cpu() first")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._stream = torch.cuda.Stream(self.device)
        self._known: dict[int, torch.cuda.Stream] = {}
        """torch's objects of the streams that were current, by their handles: to make one takes 5 us."""
        self._small_copies = SmallCopies(self)

    def with_new_stream(self) -> CudaStreams:
        return CudaStreams(self.device)

    def _current(self) -> torch.cuda.Stream:
        """Return the calling thread's current stream."""
        handle = self.current_handle
        stream = self._known.get(handle)
        if stream is None:
            if len(self._known) >= _KEPT_STREAMS:
                self._known.clear()
            stream = self._known[handle] = torch.cuda.current_stream(self.device)
        return stream

    def on_comm_stream(self) -> AbstractContextManager[object]:
        if torch.cuda.current_device() != self.device.index:
            return torch.cuda.stream(self._stream)
        return _CurrentStream(self._current(), self._stream)

    def record_event(self, event: Any = None) -> DeviceEvent:
        if event is None:
            event = torch.cuda.Event(blocking=True)
        event.record(self._current())
        return event  # type: ignore[no-any-return]

    def wait_event(self, event: Any) -> None:
        if event is not None:
            self._current().wait_event(event)

    def is_idle(self) -> bool:
        return self._current().query()

    def ordered_after(self, event: Any) -> AbstractContextManager[object]:
        # torch takes streams from a fixed pool, so this creates no new stream.
        stream = torch.cuda.Stream(self.device)
        stream.wait_event(event)
        return torch.cuda.stream(stream)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as cause:
            log.warning(
                "%d bytes of pinned memory cannot be allocated, copies are slower: %s", count * dtype.itemsize, cause
            )
            return torch.empty(count, dtype=dtype, device="cpu")

    def copy_to_device(self, tensor: torch.Tensor, pinned: torch.Tensor) -> DeviceEvent:
        event: DeviceEvent | None = self._small_copies.copy(tensor, pinned)
        return super().copy_to_device(tensor, pinned) if event is None else event

    def record_stream(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    @property
    def current_handle(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    @property
    def uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)
