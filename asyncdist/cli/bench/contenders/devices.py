"""The contenders on CUDA devices: asyncdist's device back ends, torch's gloo and NCCL, and copies on one device.

Rank r uses device r modulo the number of devices, so ranks that outnumber the devices share them. A device is idle when
a timed call begins. `rank` opens the contenders, `measure` times them.
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
from asyncdist.base.callables import Callback
from asyncdist.cli.bench.contenders.contenders import (
    Awaited,
    Contender,
    Contenders,
    Copy,
    Start,
    awaited_world,
    init_arguments,
    of_api,
    torch_process_groups,
)
from asyncdist.cli.bench.pace import StartPacer
from asyncdist.cli.bench.plan import BenchPlan
from asyncdist.cli.bench.workloads.collectives import Empty, SendTraffic, Traffic
from asyncdist.errors import GroupError, TransportUnavailableError
from asyncdist.kernel.transport import registry

_TICK = 0.5e-3
"""Seconds between two runs of the periodic task."""


class AwaitedWithTicks(Awaited):
    """asyncdist's awaited API on a loop with a periodic task, whose delay shows for how long calls block the loop."""

    latest_tick = 0.0

    def verify(self, case: Traffic, start: Start) -> None:
        super().verify(case, start)
        # The first call sets up connections; its delays do not count.
        self.latest_tick = 0.0

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


def gloo_on_device(case: Traffic) -> Callback:
    """Prepare a call of torch's gloo on CUDA tensors. Gloo cannot send them, so `send` uses a copy in host memory."""
    if isinstance(case, SendTraffic):
        return partial(case.call_through_host, torch.distributed)
    return partial(case.call, torch.distributed)


def copy_on_device(pace: StartPacer, empty: Empty) -> Copy:
    """Return the contender in which rank 0 alone reads and writes the bytes of all ranks on its device."""

    def copy(name: str, tensors: list[torch.Tensor]) -> None:
        # There is one tensor for each rank.
        first, *others = tensors
        if name == "all_reduce":
            for other in others:
                first.add_(other)
        for other in others:
            other.copy_(first)

    return Copy(pace, lambda case: [empty(case.count).fill_(1.0) for _ in range(case.ranks)], copy, empty=empty)


@contextlib.contextmanager
def open_device_contenders(plan: BenchPlan, rank: int, folder: Path, pace: StartPacer) -> Iterator[Contenders]:
    """Open every contender that all ranks can use; `Contenders.absent` says why the others cannot be used.

    All ranks have the same ``folder``.
    """
    device = torch.device(plan.device, rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    empty = partial(torch.empty, device=device)
    absent: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        groups = dict(_open_backends(plan, rank, folder, device, absent, stack))
        members = [of_api(name, sync, group, empty=empty) for name, group in groups.items()]
        awaited = awaited_world(**init_arguments(plan, rank, folder, "device-awaited"))
        members.append(AwaitedWithTicks(*stack.enter_context(awaited), empty))
        torch_groups = stack.enter_context(torch_process_groups(_torch_backends(plan, absent), plan, rank, folder))
        members.append(Contender("gloo", gloo_on_device, empty=empty))
        if "torch's nccl" in torch_groups:
            members.append(of_api("torch's nccl", torch.distributed, torch_groups["torch's nccl"], empty=empty))
        if plan.ranks > 1:
            members.append(copy_on_device(pace, empty))
        arguments = init_arguments(plan, rank, folder, "device-host")
        host = stack.enter_context(sync.process_group(group_name="host", **arguments))
        device_name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
        yield Contenders(members, absent, device_name, host)


def _open_backends(
    plan: BenchPlan, rank: int, folder: Path, device: torch.device, absent: dict[str, str], stack: contextlib.ExitStack
) -> Iterator[tuple[str, asyncdist.Group]]:
    """Yield the name and group of each of asyncdist's contenders. Add to ``absent`` why others cannot be used.

    For "asyncdist" the ranks select the device back end. Every other contender has the name of its device back end.
    """
    for name in ("asyncdist", *registry.names(registry.DEVICE_BACKENDS)):
        try:
            if name != "asyncdist":
                reason = registry.load_class(name, registry.DEVICE_BACKENDS).probe()
                if reason is not None:
                    raise TransportUnavailableError(reason)
            backend = None if name == "asyncdist" else f"cpu:auto,cuda:{name}"
            arguments = init_arguments(plan, rank, folder, f"device-{name}")
            group = stack.enter_context(sync.process_group(backend=backend, group_name=name, **arguments))
            device_group: Any = group._on(device)
            device_group.all_reduce(torch.zeros(1, device=device)).synchronize()
            if name not in ("asyncdist", device_group.backend):
                raise TransportUnavailableError(f"the ranks selected {device_group.backend}")
        except (GroupError, TransportUnavailableError) as error:
            absent[name] = error.summary
        else:
            yield name, group


def _torch_backends(plan: BenchPlan, absent: dict[str, str]) -> dict[str, str]:
    """Return the back ends of torch.distributed by contender: gloo, and NCCL if each rank has a device of its own.

    Without NCCL, add the reason to ``absent``.
    """
    if plan.ranks > torch.cuda.device_count():
        absent["torch's nccl"] = "it needs one device per rank"
    elif not torch.distributed.is_nccl_available():
        absent["torch's nccl"] = "torch is built without it"
    else:
        return {"gloo": "gloo", "torch's nccl": "nccl"}
    return {"gloo": "gloo"}
