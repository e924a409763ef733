"""What is asked of CUDA beside what torch offers: allocations, their handles between processes, and events that cross.

Nothing of CUDA is touched before a `Driver` is made. Tests put something else in its place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from asyncdist.errors import TransportUnavailableError
from asyncdist.transport.device_streams import cuda_missing

HANDLE_NBYTES = 64
_BUFFER_ID, _LEGACY_IPC_CAPABLE = 7, 10  # of CUpointer_attribute

Event = Any
"""A `torch.cuda.Event`: ``record()`` and ``wait()`` in the calling thread's current stream."""


class Allocation(NamedTuple):
    """What a pointer points into. ``number`` is no other allocation's, also when its address is given out again."""

    base: int
    nbytes: int
    number: int
    shareable: bool  # whether another process may map it


class _Array:
    """Memory of the device as libraries hand it to one another."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Driver:
    """One device of CUDA. TransportUnavailableError where there is none, or cupy is missing."""

    def __init__(self, device: torch.device) -> None:
        try:
            from cupy.cuda import runtime

            self._libcuda = ctypes.CDLL("libcuda.so.1")
        except (ImportError, OSError) as cause:
            raise TransportUnavailableError(f"CUDA cannot be reached: {cause}") from cause
        self._runtime: Any = runtime
        self._device = device

    @staticmethod
    def missing() -> str | None:
        """Return why there is no driver in this process, None if there is one."""
        missing = cuda_missing()
        if missing is not None:
            return missing
        try:
            from cupy.cuda import runtime

            runtime.getDeviceCount()
        except ImportError:
            return "cupy is not installed: pip install 'asyncdist[cuda12]' or 'asyncdist[cuda13]'"
        except RuntimeError as cause:
            return f"cupy sees no CUDA device: {cause}"
        return None

    # -- allocations ---------------------------------------------------------------------------

    def allocation(self, address: int) -> Allocation:
        """Return the allocation that holds an address of ours."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        number, shareable = ctypes.c_uint64(), ctypes.c_int()
        place = ctypes.c_uint64(address)
        self._check(self._libcuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), place))
        self._check(self._libcuda.cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, place))
        self._check(self._libcuda.cuPointerGetAttribute(ctypes.byref(shareable), _LEGACY_IPC_CAPABLE, place))
        return Allocation(base.value, nbytes.value, number.value, bool(shareable.value))

    def _check(self, status: int) -> None:
        if status:
            raise TransportUnavailableError(f"the CUDA driver says error {status} of an address")

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory that may cross; give it back with `free`."""
        with torch.cuda.device(self._device):
            return int(self._runtime.malloc(nbytes))

    def free(self, address: int) -> None:
        """Give back what `allocate` returned."""
        with torch.cuda.device(self._device):
            self._runtime.free(address)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """Return memory of a device, ours or mapped, as a tensor of bytes that does not own it."""
        lies = torch.device("cuda", self._runtime.pointerGetAttributes(address).device)
        return torch.as_tensor(_Array(address, nbytes), device=lies)

    # -- between processes ---------------------------------------------------------------------

    def handle_of(self, base: int) -> bytes:
        """Return what other processes map an allocation by."""
        with torch.cuda.device(self._device):
            return bytes(self._runtime.ipcGetMemHandle(base))

    def map(self, handle: bytes) -> int:
        """Map another process's allocation; return its address here. RuntimeError says what CUDA has against it."""
        with torch.cuda.device(self._device):
            return int(self._runtime.ipcOpenMemHandle(handle))

    def unmap(self, address: int) -> None:
        """Let go of what `map` returned; nothing in any queue may use it any more."""
        with torch.cuda.device(self._device):
            self._runtime.ipcCloseMemHandle(address)

    def event(self) -> tuple[Event, bytes]:
        """Return an event that shareable, and its handle."""
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(interprocess=True)
            return event, bytes(event.ipc_handle())

    def event_of(self, handle: bytes) -> Event:
        """Return another process's event."""
        of: Callable[..., Event] = torch.cuda.Event.from_ipc_handle
        return of(self._device, handle)
