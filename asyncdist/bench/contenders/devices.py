"""The contenders on CUDA devices: asyncdist's device back ends, gloo and NCCL of torch, and copies on one device.

Ranks use the devices in turn, several ranks one device if there are too few. Between calls the device is idle.
Opened by `rank`, timed by `measure`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed

import asyncdist
from asyncdist import sync
from asyncdist.bench.contenders.contenders import (
    Awaited,
    Contender,
    Contenders,
    Copy,
    Start,
    awaited_world,
    meeting,
    of_api,
    torch_process_groups,
)
from asyncdist.bench.pace import StartPacer
from asyncdist.bench.plan import BenchPlan
from asyncdist.bench.workloads.collectives import Empty, SendTraffic, Traffic
from asyncdist.errors import GroupError, TransportUnavailableError
from asyncdist.transport import registry

_TICK = 0.5e-3  # seconds between two runs of the periodic task


class AwaitedWithTicks(Awaited):
    """asyncdist's awaited API on a loop with a periodic task, whose delays show whether the loop was blocked."""

    latest_tick = 0.0

    def verify(self, case: Traffic, start: Start) -> None:
        super().verify(case, start)
        self.latest_tick = 0.0  # the first call sets up connections

    def call_of(self, case: Traffic) -> Callable[[], Any]:
        return partial(self._ticking, super().call_of(case))

    async def _ticking(self, call: Callable[[], Any]) -> None:
        last = perf_counter()

        def note() -> None:
            nonlocal last
            now = perf_counter()
            self.latest_tick, last = max(self.latest_tick, now - last - _TICK), now

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


def gloo_on_device(case: Traffic) -> Callable[[], object]:
    """Prepare gloo of torch on CUDA tensors. It cannot send these, so the program copies them through the host."""
    if isinstance(case, SendTraffic):
        return partial(case.call_through_host, torch.distributed)
    return partial(case.call, torch.distributed)


def copy_on_device(pace: StartPacer, empty: Empty) -> Copy:
    """Return the contender that makes the reads and writes of the operation on rank 0's device, by one process."""

    def copy(name: str, tensors: list[torch.Tensor]) -> None:
        first, *others = tensors
        if name == "all_reduce":
            for other in others:
                first.add_(other)
        for other in others:
            other.copy_(first)

    return Copy(pace, lambda case: [empty(case.count).fill_(1.0) for _ in range(case.ranks)], copy, empty=empty)


@contextlib.contextmanager
def open_device_contenders(plan: BenchPlan, rank: int, folder: Path, pace: StartPacer) -> Iterator[Contenders]:
    """Open every contender that all ranks can use. ``folder`` is a folder that all ranks see."""
    device = torch.device(plan.device, rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    empty = partial(torch.empty, device=device)
    absent: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        groups = dict(_open_backends(plan, rank, folder, device, absent, stack))
        members = [of_api(name, sync, group, empty=empty) for name, group in groups.items()]
        awaited = awaited_world(**meeting(plan, rank, folder, "device-awaited"))
        members.append(AwaitedWithTicks(*stack.enter_context(awaited), empty))
        torchs = stack.enter_context(torch_process_groups(_torch_backends(plan, absent), plan, rank, folder))
        members.append(Contender("gloo", gloo_on_device, empty=empty))
        if "torch's nccl" in torchs:
            members.append(of_api("torch's nccl", torch.distributed, torchs["torch's nccl"], empty=empty))
        if plan.ranks > 1:
            members.append(copy_on_device(pace, empty))
        host = stack.enter_context(sync.process_group(group_name="host", **meeting(plan, rank, folder, "device-host")))
        cuda = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
        yield Contenders(members, absent, cuda, host)


def _open_backends(
    plan: BenchPlan, rank: int, folder: Path, device: torch.device, absent: dict[str, str], stack: contextlib.ExitStack
) -> Iterator[tuple[str, asyncdist.Group]]:
    """Yield asyncdist's groups by contender: with the negotiated back end, and with each one by name that can be used."""
    for name in ("asyncdist", *registry.names(registry.DEVICE_BACKENDS)):
        try:
            if name != "asyncdist":
                reason = registry.load_class(name, registry.DEVICE_BACKENDS).probe()
                if reason is not None:
                    raise TransportUnavailableError(reason)
            backend = None if name == "asyncdist" else f"cpu:auto,cuda:{name}"
            where = meeting(plan, rank, folder, f"device-{name}")
            group = stack.enter_context(sync.process_group(backend=backend, group_name=name, **where))
            on: Any = group.on(device)
            on.all_reduce(torch.zeros(1, device=device)).synchronize()
            if name not in ("asyncdist", on.backend):
                raise TransportUnavailableError(f"the ranks selected {on.backend}")
        except (GroupError, TransportUnavailableError) as error:
            absent[name] = str(error)
        else:
            yield name, group


def _torch_backends(plan: BenchPlan, absent: dict[str, str]) -> dict[str, str]:
    """Return the back ends of torch.distributed to measure: gloo, and NCCL if each rank has a device."""
    if plan.ranks > torch.cuda.device_count():
        absent["torch's nccl"] = "it needs one device per rank"
    elif not torch.distributed.is_nccl_available():
        absent["torch's nccl"] = "torch is built without it"
    else:
        return {"gloo": "gloo", "torch's nccl": "nccl"}
    return {"gloo": "gloo"}
