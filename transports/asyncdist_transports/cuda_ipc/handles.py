"""Memory of devices between processes: whose allocation is mapped where.

A tensor is exported as the allocation that holds it, by a handle that other processes map, and where in it the tensor lies.
torch takes large allocations and cuts tensors out of them, so few handles serve many tensors: those who show keep the
handles, those who look keep the mappings. Addresses are given out again after they were freed; an allocation's number is
not, and tells whether what is kept is still meant.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch

from asyncdist_transports.cuda_ipc.driver import HANDLE_NBYTES, Allocation, Driver

_KEPT_MAPPINGS = 256
_KEPT_HANDLES = 4096
_EXPORTED = struct.Struct(f"<QQQQ{HANDLE_NBYTES}s")


class ExportedMemory(NamedTuple):
    """Where a tensor lies: its allocation, by address and number, how to map that, and the tensor's slot in it."""

    base: int
    number: int
    offset: int
    nbytes: int
    handle: bytes

    def pack(self) -> bytes:
        return _EXPORTED.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> ExportedMemory:
        return cls(*_EXPORTED.unpack(packed))


EXPORTED_NBYTES = _EXPORTED.size
NOTHING = ExportedMemory(0, 0, 0, 0, bytes(HANDLE_NBYTES))


class Exports:
    """What we show. Memory that cannot cross (torch's expandable segments) is exported by a copy in memory that can."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._handles: dict[int, tuple[int, bytes]] = {}  # by base: the allocation's number, and its handle
        self._copies: list[tuple[int, int]] = []  # address and bytes of memory for copies, by slot

    def export(self, tensor: torch.Tensor, slot: int) -> tuple[torch.Tensor, ExportedMemory]:
        """Return a flat tensor as it is exported, itself or a copy: the ``slot``-th of a call; and where it lies."""
        if not tensor.numel():
            return tensor, NOTHING
        found = self._driver.allocation(tensor.data_ptr())
        if found.shareable:
            return tensor, self._exported(found, tensor)
        copy = self._copy_buffer(slot, tensor.nbytes).view(tensor.dtype)
        copy.copy_(tensor)
        return copy, self._exported(self._driver.allocation(copy.data_ptr()), copy)

    def _exported(self, allocation: Allocation, tensor: torch.Tensor) -> ExportedMemory:
        number, handle = self._handles.get(allocation.base, (None, b""))
        if number != allocation.number:
            if len(self._handles) >= _KEPT_HANDLES:
                self._handles.clear()
            handle = self._driver.handle_of(allocation.base)
            self._handles[allocation.base] = allocation.number, handle
        offset = tensor.data_ptr() - allocation.base
        return ExportedMemory(allocation.base, allocation.number, offset, tensor.nbytes, handle)

    def _copy_buffer(self, slot: int, nbytes: int) -> torch.Tensor:
        """Return memory that shareable, the same for the same slot of later calls, which come when this one is over."""
        while len(self._copies) <= slot:
            self._copies.append((0, 0))
        address, room = self._copies[slot]
        if room < nbytes:
            if address:
                self._driver.free(address)
            self._copies[slot] = 0, 0
            room = 1 << (nbytes - 1).bit_length()
            address = self._driver.allocate(room)
            self._copies[slot] = address, room
        return self._driver.bytes_at(address, nbytes)

    def close(self) -> None:
        """Free the memory for copies; nothing in any queue may use it any more."""
        for address, _ in self._copies:
            if address:
                self._driver.free(address)
        self._copies.clear()
        self._handles.clear()


class Imports:
    """What others show us, mapped here. ``wait_until_idle`` blocks until nothing in our queue uses any mapping.

    A mapping outlives what it shows: it goes when its rank shows another allocation at the same address, or when it is
    the one that has not been looked at for longest.
    """

    def __init__(self, driver: Driver, wait_until_idle: Callable[[], None]) -> None:
        self._driver = driver
        self._quiet = wait_until_idle
        self._mapped: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()

    def open(self, rank: int, exported: ExportedMemory) -> torch.Tensor:
        """Return what a rank shows, as bytes. RuntimeError says what CUDA has against mapping it."""
        key = rank, exported.base
        number, address = self._mapped.get(key, (None, 0))
        if number != exported.number:
            if number is not None:
                self._unmap(key)
            elif len(self._mapped) >= _KEPT_MAPPINGS:
                self._unmap(next(iter(self._mapped)))
            address = self._driver.map(exported.handle)
            self._mapped[key] = exported.number, address
        self._mapped.move_to_end(key)
        return self._driver.bytes_at(address + exported.offset, exported.nbytes)

    def _unmap(self, key: tuple[int, int]) -> None:
        self._quiet()
        _, address = self._mapped.pop(key)
        self._driver.unmap(address)

    def close(self) -> None:
        """Unmap everything; nothing in any queue may use it any more."""
        while self._mapped:
            _, (_, address) = self._mapped.popitem()
            self._driver.unmap(address)
