"""Streams, events and pinned memory of one device.

Device groups and backends use a device only through `Streams`. `asyncdist.kernel.devices.cuda_streams` implements it with
``torch.cuda``; no other module of the package calls that. Tests use an implementation on the host.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any, Protocol

import torch

from asyncdist.base.callables import Predicate


class DeviceEvent(Protocol):
    """A position in a stream, like `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the device has passed the event. Raises the error that the device has failed with."""

    def synchronize(self) -> None:
        """Block the host until the device has passed the event, without the GIL."""


_SPIN_SECONDS = 50e-6
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3


def becomes_idle(streams: Streams, timeout: float, is_cancelled: Predicate = lambda: False) -> bool:
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


def passes(event: DeviceEvent, is_cancelled: Predicate) -> bool:
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
