"""What is asked of a device: a stream of our own beside the caller's, events in both, and memory that it copies from fast.

The only file of the core that calls ``torch.cuda``. Tests put something else in its place.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from time import monotonic
from typing import Protocol

import torch

from asyncdist.errors import UnsupportedError


class DeviceEvent(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Return whether the device has passed it; raises what the device failed with."""

    def synchronize(self) -> None:
        """Block the host until the device has passed it, without the GIL."""


log = logging.getLogger("asyncdist")

_GLANCE = 1e-3


def completes_within(event: DeviceEvent, patience: float) -> bool:
    """Wait some seconds for the device; return whether it has passed a event, False also if it has failed."""
    until = monotonic() + patience
    try:
        while not event.query():
            if monotonic() > until:
                return False
            time.sleep(_GLANCE)
    except Exception:  # whatever the device failed with: it does nothing any more
        return False
    return True


def cuda_missing() -> str | None:
    """Return why this process has no CUDA device, None if it has one."""
    if torch.cuda.is_available():
        return None
    why = "sees no CUDA device" if torch.backends.cuda.is_built() else "is built without CUDA"
    return f"torch {torch.__version__} {why}"


class Streams(ABC):
    """One device as one group uses it. Any thread; "the caller's stream" is the calling thread's current one."""

    device: torch.device

    @abstractmethod
    def with_new_stream(self) -> Streams:
        """Return the same device with another stream as ours."""

    @abstractmethod
    def on_comm_stream(self) -> AbstractContextManager[object]:
        """Put what torch does in this thread meanwhile into our stream."""

    @abstractmethod
    def record_event(self) -> DeviceEvent:
        """Mark where the caller's stream is; within `ours`, where ours is."""

    @abstractmethod
    def wait_event(self, event: DeviceEvent) -> None:
        """Have what comes next in the caller's stream (within `ours`: in ours) wait for a event."""

    @abstractmethod
    def ordered_after(self, event: DeviceEvent) -> AbstractContextManager[object]:
        """Put what torch does in this thread meanwhile behind a event, and behind nothing else."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Return whether the caller's stream is being captured into a graph."""

    @abstractmethod
    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host that the device copies to and from while the host goes on.

        Or, where no more of it is to be had, memory with which copies hold up the host. RuntimeError if there is none.
        """

    @abstractmethod
    def record_stream(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that our stream uses a tensor, so that its memory is not given away meanwhile."""

    @property
    @abstractmethod
    def handle(self) -> int:
        """Our stream, as other libraries name it."""

    @property
    @abstractmethod
    def uuid(self) -> str:
        """What names the device, whatever number it goes by in this process."""


class CudaStreams(Streams):
    """A CUDA device, by way of torch."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UnsupportedError(f"no transport here carries tensors on {device}: move it with .cpu() first")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._stream = torch.cuda.Stream(self.device)

    def with_new_stream(self) -> CudaStreams:
        return CudaStreams(self.device)

    def on_comm_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record_event(self) -> DeviceEvent:
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self.device).wait_event(event)

    def ordered_after(self, event: DeviceEvent) -> AbstractContextManager[object]:
        assert isinstance(event, torch.cuda.Event)
        stream = torch.cuda.Stream(self.device)  # one of torch's pool: made once, whoever asks
        stream.wait_event(event)
        return torch.cuda.stream(stream)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as cause:  # so much more than others have pinned is not to be had
            log.warning(
                "%d bytes of pinned memory are not to be had, copies are slower: %s", count * dtype.itemsize, cause
            )
            return torch.empty(count, dtype=dtype, device="cpu")

    def record_stream(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    @property
    def uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)
