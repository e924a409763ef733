"""Streams, events and pinned memory of a CUDA device, by ``torch.cuda``."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch

from asyncdist.errors import UnsupportedError
from asyncdist.kernel import torch_private
from asyncdist.kernel.devices.small_copies import SmallCopies
from asyncdist.kernel.memory.bounded_cache import BoundedCache
from asyncdist.kernel.transport.device_streams import DeviceEvent, Streams

log = logging.getLogger("asyncdist")

# The number of streams of callers that are kept.
_KEPT_STREAMS = 256


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
        self._known: BoundedCache[int, torch.cuda.Stream] = BoundedCache(_KEPT_STREAMS)
        """torch's objects of the streams that were current, by their handles: to make one takes 5 us."""
        self._small_copies = SmallCopies(self)

    def with_new_stream(self) -> CudaStreams:
        return CudaStreams(self.device)

    def _current(self) -> torch.cuda.Stream:
        """Return the calling thread's current stream."""
        handle = self.current_handle
        stream = self._known.get(handle)
        if stream is None:
            stream = self._known.add(handle, torch.cuda.current_stream(self.device))
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
        return torch_private.current_raw_stream(self.device.index)

    @property
    def uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)
