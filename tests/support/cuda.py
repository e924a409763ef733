"""CUDA's rules for memory and events that cross between processes, over the memory of this one.

Ranks are threads, so that "mapping" another's memory is knowing its address. AssertionError says which rule was broken.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from asyncdist_transports.cuda_ipc import CudaIpc
from asyncdist_transports.cuda_ipc.driver import Allocation

HANDLE = struct.Struct("<QQ48x")


class PretendEvent:
    """A shareable event. A wait refers to the last record, and must come after it.

    The device passes a record at once, unless ``holds`` of the driver is set: then it does so when the driver's `go_on` is
    called.
    """

    def __init__(self, driver: PretendDriver) -> None:
        self.records = self.passed = 0
        self.driver = driver

    def record(self) -> None:
        self.records += 1
        if not self.driver.holds:
            self.passed = self.records


class TheirEvent:
    """The same as another process opens it. No stream may wait for it: that would never end if the process was killed."""

    def __init__(self, event: PretendEvent) -> None:
        self.event = event

    def query(self) -> bool:
        assert self.event.records, "asked about a record that was not there yet"
        return self.event.passed == self.event.records


class PretendDriver:
    """One rank's driver. ``shareable`` says whether tensors may be mapped by others, ``refuses`` is what mapping raises.

    ``taken`` and ``mapped`` are what was not given back; ``maps``, ``handles`` and ``made_events`` count what was made.
    """

    events: ClassVar[dict[int, PretendEvent]] = {}
    lock = threading.Lock()

    def __init__(self, *, shareable: bool = True, refuses: Exception | None = None) -> None:
        self.shareable, self.refuses = shareable, refuses
        self.taken: dict[int, Any] = {}
        self.mapped: dict[int, int] = {}
        self.maps = self.handles = self.made_events = 0
        self.holds = False
        self.numbers: dict[int, int] = {}  # by address; a test gives another one to what was freed and given out again

    def allocation(self, address: int) -> Allocation:
        own = any(base <= address < base + len(room) for base, room in self.taken.items())
        return Allocation(address, self.numbers.get(address, 1), self.shareable or own)

    def allocate(self, nbytes: int) -> int:
        room = (ctypes.c_char * nbytes)()
        self.taken[ctypes.addressof(room)] = room
        return ctypes.addressof(room)

    def free(self, address: int) -> None:
        del self.taken[address]

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)

    def handle_of(self, base: int) -> bytes:
        self.handles += 1
        return HANDLE.pack(base, self.numbers.get(base, 1))

    def map(self, handle: bytes) -> int:
        if self.refuses is not None:
            raise self.refuses
        base, _ = HANDLE.unpack(handle)
        self.maps += 1
        self.mapped[base] = self.mapped.get(base, 0) + 1
        return int(base)

    def unmap(self, address: int) -> None:
        self.mapped[address] -= 1
        assert self.mapped[address] >= 0
        if not self.mapped[address]:
            del self.mapped[address]

    def event(self) -> tuple[PretendEvent, bytes]:
        self.made_events += 1
        with self.lock:
            number = len(self.events)
            self.events[number] = event = PretendEvent(self)
        return event, HANDLE.pack(number, 0)

    def go_on(self) -> None:
        """Let the device pass the events that it has held."""
        self.holds = False
        for event in self.held_events():
            event.passed = event.records

    def held_events(self) -> list[PretendEvent]:
        return [event for event in list(self.events.values()) if event.driver is self and event.records > event.passed]

    def event_of(self, handle: bytes) -> TheirEvent:
        return TheirEvent(self.events[HANDLE.unpack(handle)[0]])


def cuda_ipc_over(
    made: list[PretendDriver] | None = None, *, kind: Callable[..., Any] = PretendDriver, **keywords: Any
) -> type[CudaIpc]:
    """Return CudaIpc over pretended drivers, which are put into ``made``."""

    def make(device: torch.device) -> Any:
        driver = kind(**keywords)
        if made is not None:
            made.append(driver)
        return driver

    return type("CudaIpcOfTest", (CudaIpc,), {"make_driver": staticmethod(make), "probe": classmethod(lambda _: None)})
