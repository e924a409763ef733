"""What a rank process measures on CUDA devices: our ways between them, gloo and NCCL by torch, and copies on one device.

Ranks stand on the devices in turn, several on one if there are not enough. Each call has two times: until it returns,
and until the data is there. Between calls the device is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

import asyncdist
from asyncdist import sync
from asyncdist.bench.contenders.contenders import TIMEOUT, awaited_world
from asyncdist.bench.pace import StartPacer
from asyncdist.bench.plan import BenchPlan
from asyncdist.bench.result import DeviceRow, DeviceTiming, Timing
from asyncdist.errors import BenchmarkError, GroupError, TransportUnavailableError
from asyncdist.transport import registry

_TICK = 0.5e-3  # seconds between two ticks of the loop that must go on

Call = Callable[[], None]
Prepare = Callable[[str, torch.Tensor], Call]
"""Given a collective and a tensor, returns what does one call."""


class DeviceContender(NamedTuple):
    """``prepare`` gives what calls; ``ticks`` what the latest tick of a loop was since it was asked last."""

    name: str
    prepare: Prepare
    ticks: Callable[[], float] | None = None


def measure_device(
    plan: BenchPlan, rank: int, folder: Path, pace: StartPacer, tell: Callable[[float], None]
) -> Iterator[DeviceRow]:
    """Yield a row for each case, on every rank; what there was to say about who does not compete is in the first."""
    device = torch.device(plan.device, rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    with contextlib.ExitStack() as stack:
        contenders, absent = _open(plan, rank, folder, device, stack)
        host = stack.enter_context(_world("host", None, plan, rank, folder))
        for collective, nbytes in plan.cases:
            yield _row(plan, rank, collective, nbytes, contenders, absent, pace, host, tell)
            absent = {}
        pace()


# -- who competes -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _world(name: str, backend: str | None, plan: BenchPlan, rank: int, folder: Path) -> Iterator[asyncdist.Group]:
    meeting = (folder / f"device-{name}").as_uri()
    where: dict[str, Any] = {"rank": rank, "world_size": plan.ranks, "init_method": meeting, "timeout": TIMEOUT}
    with sync.process_group(backend=backend, group_name=name, **where) as group:
        yield group


def _open(
    plan: BenchPlan, rank: int, folder: Path, device: torch.device, stack: contextlib.ExitStack
) -> tuple[list[DeviceContender], dict[str, str]]:
    """Open everybody who can compete, alike on every rank; and say why the others do not."""
    contenders: list[DeviceContender] = []
    absent: dict[str, str] = {}
    for name in ("asyncdist", *registry.names(registry.ENSEMBLES)):
        try:
            if name != "asyncdist" and (reason := registry.load_class(name, registry.ENSEMBLES).probe()) is not None:
                raise TransportUnavailableError(reason)
            backend = None if name == "asyncdist" else f"cpu:auto,cuda:{name}"
            group = stack.enter_context(_world(name, backend, plan, rank, folder))
            on: Any = group.on(device)
            on.all_reduce(torch.zeros(1, device=device)).synchronize()
            if name not in ("asyncdist", on.backend):
                raise TransportUnavailableError(f"the ranks took {on.backend} instead")
        except (GroupError, TransportUnavailableError) as error:
            absent[name] = str(error)
        else:
            contenders.append(DeviceContender(name, functools.partial(_ours, group)))
    contenders.append(stack.enter_context(_awaited(plan, rank, folder, device)))
    contenders += stack.enter_context(_torch(plan, rank, folder, absent))
    return contenders, absent


def _ours(group: asyncdist.Group, collective: str, tensor: torch.Tensor) -> Call:
    start = functools.partial(group.all_reduce, tensor)
    if collective == "broadcast":
        start = functools.partial(group.broadcast, tensor, 0)
    elif collective == "send":
        return functools.partial(_pass_on, group, tensor)

    def call() -> None:
        start().wait()

    return call


def _pass_on(group: asyncdist.Group, tensor: torch.Tensor) -> None:
    rank = group.rank()
    if rank:
        group.recv(tensor, rank - 1).wait()
    if rank + 1 < group.size():
        group.send(tensor, rank + 1).wait()


class _Ticking:
    """A loop of a world's own that ticks while it awaits."""

    def __init__(self, loop: asyncio.AbstractEventLoop, group: asyncdist.Group) -> None:
        self._loop, self._group = loop, group
        self._latest = 0.0

    def prepare(self, collective: str, tensor: torch.Tensor) -> Call:
        return lambda: self._loop.run_until_complete(self._call(collective, tensor))

    def ticks(self) -> float:
        latest, self._latest = self._latest, 0.0
        return latest

    async def _call(self, collective: str, tensor: torch.Tensor) -> None:
        last = perf_counter()

        async def tick() -> None:
            nonlocal last
            while True:
                await asyncio.sleep(_TICK)
                note()

        def note() -> None:
            nonlocal last
            now = perf_counter()
            self._latest, last = max(self._latest, now - last - _TICK), now

        ticker = asyncio.ensure_future(tick())
        try:
            await self._done(collective, tensor)
            note()
        finally:
            ticker.cancel()

    async def _done(self, collective: str, tensor: torch.Tensor) -> None:
        group, rank = self._group, self._group.rank()
        if collective == "all_reduce":
            await group.all_reduce(tensor)
        elif collective == "broadcast":
            await group.broadcast(tensor, 0)
        else:
            if rank:
                await group.recv(tensor, rank - 1)
            if rank + 1 < group.size():
                await group.send(tensor, rank + 1)


@contextlib.contextmanager
def _awaited(plan: BenchPlan, rank: int, folder: Path, device: torch.device) -> Iterator[DeviceContender]:
    meeting = (folder / "device-awaited").as_uri()
    where: dict[str, Any] = {"rank": rank, "world_size": plan.ranks, "init_method": meeting, "timeout": TIMEOUT}
    with awaited_world(**where) as (loop, group):
        ticking = _Ticking(loop, group)
        ticking.prepare("all_reduce", torch.zeros(1, device=device))()
        ticking.ticks()  # what the meeting took is none of them
        yield DeviceContender("awaited", ticking.prepare, ticking.ticks)


@contextlib.contextmanager
def _torch(plan: BenchPlan, rank: int, folder: Path, absent: dict[str, str]) -> Iterator[list[DeviceContender]]:
    """Open torch.distributed on gloo, and on NCCL where each rank has a device."""
    from torch import distributed

    timeout = timedelta(seconds=TIMEOUT)
    meeting = (folder / "device-torch").as_uri()
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=plan.ranks, timeout=timeout)
    try:
        contenders = [DeviceContender("gloo", functools.partial(_theirs, None))]
        if plan.ranks > torch.cuda.device_count():
            absent["torch's nccl"] = "it takes a device a rank"
        elif not distributed.is_nccl_available():
            absent["torch's nccl"] = "this torch is built without it"
        else:
            nccl = distributed.new_group(backend="nccl", timeout=timeout)
            contenders.append(DeviceContender("torch's nccl", functools.partial(_theirs, nccl)))
        yield contenders
    finally:
        distributed.destroy_process_group()


def _theirs(group: Any, collective: str, tensor: torch.Tensor) -> Call:
    from torch import distributed

    if collective == "broadcast":
        return functools.partial(distributed.broadcast, tensor, 0, group=group)
    if collective == "send":
        # gloo takes no CUDA tensors here: whoever uses it copies them by hand.
        return functools.partial(_pass_on_by_torch, tensor, torch.empty_like(tensor, device="cpu"), group)
    return functools.partial(distributed.all_reduce, tensor, group=group)


def _pass_on_by_torch(tensor: torch.Tensor, room: torch.Tensor, group: Any) -> None:
    """Pass a tensor on from rank to rank; through ``room`` on the host where the group is gloo's."""
    from torch import distributed

    rank, size = distributed.get_rank(), distributed.get_world_size()
    carried = room if group is None else tensor
    if rank:
        distributed.recv(carried, rank - 1, group=group)
    if group is None:
        tensor.copy_(room) if rank else room.copy_(tensor)
    if rank + 1 < size:
        distributed.send(carried, rank + 1, group=group)


# -- one case ---------------------------------------------------------------------------------------


def _row(
    plan: BenchPlan,
    rank: int,
    collective: str,
    nbytes: int,
    contenders: Sequence[DeviceContender],
    absent: dict[str, str],
    pace: StartPacer,
    host: asyncdist.Group,
    tell: Callable[[float], None],
) -> DeviceRow:
    """Check every contender's result, then time their calls in turn."""
    count, ranks = max(1, nbytes // 4), plan.ranks
    tensor = torch.empty(count, device=plan.device)  # on the current one, which is ours
    calls = [(one, one.prepare(collective, tensor)) for one in contenders]
    for one, call in calls:
        _load(tensor, rank)
        call()
        _check(one.name, collective, tensor, ranks)
    repeat, _ = plan.calls(nbytes)
    repeat = min(repeat, _MOST_CALLS)
    seconds: dict[str, list[tuple[float, float]]] = {one.name: [] for one in contenders}
    for one in contenders:
        if one.ticks is not None:
            one.ticks()  # the first call is not timed
    for turn in range(repeat):
        tell(turn / repeat)
        first = turn % len(calls)
        for one, call in [*calls[first:], *calls[:first]]:
            tensor.fill_(rank + 1.0)
            torch.cuda.synchronize()
            pace()
            seconds[one.name].append(_timed(call))
            _glance(one.name, collective, tensor, ranks)
    timings = {
        name: DeviceTiming(*(Timing.of(part) for part in zip(*each, strict=True))) for name, each in seconds.items()
    }
    name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(tensor.device)}, CUDA {torch.version.cuda}"
    del tensor, calls  # whose memory the copies may need
    if ranks > 1:
        timings["copy"] = _copied(pace, plan.device, collective, count, ranks, repeat)
    ticks = {one.name: _largest(host, one.ticks()) for one in contenders if one.ticks is not None}
    return DeviceRow(name, collective, count * 4, ranks, timings, ticks, absent)


_MOST_CALLS = 200


def _timed(call: Call) -> tuple[float, float]:
    """Return the seconds until a call returned, and until its data was there."""
    start = perf_counter()
    call()
    returned = perf_counter()
    torch.cuda.synchronize()
    return returned - start, perf_counter() - start


def _pattern(tensor: torch.Tensor) -> torch.Tensor:
    return torch.arange(tensor.numel(), device=tensor.device, dtype=torch.int32).remainder_(7).float()


def _load(tensor: torch.Tensor, rank: int) -> None:
    tensor.copy_(_pattern(tensor)).add_(rank + 1)


def _check(name: str, collective: str, tensor: torch.Tensor, ranks: int) -> None:
    """Compare every element with plain arithmetic; BenchmarkError if one differs."""
    expected = _pattern(tensor)
    if collective == "all_reduce":
        expected.mul_(ranks).add_(ranks * (ranks + 1) // 2)
    else:
        expected.add_(1)
    torch.cuda.synchronize()
    if not torch.equal(tensor, expected):
        raise BenchmarkError(f"{name}: {collective} of {tensor.nbytes} bytes on a device gave a wrong result")


def _glance(name: str, collective: str, tensor: torch.Tensor, ranks: int) -> None:
    wanted = ranks * (ranks + 1) / 2 if collective == "all_reduce" else 1.0
    ends = tensor[0].item(), tensor[-1].item()
    if ends != (wanted, wanted):
        raise BenchmarkError(f"{name}: a timed {collective} of {tensor.nbytes} bytes gave {ends} instead of {wanted:g}")


def _copied(pace: StartPacer, device: str, collective: str, count: int, ranks: int, repeat: int) -> DeviceTiming:
    """Time the same reads and writes on rank 0's device, in its process alone."""
    times = [(0.0, 0.0)] * repeat

    def copy() -> None:
        tensors = [torch.ones(count, device=device) for _ in range(ranks)]
        call = functools.partial(_READS_AND_WRITES[collective], tensors)
        for turn in range(repeat):
            torch.cuda.synchronize()
            times[turn] = _timed(call)

    torch.cuda.empty_cache()  # of every rank: they may share the device
    pace.alone(copy)
    return DeviceTiming(*(Timing.of(part) for part in zip(*times, strict=True)))


def _reduce_all(tensors: Sequence[torch.Tensor]) -> None:
    """Read every tensor and write every tensor: what an all-reduce among ranks on one device has to do."""
    first, *others = tensors
    for other in others:
        first.add_(other)
    for other in others:
        other.copy_(first)


def _copy_to_all(tensors: Sequence[torch.Tensor]) -> None:
    for other in tensors[1:]:
        other.copy_(tensors[0])


_READS_AND_WRITES: dict[str, Callable[[Sequence[torch.Tensor]], None]] = {
    "all_reduce": _reduce_all,
    "broadcast": _copy_to_all,
    "send": _copy_to_all,
}


def _largest(host: asyncdist.Group, latest: float) -> float:
    """Return the largest of what the ranks that receive have seen: all but rank 0, unless that is alone."""
    told: list[Any] = [None] * host.size()
    host.all_gather_object(told, latest, background=False).result()
    return float(max(told[1:] or told))
