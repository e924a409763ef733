"""A device that there is everywhere: the host itself, with streams that do at once what they are told.

For tests of what surrounds a device: which way is chosen, in which order things are done, what happens when they fail.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from asyncdist.algorithms.schedule import Schedule
from asyncdist.config import Config
from asyncdist.devices.group import DeviceGroup
from asyncdist.groups.group import Group
from asyncdist.memory.buffers import Memory
from asyncdist.memory.reduce_kernels import Arithmetic
from asyncdist.testing.cluster import world_of
from asyncdist.transport.device_collectives import DeviceCollectives, nothing
from asyncdist.transport.device_streams import DeviceEvent, Streams
from asyncdist_transports.staged import Staged


class PretendStreamEvent:
    """A place in a stream that is passed as soon as its device is not held."""

    def __init__(self, held: threading.Event, broken: Exception | None) -> None:
        self._held, self._broken = held, broken

    def query(self) -> bool:
        if self._broken is not None:
            raise self._broken
        return self._held.is_set()

    def synchronize(self) -> None:
        if self._broken is not None:
            raise self._broken
        self._held.wait()


class PretendStreams(Streams):
    """The host as a device. ``log`` tells what was asked, as ("wait_event", "ours"), ("record_event", "caller"), …

    `hold` makes events from then on wait for `release`; ``broken`` is what they fail with.
    """

    def __init__(self, uuid: str = "GPU-pretended") -> None:
        self.device = torch.device("cpu")
        self.log: list[tuple[str, str]] = []
        self.broken: Exception | None = None
        self.captures = False
        self._uuid = uuid
        self._inside = threading.local()
        self._passing = threading.Event()
        self._passing.set()

    def hold(self) -> None:
        self._passing = threading.Event()

    def release(self) -> None:
        self._passing.set()

    def asked(self, whose: str) -> list[str]:
        """Return what ``"ours"`` or the ``"caller"``'s was asked: a line's thread may be in ours at any time."""
        return [what for what, stream in self.log if stream == whose]

    def _note(self, what: str) -> None:
        self.log.append((what, "ours" if getattr(self._inside, "depth", 0) else "caller"))

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        self._inside.depth = getattr(self._inside, "depth", 0) + 1
        try:
            yield
        finally:
            self._inside.depth -= 1

    def with_new_stream(self) -> PretendStreams:
        return self

    def on_comm_stream(self) -> AbstractContextManager[object]:
        return self._within()

    def record_event(self) -> DeviceEvent:
        self._note("record_event")
        return PretendStreamEvent(self._passing, self.broken)

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, PretendStreamEvent)
        self._note("wait_event")

    def ordered_after(self, event: DeviceEvent) -> AbstractContextManager[object]:
        assert isinstance(event, PretendStreamEvent)
        self._note("ordered_after")
        return self._within()

    def is_capturing(self) -> bool:
        return self.captures

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    def record_stream(self, tensor: torch.Tensor) -> None:
        self._note("record_stream")

    @property
    def handle(self) -> int:
        return 0

    @property
    def uuid(self) -> str:
        return self._uuid


class PretendStaged(Staged):
    """The way through the host, which asks for no device."""

    @classmethod
    def probe(cls) -> None:
        return None


@contextlib.asynccontextmanager
async def devices_of(
    size: int,
    kinds: Sequence[type[DeviceCollectives]] = (),
    streams: Sequence[PretendStreams] | None = None,
    *,
    transport: str = "inproc",
    timeout: float = 20.0,
    config: Config | None = None,
) -> AsyncIterator[list[DeviceGroup]]:
    """Hold a world of ``size`` ranks in the running loop, as `world_of` does; gives their groups on pretended devices."""
    each = streams or [PretendStreams() for _ in range(size)]
    async with world_of(size, transport=transport, timeout=timeout, config=config) as groups:
        devices = [device_group(group, kinds, its) for group, its in zip(groups, each, strict=True)]
        try:
            yield devices
        finally:
            for device in devices:
                device.close()


def device_group(
    group: Group,
    kinds: Sequence[type[DeviceCollectives]] = (),
    streams: PretendStreams | None = None,
    name: str = "device",
) -> DeviceGroup:
    """Return the ranks of a group as if their CPU tensors lay on a device; call it on all of them."""
    host = group.world.new_group(group.ranks, name)
    return DeviceGroup(host, torch.device("cpu"), [*kinds, PretendStaged], streams or PretendStreams(), group)


class Queued(PretendStaged):
    """A way whose calls are in the device's queue when they return, as NCCL's are: each adds one to what it is given."""

    name = "queued"
    blocks = False

    def all_reduce(self, fingerprint: int, memories: Sequence[Memory], how: Arithmetic) -> Schedule:
        for memory in memories:
            memory.tensor.add_(1)
        return nothing()
