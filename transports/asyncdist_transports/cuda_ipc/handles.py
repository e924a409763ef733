"""Memory of devices between processes: whose allocation is mapped where.

A tensor is shown as the allocation that holds it, by a handle that other processes map, and where in it the tensor lies.
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
_SHOWN = struct.Struct(f"<QQQQ{HANDLE_NBYTES}s")


class Shown(NamedTuple):
    """Where a tensor lies: its allocation, by address and number, how to map that, and the tensor's place in it."""

    base: int
    number: int
    offset: int
    nbytes: int
    handle: bytes

    def pack(self) -> bytes:
        return _SHOWN.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> Shown:
        return cls(*_SHOWN.unpack(packed))


SHOWN_NBYTES = _SHOWN.size
NOTHING = Shown(0, 0, 0, 0, bytes(HANDLE_NBYTES))


class Exports:
    """What we show. Memory that cannot cross (torch's expandable segments) is shown by a copy in memory that can."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._handles: dict[int, tuple[int, bytes]] = {}  # by base: the allocation's number, and its handle
        self._rooms: list[tuple[int, int]] = []  # address and bytes of memory for copies, by place

    def show(self, tensor: torch.Tensor, place: int) -> tuple[torch.Tensor, Shown]:
        """Return a flat tensor as it is shown, itself or a copy: the ``place``-th of a call; and where it lies."""
        if not tensor.numel():
            return tensor, NOTHING
        found = self._driver.allocation(tensor.data_ptr())
        if found.crosses:
            return tensor, self._shown(found, tensor)
        copy = self._room(place, tensor.nbytes).view(tensor.dtype)
        copy.copy_(tensor)
        return copy, self._shown(self._driver.allocation(copy.data_ptr()), copy)

    def _shown(self, allocation: Allocation, tensor: torch.Tensor) -> Shown:
        number, handle = self._handles.get(allocation.base, (None, b""))
        if number != allocation.number:
            if len(self._handles) >= _KEPT_HANDLES:
                self._handles.clear()
            handle = self._driver.handle_of(allocation.base)
            self._handles[allocation.base] = allocation.number, handle
        offset = tensor.data_ptr() - allocation.base
        return Shown(allocation.base, allocation.number, offset, tensor.nbytes, handle)

    def _room(self, place: int, nbytes: int) -> torch.Tensor:
        """Return memory that crosses, the same for the same place of later calls, which come when this one is over."""
        while len(self._rooms) <= place:
            self._rooms.append((0, 0))
        address, room = self._rooms[place]
        if room < nbytes:
            if address:
                self._driver.free(address)
            self._rooms[place] = 0, 0
            room = 1 << (nbytes - 1).bit_length()
            address = self._driver.allocate(room)
            self._rooms[place] = address, room
        return self._driver.bytes_at(address, nbytes)

    def close(self) -> None:
        """Free the memory for copies; nothing in any queue may use it any more."""
        for address, _ in self._rooms:
            if address:
                self._driver.free(address)
        self._rooms.clear()
        self._handles.clear()


class Imports:
    """What others show us, mapped here. ``quiet`` blocks until nothing in our queue uses any mapping.

    A mapping outlives what it shows: it goes when its rank shows another allocation at the same address, or when it is
    the one that has not been looked at for longest.
    """

    def __init__(self, driver: Driver, quiet: Callable[[], None]) -> None:
        self._driver = driver
        self._quiet = quiet
        self._mapped: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()

    def see(self, rank: int, shown: Shown) -> torch.Tensor:
        """Return what a rank shows, as bytes. RuntimeError says what CUDA has against mapping it."""
        key = rank, shown.base
        number, address = self._mapped.get(key, (None, 0))
        if number != shown.number:
            if number is not None:
                self._let_go(key)
            elif len(self._mapped) >= _KEPT_MAPPINGS:
                self._let_go(next(iter(self._mapped)))
            address = self._driver.map(shown.handle)
            self._mapped[key] = shown.number, address
        self._mapped.move_to_end(key)
        return self._driver.bytes_at(address + shown.offset, shown.nbytes)

    def _let_go(self, key: tuple[int, int]) -> None:
        self._quiet()
        _, address = self._mapped.pop(key)
        self._driver.unmap(address)

    def close(self) -> None:
        """Unmap everything; nothing in any queue may use it any more."""
        while self._mapped:
            _, (_, address) = self._mapped.popitem()
            self._driver.unmap(address)
