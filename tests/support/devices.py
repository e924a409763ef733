"""A pretended device that needs no hardware: the host itself, with streams that execute at once.

For tests of the device layer: the choice of a backend, the order of calls, and failures.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from asyncdist import sync
from asyncdist.config import Config
from asyncdist.groups.group import Group
from asyncdist.kernel.devices.group import DeviceGroup
from asyncdist.kernel.engine.work import joined
from asyncdist.kernel.memory.buffers import Memory
from asyncdist.kernel.memory.reduce_kernels import Arithmetic
from asyncdist.kernel.transport.device_collectives import DeviceCollectives
from asyncdist.kernel.transport.device_streams import DeviceEvent, Streams
from asyncdist.store import HashStore
from asyncdist.testing.cluster import run_ranks, world_of
from asyncdist.testing.collective_cases import CollectiveCase, collective_cases
from asyncdist_transports.staged import Staged


class PretendStreamEvent:
    """An event that the device passes as soon as it is not held."""

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
    """The host as a device. ``log`` holds the calls and their streams: ("wait_event", "ours"), ("record_event", "caller").

    `hold` makes later events wait for `release`; ``broken`` is the error that later events raise.
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
        """Return the calls on one stream, ``"ours"`` or the ``"caller"``'s: executors may use ours at any time."""
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

    def record_event(self, event: Any = None) -> DeviceEvent:
        if event is not None:
            event.record()
            return event
        self._note("record_event")
        return PretendStreamEvent(self._passing, self.broken)

    def wait_event(self, event: Any) -> None:
        if event is not None:
            assert isinstance(event, PretendStreamEvent), "a stream would wait for another process"
            self._note("wait_event")

    def is_idle(self) -> bool:
        return False

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
    def current_handle(self) -> int:
        return 0

    @property
    def uuid(self) -> str:
        return self._uuid


class PretendStaged(Staged):
    """The staged backend, without its check for a device."""

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
    """Open a world of ``size`` ranks in the running loop, as `world_of` does; yield their groups on pretended devices."""
    each = streams or [PretendStreams() for _ in range(size)]
    async with world_of(size, transport=transport, timeout=timeout, config=config) as groups:
        devices = [device_group(group, kinds, its) for group, its in zip(groups, each, strict=True)]
        try:
            yield devices
        finally:
            for device in devices:
                device.close()


def part_on(group: Group, device: torch.device) -> DeviceGroup:
    """Return the group of the same ranks for tensors on a device, as calls with such tensors find it."""
    return group._on(device)


def device_group(
    group: Group,
    kinds: Sequence[type[DeviceCollectives]] = (),
    streams: PretendStreams | None = None,
    name: str = "device",
) -> DeviceGroup:
    """Return the ranks of a group as if their CPU tensors lay on a device; call it on all of them."""
    host = group.world.new_group(group.ranks, name)
    return DeviceGroup(host, torch.device("cpu"), [*kinds, PretendStaged], streams or PretendStreams(), group)


@contextlib.contextmanager
def one_device(streams: PretendStreams, kinds: Sequence[type[DeviceCollectives]] = ()) -> Iterator[DeviceGroup]:
    """Open a world of this rank alone, and yield its group on a pretended device."""
    with sync.process_group("inproc", store=HashStore(), rank=0, world_size=1) as group:
        device = device_group(group, kinds, streams)
        try:
            yield device
        finally:
            streams.release()
            device.close()


def run_on_devices(
    size: int,
    program: Callable[[DeviceGroup], Any],
    kinds: Sequence[type[DeviceCollectives]] | Callable[[int], Sequence[type[DeviceCollectives]]] = (),
    streams: Sequence[PretendStreams] | None = None,
    **options: Any,
) -> list[Any]:
    """Run ``program(device)`` in a thread per rank, as `run_ranks` does; ``kinds`` may depend on the rank."""

    def rank(group: Group) -> Any:
        number = group.rank()
        its_kinds = kinds(number) if callable(kinds) else kinds
        device = device_group(group, its_kinds, None if streams is None else streams[number])
        try:
            return program(device)
        finally:
            device.close()

    return run_ranks(size, rank, **options)


class _Room(bytearray):
    """Memory that can be referenced weakly."""


def weakly_held(count: int) -> tuple[weakref.ref[Any], torch.Tensor]:
    """Return a tensor of ``count`` floats, and a weak reference to its memory."""
    room = _Room(4 * count)
    return weakref.ref(room), torch.frombuffer(room, dtype=torch.float32)


def device_cases(size: int, counts: Sequence[int], dtype: torch.dtype) -> list[CollectiveCase]:
    """Return the collective cases of all operations that device groups have: all but `monitored_barrier`."""
    cases = [case for count in counts for case in collective_cases(size, count, dtype)]
    return [case for case in cases if not case.name.startswith("monitored_barrier")]


def run_cases(run: Callable[..., list[Any]], size: int, cases: Sequence[CollectiveCase], **options: Any) -> list[Any]:
    """Run cases on every rank by ``run(size, program)``, one after the other, and check them; return the back ends."""

    def program(device: DeviceGroup) -> str | None:
        for case in cases:
            joined(case.start(device)).wait()
        return device.backend

    backends = run(size, program, **options)
    for case in cases:
        case.check()
    return backends


def run_cases_in_flight(
    run: Callable[..., list[Any]], size: int, cases: Sequence[CollectiveCase], **options: Any
) -> None:
    """Start cases on every rank by ``run(size, program)``, some of them by blocking calls, and check them."""

    def program(device: DeviceGroup) -> None:
        starts = [case.start(device, background=(n + device.rank()) % 3 != 0) for n, case in enumerate(cases)]
        joined(list(itertools.chain(*starts))).wait()

    run(size, program, **options)
    for case in cases:
        case.check()


class Queued(PretendStaged):
    """A backend whose calls only enqueue, as NCCL's do: an all-reduce adds one to its tensors."""

    name = "queued"
    blocks = False

    def all_reduce(self, fingerprint: int, memories: Sequence[Memory], kernels: Arithmetic) -> None:
        for memory in memories:
            memory.tensor.add_(1)
