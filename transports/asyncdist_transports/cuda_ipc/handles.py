"""Device memory and events shared between processes: exported and imported allocations, interprocess events.

A tensor is exported as its allocation's handle and the tensor's offset in the allocation. torch places many tensors in few
large allocations, so both sides cache: the exporter caches handles, the importer caches mappings. CUDA reuses addresses
after a free, so the caches compare the allocation's unique number.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch

from asyncdist.base.callables import Callback
from asyncdist.kernel.memory.bounded_cache import BoundedCache
from asyncdist.kernel.transport.device_p2p import TransferRefused
from asyncdist_transports.cuda_ipc.driver import HANDLE_NBYTES, Allocation, Driver

_KEPT_MAPPINGS = 256
# Tensors of one mapping that are kept.
_KEPT_VIEWS = 256
_KEPT_HANDLES = 4096
_EXPORTED = struct.Struct(f"<QQQQ{HANDLE_NBYTES}s")

Peer = int | str
"""Another process: a rank of a group, or the id of a process in no common group."""
Event = tuple[Any, bytes]
"""An interprocess event of this process, and its handle."""


class ExportedMemory(NamedTuple):
    """Location of a tensor: its allocation (address, unique number, handle), and the offset in it. Sizes in bytes."""

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
    """Memory that this process exports. Memory that cannot be mapped (torch's expandable segments) is copied first."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._handles: BoundedCache[int, tuple[int, bytes]] = BoundedCache(_KEPT_HANDLES)
        """Number and handle of an allocation, by its base address."""
        self._copies: dict[int, tuple[int, int]] = {}
        """Address and size of the copy buffers, by slot."""

    def locate(self, tensor: torch.Tensor) -> ExportedMemory | None:
        """Return the location of a flat tensor; None if its memory cannot be mapped."""
        if not tensor.numel():
            return NOTHING
        found = self._driver.allocation(tensor.data_ptr())
        return self._exported(found, tensor) if found.shareable else None

    def export(self, tensor: torch.Tensor, slot: int) -> tuple[torch.Tensor, ExportedMemory]:
        """Return a flat tensor, or a copy that can be mapped, and its location.

        Args:
            slot: Number of the copy buffer; two tensors that are in use at the same time need different slots.
        """
        location = self.locate(tensor)
        if location is not None:
            return tensor, location
        copy = self._copy_buffer(slot, tensor.nbytes).view(tensor.dtype)
        copy.copy_(tensor)
        return copy, self._exported(self._driver.allocation(copy.data_ptr()), copy)

    def _exported(self, allocation: Allocation, tensor: torch.Tensor) -> ExportedMemory:
        number, handle = self._handles.get(allocation.base, (None, b""))
        if number != allocation.number:
            _, handle = self._handles.add(allocation.base, (allocation.number, self._driver.handle_of(allocation.base)))
        offset = tensor.data_ptr() - allocation.base
        return ExportedMemory(allocation.base, allocation.number, offset, tensor.nbytes, handle)

    def _copy_buffer(self, slot: int, nbytes: int) -> torch.Tensor:
        """Return the exportable buffer of a slot, enlarged if it is too small."""
        address, capacity = self._copies.get(slot, (0, 0))
        if capacity < nbytes:
            if self._copies.pop(slot, None):
                self._driver.free(address)
            capacity = 1 << (nbytes - 1).bit_length()
            address = self._driver.allocate(capacity)
            self._copies[slot] = address, capacity
        return self._driver.bytes_at(address, nbytes)

    def close(self) -> None:
        """Free the buffers for copies; no queued work may use them."""
        while self._copies:
            _, (address, _) = self._copies.popitem()
            self._driver.free(address)


class _Mapping(NamedTuple):
    """A mapped allocation: its number, its local address, and tensors of its memory by offset and size."""

    number: int
    address: int
    views: BoundedCache[tuple[int, int], torch.Tensor]


class Imports:
    """Memory of other processes, mapped here. ``wait_until_idle`` blocks until no queued work uses a mapping.

    A mapping is kept until its peer exports another allocation at the same address, or until there are too many mappings
    and it is the least recently used one.
    """

    def __init__(self, driver: Driver, wait_until_idle: Callback) -> None:
        self._driver = driver
        self._wait_until_idle = wait_until_idle
        self._mapped: OrderedDict[tuple[Peer, int], _Mapping] = OrderedDict()

    def open(self, peer: Peer, exported: ExportedMemory) -> torch.Tensor:
        """Return the exported memory of a peer as a uint8 tensor. Raises TransferRefused if CUDA cannot map it."""
        try:
            return self._open(peer, exported)
        except RuntimeError as cause:
            raise TransferRefused(f"its device's memory cannot be mapped: {cause}") from cause

    def _open(self, peer: Peer, exported: ExportedMemory) -> torch.Tensor:
        key = peer, exported.base
        mapping = self._mapped.get(key)
        if mapping is None or mapping.number != exported.number:
            if mapping is not None:
                self._unmap(key)
            elif len(self._mapped) >= _KEPT_MAPPINGS:
                self._unmap(next(iter(self._mapped)))
            mapping = self._mapped[key] = _Mapping(
                exported.number, self._driver.map(exported.handle), BoundedCache(_KEPT_VIEWS)
            )
        self._mapped.move_to_end(key)
        place = exported.offset, exported.nbytes
        view = mapping.views.get(place)
        if view is None:
            shown = self._driver.bytes_at(mapping.address + exported.offset, exported.nbytes)
            view = mapping.views.add(place, shown)
        return view

    def forget(self, peer: Peer) -> None:
        """Unmap the memory of a peer."""
        self._unmap(*[key for key in self._mapped if key[0] == peer])

    def _unmap(self, *keys: tuple[Peer, int]) -> None:
        if keys:
            self._wait_until_idle()
        for key in keys:
            self._driver.unmap(self._mapped.pop(key).address)

    def close(self) -> None:
        """Unmap everything; no queued work may use it."""
        while self._mapped:
            _, mapping = self._mapped.popitem()
            self._driver.unmap(mapping.address)


class EventPool:
    """Interprocess events: the free ones of this process, by the peer that uses them, and those opened from peers.

    They are used again, because making one takes longer than recording it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: dict[Peer, list[Event]] = defaultdict(list)
        self.made: list[Event] = []
        self._peer_events: dict[tuple[Peer, bytes], Any] = {}

    def acquire(self, peer: Peer) -> Event:
        """Return an event whose earlier records the peer needs no more."""
        free = self._free[peer]
        if free:
            return free.pop()
        self.made.append(made := self._driver.event())
        return made

    def release(self, peer: Peer, event: Event) -> None:
        """Return an event to the pool; the peer needs its last record no more, or its stream waits for it already."""
        self._free[peer].append(event)

    def of(self, peer: Peer, handle: bytes) -> Any:
        """Return a peer's event, opened on first use. Raises TransferRefused if CUDA cannot open it."""
        found = self._peer_events.get((peer, handle))
        if found is None:
            try:
                found = self._peer_events[peer, handle] = self._driver.event_of(handle)
            except RuntimeError as cause:
                raise TransferRefused(f"an event of its device cannot be opened: {cause}") from cause
        return found

    def forget(self, peer: Peer) -> None:
        """Close the events opened from a peer that has ended."""
        for key in [key for key in self._peer_events if key[0] == peer]:
            del self._peer_events[key]
