"""CUDA calls that torch does not offer: allocations, memory handles and interprocess events.

No CUDA library is loaded before a `Driver` is created. Tests replace `Driver` by an implementation on the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from asyncdist.base.callables import AnyFunction
from asyncdist.errors import TransportUnavailableError
from asyncdist.kernel.memory.bounded_cache import BoundedCache
from asyncdist.kernel.transport.device_streams import cuda_missing

HANDLE_NBYTES = 64
_GRANULARITY = 2 << 20
# Values of CUpointer_attribute.
_BUFFER_ID, _LEGACY_IPC_CAPABLE = 7, 10
_INVALID_CONTEXT = 201
_KEPT_ALLOCATIONS = 4096

Event = Any
"""A `torch.cuda.Event`, which `Streams.record_event` and `Streams.wait_event` take."""


class Allocation(NamedTuple):
    """The allocation that an address belongs to.

    ``number`` (``CU_POINTER_ATTRIBUTE_BUFFER_ID``) is unique, even if the address is reused.
    """

    base: int
    number: int
    shareable: bool


class Driver:
    """One CUDA device. Raises TransportUnavailableError without a device or cupy."""

    def __init__(self, device: torch.device) -> None:
        try:
            from cupy.cuda import runtime

            # The calls take less time than it takes to give up the interpreter and get it back.
            self._libcuda = ctypes.PyDLL("libcuda.so.1")
        except (ImportError, OSError) as cause:
            raise TransportUnavailableError(f"CUDA is not available: {cause}") from cause
        self._runtime: Any = runtime
        self._device = device
        self._allocations: BoundedCache[int, Allocation] = BoundedCache(_KEPT_ALLOCATIONS)
        """What `allocation` has found, by number."""

    @staticmethod
    def missing() -> str | None:
        """Return why this process cannot create a driver; None if it can."""
        missing = cuda_missing()
        if missing is not None:
            return missing
        try:
            from cupy.cuda import runtime

            runtime.getDeviceCount()
        except ImportError:
            return "cupy is not installed: pip install cupy-cuda12x, or cupy-cuda13x for CUDA 13"
        except RuntimeError as cause:
            return f"cupy sees no CUDA device: {cause}"
        return None

    # -- allocations ---------------------------------------------------------------------------

    def allocation(self, address: int) -> Allocation:
        """Return the allocation that holds an address of this process."""
        number, pointer = ctypes.c_uint64(), ctypes.c_uint64(address)
        self._ask(self._libcuda.cuPointerGetAttribute, ctypes.byref(number), _BUFFER_ID, pointer)
        found = self._allocations.get(number.value)
        if found is None:
            base, shareable = ctypes.c_uint64(), ctypes.c_int()
            self._ask(self._libcuda.cuMemGetAddressRange_v2, ctypes.byref(base), None, pointer)
            self._ask(self._libcuda.cuPointerGetAttribute, ctypes.byref(shareable), _LEGACY_IPC_CAPABLE, pointer)
            found = Allocation(base.value, number.value, bool(shareable.value))
            # Memory without a number of its own may be another allocation the next time.
            if number.value:
                self._allocations.add(number.value, found)
        return found

    def _ask(self, question: AnyFunction, *arguments: Any) -> None:
        """Call a function of the driver. Raises TransportUnavailableError if it reports an error."""
        status = question(*arguments)
        if status == _INVALID_CONTEXT:
            # torch creates the context of a thread late.
            with torch.cuda.device(self._device):
                self._runtime.setDevice(self._device.index)
                status = question(*arguments)
        if status:
            raise TransportUnavailableError(f"the CUDA driver reports error {status} for an address")

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory that other processes can map; release it with `free`.

        CUDA places small allocations side by side, and a peer that maps one of them can reach its neighbours. So the size
        is rounded up to whole units of CUDA's allocator.
        """
        with torch.cuda.device(self._device):
            return int(self._runtime.malloc(-(-nbytes // _GRANULARITY) * _GRANULARITY))

    def free(self, address: int) -> None:
        with torch.cuda.device(self._device):
            self._runtime.free(address)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """Return device memory, own or mapped, as a uint8 tensor that does not own it."""
        interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        device = torch.device("cuda", self._runtime.pointerGetAttributes(address).device)
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)

    # -- between processes ---------------------------------------------------------------------

    def handle_of(self, base: int) -> bytes:
        """Return the handle by which other processes map an allocation (``cudaIpcGetMemHandle``)."""
        with torch.cuda.device(self._device):
            return bytes(self._runtime.ipcGetMemHandle(base))

    def map(self, handle: bytes) -> int:
        """Map another process's allocation; return its local address. Raises RuntimeError if CUDA refuses."""
        with torch.cuda.device(self._device):
            return int(self._runtime.ipcOpenMemHandle(handle))

    def unmap(self, address: int) -> None:
        """Unmap what `map` returned; no queued work may use it."""
        with torch.cuda.device(self._device):
            self._runtime.ipcCloseMemHandle(address)

    def event(self) -> tuple[Event, bytes]:
        """Return a new interprocess event and its handle."""
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(interprocess=True)
            return event, bytes(event.ipc_handle())

    def event_of(self, handle: bytes) -> Event:
        """Open another process's event."""
        of: Callable[..., Event] = torch.cuda.Event.from_ipc_handle
        return of(self._device, handle)
