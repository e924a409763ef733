"""A pretended device whose memory other processes map: anonymous shared memory, and words in it for the events.

As with CUDA, memory that is mapped stays when its process is killed, and that of a process that has ended cannot be mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import weakref
from typing import Any

import torch

from asyncdist_transports.cuda_ipc.driver import Allocation
from tests.support.cuda import cuda_ipc_over
from tests.support.device_tensors import OnDevice, PretendLending

_NBYTES = 64 << 20
_HANDLE = struct.Struct("<QQQ40x")
"""Process, descriptor, and the offset of an event."""
_EVENT_NBYTES = 16
_ALIGNMENT = 256


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Mapping:
    """Shared memory that this process has mapped. Python's own mapping would keep the descriptor open."""

    def __init__(self, descriptor: int) -> None:
        self.address = _libc.mmap(None, _NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        assert self.address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        weakref.finalize(self, _libc.munmap, self.address, _NBYTES)

    def word(self, offset: int) -> Any:
        return ctypes.c_uint64.from_address(self.address + offset)


class SharedMemoryEvent:
    """An event: how often it was recorded, and which record the device has passed."""

    def __init__(self, driver: SharedDriver, mapping: _Mapping, offset: int) -> None:
        self._driver, self._mapping = driver, mapping
        self._records, self._passed = mapping.word(offset), mapping.word(offset + 8)

    def record(self) -> None:
        self._records.value += 1
        if not self._driver.holds:
            self.go_on()

    def go_on(self) -> None:
        self._passed.value = self._records.value

    def query(self) -> bool:
        return bool(self._passed.value == self._records.value)


class SharedDriver:
    """The driver of the only device of one process. ``holds`` lets the events that are recorded wait for `go_on`."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("pretended-device", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, _NBYTES)
        self._own = _Mapping(self._descriptor)
        self._used = 0
        self._events: list[SharedMemoryEvent] = []
        self.holds = False
        self.mapped: dict[int, _Mapping] = {}
        self._events_of: dict[tuple[int, int], _Mapping] = {}

    def go_on(self) -> None:
        self.holds = False
        for event in self._events:
            event.go_on()

    def allocation(self, address: int) -> Allocation:
        is_own = self._own.address <= address < self._own.address + _NBYTES
        return Allocation(self._own.address if is_own else address, 1, is_own)

    def allocate(self, nbytes: int) -> int:
        at = self._used
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        assert self._used <= _NBYTES, "the pretended device is full"
        return self._own.address + at

    def free(self, address: int) -> None:
        assert self.allocation(address).shareable

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)

    def tensor(self, values: torch.Tensor) -> OnDevice:
        """Return a copy of a tensor in the memory of the device."""
        room = self.bytes_at(self.allocate(values.nbytes), values.nbytes)
        made = room.view(values.dtype).view(values.shape).copy_(values.as_subclass(torch.Tensor))
        return made.as_subclass(type("OnSharedDevice", (OnDevice,), {"clone": lambda each: self.tensor(each)}))

    def handle_of(self, base: int) -> bytes:
        return _HANDLE.pack(os.getpid(), self._descriptor, 0)

    def map(self, handle: bytes) -> int:
        mapping = self._open(handle)
        self.mapped[mapping.address] = mapping
        return mapping.address

    def _open(self, handle: bytes) -> _Mapping:
        process, number, _ = _HANDLE.unpack(handle)
        try:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        except OSError as cause:
            raise RuntimeError(f"invalid handle: {cause}") from cause
        try:
            return _Mapping(descriptor)
        finally:
            os.close(descriptor)

    def unmap(self, address: int) -> None:
        del self.mapped[address]

    def event(self) -> tuple[SharedMemoryEvent, bytes]:
        offset = self.allocate(_EVENT_NBYTES) - self._own.address
        event = SharedMemoryEvent(self, self._own, offset)
        self._events.append(event)
        return event, _HANDLE.pack(os.getpid(), self._descriptor, offset)

    def event_of(self, handle: bytes) -> SharedMemoryEvent:
        process, descriptor, offset = _HANDLE.unpack(handle)
        mapping = self._events_of.get((process, descriptor))
        if mapping is None:
            mapping = self._events_of[process, descriptor] = self._open(handle)
        return SharedMemoryEvent(self, mapping, offset)

    def close(self) -> None:
        """Give up the memory of this process."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


class SharedLending(PretendLending):
    """The pretended device of one session; its memory is shared with other processes."""

    def __init__(self, transport: str | None) -> None:
        super().__init__(transport)
        self.driver = driver = SharedDriver()
        self.kinds = [cuda_ipc_over(kind=lambda: driver)]

    def place(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        self.num_from_host += 1
        return self.driver.tensor(tensor)

    async def read(self, *args: Any) -> list[torch.Tensor] | None:
        found = await super().read(*args)
        return None if found is None else [self.driver.tensor(tensor) for tensor in found]

    async def close(self) -> None:
        await super().close()
        self.driver.close()
