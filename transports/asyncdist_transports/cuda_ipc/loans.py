"""Loans between processes that map one another's device memory: the borrower copies from the owner's tensor.

The event of a loan is an interprocess event, which the borrower's host polls. It is recorded again when the loan has ended.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import ClassVar

import torch

from asyncdist.errors import TransportUnavailableError
from asyncdist.kernel.transport.device_loans import DeviceLoan, DeviceLoans
from asyncdist.kernel.transport.device_p2p import TransferRefused
from asyncdist.kernel.transport.device_streams import DeviceEvent, Streams, becomes_idle
from asyncdist_transports.cuda_ipc.driver import HANDLE_NBYTES, Driver
from asyncdist_transports.cuda_ipc.handles import EXPORTED_NBYTES, EventPool, ExportedMemory
from asyncdist_transports.cuda_ipc.peer_memory import IDLE_TIMEOUT, PeerMemory

_LOCATION = struct.Struct(f"<{EXPORTED_NBYTES}s{HANDLE_NBYTES}s")
# No stream waits for the event of a loan, so any borrower may get it next.
_ANY_BORROWER = ""


class CudaIpcLoans(DeviceLoans):
    """The loans of one CUDA device over CUDA IPC."""

    name: ClassVar[str] = "cuda_ipc"

    def __init__(self, streams: Streams, driver: Driver) -> None:
        super().__init__(streams)
        self._driver = driver
        self._memory = PeerMemory(driver, streams)
        self._events = EventPool(driver)

    # -- the owner ---------------------------------------------------------------------------------

    @property
    def probe(self) -> bytes:
        return self._memory.probe

    def can_lend(self, tensor: torch.Tensor) -> bool:
        try:
            return self._driver.allocation(tensor.data_ptr()).shareable
        # Memory of another allocator, of which the driver knows nothing.
        except TransportUnavailableError:
            return False

    def lend(self, tensors: Sequence[torch.Tensor], ready: DeviceEvent) -> DeviceLoan:
        exported = [self._locate(tensor) for tensor in tensors]
        event, handle = own = self._events.acquire(_ANY_BORROWER)
        with self.streams.ordered_after(ready):
            self.streams.record_event(event)
        return DeviceLoan([_LOCATION.pack(each, handle) for each in exported], own)

    def _locate(self, tensor: torch.Tensor) -> bytes:
        location = self._memory.exports.locate(tensor)
        if location is None:
            raise TransferRefused("the memory of a tensor cannot be mapped by other processes")
        return location.pack()

    def end(self, loan: DeviceLoan) -> None:
        self._events.release(_ANY_BORROWER, loan.held)

    # -- the borrower ------------------------------------------------------------------------------

    def verify(self, owner: str, probe: bytes) -> None:
        self._memory.verify(owner, probe)

    def ready(self, owner: str, location: bytes) -> DeviceEvent:
        event: DeviceEvent = self._events.of(owner, _LOCATION.unpack(location)[1])
        return event

    def read(
        self, owner: str, locations: Sequence[bytes], targets: Sequence[torch.Tensor], before: DeviceEvent | None
    ) -> DeviceEvent:
        with self.streams.on_comm_stream():
            self.streams.wait_event(before)
            try:
                for location, target in zip(locations, targets, strict=True):
                    exported, _ = _LOCATION.unpack(location)
                    # The next mapping may take the place of this one, and then waits for its copy.
                    target.copy_(self._memory.imports.open(owner, ExportedMemory.unpack(exported)))
            except (RuntimeError, TransferRefused) as cause:
                becomes_idle(self.streams, IDLE_TIMEOUT)
                raise TransferRefused(str(cause)) from cause
            return self.streams.record_event()

    def forget(self, owner: str) -> None:
        self._memory.forget(owner)
        self._events.forget(owner)

    def close(self) -> None:
        self._memory.close(self._events.made)
