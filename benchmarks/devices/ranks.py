"""The ranks of the benchmark on devices: asyncdist's device back ends, torch's gloo and NCCL, and copies on one device.

Rank r uses device r modulo the number of devices, so ranks that outnumber the devices share them. A device is idle when
a timed call begins. A rank is forked by a nursery, and paced by `benchmark` over a pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch
import torch.distributed

import asyncdist
from asyncdist import sync
from asyncdist.base.callables import AnyFunction, Callback
from asyncdist.cli.bench.contenders.contenders import (
    TIMEOUT,
    Awaited,
    Contender,
    Copy,
    awaited_world,
    of_api,
    torch_process_groups,
)
from asyncdist.cli.bench.measure import TimedContender, measure
from asyncdist.cli.bench.plan import BenchPlan
from asyncdist.cli.bench.traffic import CollectiveKind, Traffic
from asyncdist.errors import GroupError, TransportUnavailableError
from asyncdist.kernel.transport import registry

_TICK = 0.5e-3
"""Seconds between two runs of the periodic task."""
_MOST_CALLS = 200


def time_calls(
    test: Connection, where: str, rank: int, size: int, kind: str, cases: Sequence[tuple[str, int]], repeat: int | None
) -> None:
    """Time the calls of every usable contender in turns.

    Sends the name of the devices and why contenders are absent, and for each case the timings and the latest ticks.
    """
    torch.set_num_threads(1)
    device, backends = torch.device(kind), list[str]()
    if kind == "cuda":
        device, backends = (
            torch.device(kind, rank % torch.cuda.device_count()),
            registry.names(registry.DEVICE_BACKENDS),
        )
        torch.cuda.set_device(device)
    absent: dict[str, str] = {}
    with open_contenders(where, rank, size, device, backends, absent) as (host, members):
        test.send((_name_of(device), absent))
        for collective, nbytes in cases:
            case = Traffic(collective, rank, size, nbytes, members[0].empty, SEND if collective == "send" else None)
            calls, _ = BenchPlan(repeat=repeat).calls(case.nbytes)
            entries = [TimedContender.of(member, case) for member in members]
            start = partial(sync.barrier, host)
            timings = measure(entries, start, min(calls, _MOST_CALLS), 1, paced=True)
            ticks = {each.name: each.latest_tick for each in members if isinstance(each, AwaitedWithTicks)}
            by_rank: list[Any] = [None] * size
            sync.all_gather_object(by_rank, ticks, group=host)
            # Rank 0 may be the one that only sends.
            latest = {name: max(found[name] for found in by_rank[1:] or by_rank) for name in ticks}
            test.send((case.nbytes, timings, latest))
        test.recv()


def _name_of(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"


# -- the contenders ----------------------------------------------------------------------------------


class AwaitedWithTicks(Awaited):
    """asyncdist's awaited API on a loop with a periodic task, whose delay shows for how long calls block the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, group: asyncdist.Group, **options: Any) -> None:
        def prepare(case: Traffic) -> AnyFunction:
            self._late.clear()
            call = _send_awaited if case.name == "send" else case.kind.call
            return partial(self._ticking, partial(call, case, asyncdist, group))

        super().__init__(loop, prepare, **options)
        self._late: list[float] = []

    @property
    def latest_tick(self) -> float:
        """The most seconds by which the task was late in a call of the last case, without the first one, which connects."""
        return max(self._late[1:], default=0.0)

    async def _ticking(self, call: AnyFunction) -> None:
        last, late = perf_counter(), 0.0

        def note() -> None:
            nonlocal last, late
            now = perf_counter()
            late, last = max(late, now - last - _TICK), now

        async def tick() -> None:
            while True:
                await asyncio.sleep(_TICK)
                note()

        ticker = asyncio.ensure_future(tick())
        try:
            await call()
            note()
        finally:
            ticker.cancel()
        self._late.append(late)


def send_through(case: Traffic, api: Any, group: Any, tensor: torch.Tensor | None = None) -> None:
    """Receive rank 0's tensor from the previous rank, and send it to the next one."""
    tensor = case.input if tensor is None else tensor
    if case.rank:
        api.recv(tensor, case.rank - 1, group=group)
    if case.rank + 1 < case.ranks:
        api.send(tensor, case.rank + 1, group=group)


def send_through_host(case: Traffic, api: Any, group: Any) -> None:
    """Do the same with an API that cannot send device tensors: copy through host memory."""
    on_host = case.input.cpu()
    send_through(case, api, group, on_host)
    if case.rank:
        case.input.copy_(on_host)


async def _send_awaited(case: Traffic, api: Any, group: Any) -> None:
    if case.rank:
        await api.recv(case.input, case.rank - 1, group=group)
    if case.rank + 1 < case.ranks:
        await api.send(case.input, case.rank + 1, group=group)


SEND = CollectiveKind(send_through, lambda case, of: of(0), in_place=True)


def gloo_on_device(case: Traffic) -> Callback:
    """Prepare a call of torch's gloo on device tensors, which it cannot send."""
    call = send_through_host if case.name == "send" else case.kind.call
    return partial(call, case, torch.distributed, None)


def prepare_copy(case: Traffic) -> Callback:
    """Prepare the reads and writes of an operation by rank 0 alone, on its device: there is one tensor for each rank."""
    if case.rank:
        return lambda: None
    return partial(copy_alone, case.name, [torch.ones_like(case.input) for _ in range(case.ranks)])


def copy_alone(collective: str, tensors: Sequence[torch.Tensor]) -> None:
    """Read and write what a collective of ranks with these tensors does."""
    first, *others = tensors
    if collective == "all_reduce":
        for other in others:
            first.add_(other)
    for other in others:
        other.copy_(first)


# -- opening them ------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_contenders(
    where: str, rank: int, size: int, device: torch.device, backends: Sequence[str], absent: dict[str, str]
) -> Iterator[tuple[asyncdist.Group, list[Contender]]]:
    """Open every contender that all ranks can use, and add to ``absent`` why the others cannot be used.

    Yields a group of all ranks for exchanges between host memories too.
    """

    def world(name: str) -> dict[str, Any]:
        return {"init_method": f"{where}-{name}", "rank": rank, "world_size": size, "timeout": TIMEOUT}

    empty = partial(torch.empty, device=device)
    with contextlib.ExitStack() as stack:
        groups = dict(_open_backends(world, device, backends, absent, stack))
        members = [of_api(name, sync, group, empty=empty) for name, group in groups.items()]
        loop, awaited = stack.enter_context(awaited_world(**world("awaited")))
        members.append(AwaitedWithTicks(loop, awaited, empty=empty))
        torch_groups = stack.enter_context(torch_process_groups(_torch_backends(size, absent), world("torch")))
        members.append(Contender("gloo", gloo_on_device, empty=empty))
        if "torch's nccl" in torch_groups:
            members.append(of_api("torch's nccl", torch.distributed, torch_groups["torch's nccl"], empty=empty))
        host = stack.enter_context(sync.process_group(group_name="host", **world("host")))

        def alone(work: Callback) -> None:
            sync.barrier(host)
            if rank == 0:
                work()
            sync.barrier(host)

        if size > 1:
            members.append(Copy(alone, prepare_copy, empty=empty))
        yield host, members


def _open_backends(
    world: AnyFunction,
    device: torch.device,
    backends: Sequence[str],
    absent: dict[str, str],
    stack: contextlib.ExitStack,
) -> Iterator[tuple[str, asyncdist.Group]]:
    """Yield the name and group of each of asyncdist's contenders. Add to ``absent`` why others cannot be used.

    For "asyncdist" the ranks select the device back end. Every other contender has the name of its device back end.
    """
    for name in ("asyncdist", *backends):
        try:
            if name != "asyncdist":
                reason = registry.load_class(name, registry.DEVICE_BACKENDS).probe()
                if reason is not None:
                    raise TransportUnavailableError(reason)
            backend = None if name == "asyncdist" else f"cpu:auto,cuda:{name}"
            group = stack.enter_context(sync.process_group(backend=backend, group_name=name, **world(name)))
            if backends:
                device_group: Any = group._on(device)
                device_group.all_reduce(torch.zeros(1, device=device)).synchronize()
                if name not in ("asyncdist", device_group.backend):
                    raise TransportUnavailableError(f"the ranks selected {device_group.backend}")
        except (GroupError, TransportUnavailableError) as error:
            absent[name] = error.summary
        else:
            yield name, group


def _torch_backends(size: int, absent: dict[str, str]) -> dict[str, str]:
    """Return the back ends of torch.distributed by contender: gloo, and NCCL if each rank has a device of its own.

    Without NCCL, add the reason to ``absent``.
    """
    if size > torch.cuda.device_count():
        absent["torch's nccl"] = "it needs one device per rank"
    elif not torch.distributed.is_nccl_available():
        absent["torch's nccl"] = "torch is built without it"
    else:
        return {"gloo": "gloo", "torch's nccl": "nccl"}
    return {"gloo": "gloo"}
