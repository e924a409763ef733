"""The contenders on the CPU: asyncdist's blocking and awaited APIs, its rivals, and a memory copy as the physical limit.

`rank` opens them, `measure` times them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed

import asyncdist
from asyncdist import sync
from asyncdist.base.background_loop import new_loop
from asyncdist.base.callables import AnyFunction, Callback
from asyncdist.cli.bench.contenders import mpi, plain_sockets
from asyncdist.cli.bench.pacing import StartPacer
from asyncdist.cli.bench.plan import COLLECTIVES, THROUGH_TORCH, BenchPlan
from asyncdist.cli.bench.traffic import Empty, Traffic

TIMEOUT = 60.0
"""Seconds after which a call fails, which ends the run."""

Prepare = Callable[[Traffic], AnyFunction]
"""Returns a function that makes one call of a collective; for `Awaited`, one that returns an awaitable."""
CallTime = tuple[float, float]
"""Seconds until a call returned, and until its data was there."""


def nothing() -> None:
    """Do nothing before or after a call."""


class Contender:
    """One way to execute collectives, with calls that block the calling thread.

    Args:
        name: The contender's key in the results.
        prepare: See `Prepare`.
        empty: Makes a tensor of the kind that the contender uses.
        collectives: The collectives that the contender can execute; None for all.
        has_result: Whether there is a result to check.
    """

    def __init__(
        self,
        name: str,
        prepare: Prepare,
        *,
        empty: Empty = torch.empty,
        collectives: Collection[str] | None = None,
        has_result: bool = True,
    ) -> None:
        self.name, self.prepare, self.empty = name, prepare, empty
        self.collectives, self.has_result = collectives, has_result

    def run(self, case: Traffic, call: AnyFunction, calls: int, before: Callback, after: Callback) -> list[CallTime]:
        """Make ``calls`` calls and return the times of each. ``before`` and ``after`` run around each call, untimed."""
        times = []
        for _ in range(calls):
            before()
            start = perf_counter()
            call()
            returned = complete = perf_counter() - start
            if case.on_device:
                torch.cuda.synchronize()
                complete = perf_counter() - start
            times.append((returned, complete))
            after()
        return times


class Copy(Contender):
    """Memory traffic of rank 0 alone, while the other ranks sleep: ``alone(work)`` sees to that."""

    def __init__(self, alone: Callable[[Callback], object], prepare: Prepare, **options: Any) -> None:
        super().__init__("copy", prepare, has_result=False, **options)
        self._alone = alone

    def run(self, case: Traffic, call: AnyFunction, calls: int, before: Callback, after: Callback) -> list[CallTime]:
        times = [(0.0, 0.0)] * calls

        def work() -> None:
            times[:] = super(Copy, self).run(case, call, calls, nothing, nothing)

        self._alone(work)
        return times


class Awaited(Contender):
    """asyncdist's awaited API, in a world on an event loop of its own (uvloop if installed)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, prepare: Prepare, **options: Any) -> None:
        super().__init__("awaited", prepare, **options)
        self.loop = loop

    def run(self, case: Traffic, call: AnyFunction, calls: int, before: Callback, after: Callback) -> list[CallTime]:
        return self.loop.run_until_complete(self._run(call, calls, before, after))

    async def _run(self, call: AnyFunction, calls: int, before: Callback, after: Callback) -> list[CallTime]:
        times = []
        for _ in range(calls):
            before()
            start = perf_counter()
            await call()
            seconds = perf_counter() - start
            times.append((seconds, seconds))
            after()
        return times


def of_api(name: str, api: Any, group: Any = None, **options: Any) -> Contender:
    """Return a contender that calls a module's functions, which have torch.distributed's names, in one of its groups."""
    return Contender(name, lambda case: partial(case.kind.call, case, api, group), **options)


def memory_copy(pace: StartPacer) -> Copy:
    """Return the contender in which one core copies the bytes of the tensor from one ordinary tensor to another."""

    def prepare(case: Traffic) -> Callback:
        if case.rank:
            return nothing
        return partial(torch.zeros(case.count).copy_, torch.arange(case.count, dtype=torch.float32))

    return Copy(pace.alone, prepare, collectives=[name for name in COLLECTIVES if name != "barrier"])


# -- opening them -----------------------------------------------------------------------------------


@contextlib.contextmanager
def open_contenders(
    plan: BenchPlan, rank: int, folder: Path, sockets: plain_sockets.Sockets, pace: StartPacer
) -> Iterator[list[Contender]]:
    """Open the contenders of a plan, asyncdist first. All ranks have the same ``folder``."""

    def world(name: str) -> dict[str, Any]:
        """Return the arguments of `init_process_group` for a world of all ranks, which meet at the file ``folder/name``."""
        return {"init_method": (folder / name).as_uri(), "rank": rank, "world_size": plan.ranks, "timeout": TIMEOUT}

    first, *further = plan.transports
    with contextlib.ExitStack() as stack:
        sync.init_process_group(backend=first, **world("blocking"))
        stack.callback(sync.destroy_process_group)
        members = [of_api("asyncdist", sync)]
        if plan.registered:
            registered = partial(asyncdist.empty, dtype=torch.float32, shared=True)
            members.append(of_api("registered", sync, empty=registered))
        for name in further:
            group = stack.enter_context(sync.process_group(backend=name, group_name=name, **world(f"over-{name}")))
            members.append(of_api(name, sync, group))
        if plan.awaited:
            loop, awaited = stack.enter_context(awaited_world(backend=first, **world("awaited")))
            members.append(Awaited(loop, lambda case: partial(case.kind.call, case, asyncdist, awaited)))
        if plan.through:
            from asyncdist.cli.bench.contenders import null_backend

            null_backend.register_null_backend()
        backends = {"torch": "asyncdist", "gloo": "gloo", "idle": "asyncdist_idle"}
        wanted = {name: backend for name, backend in backends.items() if name in plan.contenders}
        groups = stack.enter_context(torch_process_groups(wanted, world("torch")))
        for name, group in groups.items():
            options = {"collectives": THROUGH_TORCH, "has_result": False} if name == "idle" else {}
            members.append(of_api(name, torch.distributed, group, **options))
        if "mpi" in plan.against:
            members.append(Contender("mpi", partial(mpi.prepare_mpi_call, mpi.communicator())))
        if "raw" in plan.against:
            members.append(Contender("raw", partial(plain_sockets.prepare_socket_call, sockets)))
        if "copy" in plan.contenders:
            members.append(memory_copy(pace))
        yield members


@contextlib.contextmanager
def awaited_world(**arguments: Any) -> Iterator[tuple[asyncio.AbstractEventLoop, asyncdist.Group]]:
    """Open a world that is driven by a new event loop; yield the loop and the world's group."""
    with contextlib.closing(new_loop()) as loop:
        world = asyncdist.process_group(group_name="awaited", **arguments)
        group = loop.run_until_complete(world.__aenter__())
        try:
            yield loop, group
        finally:
            loop.run_until_complete(world.__aexit__(None, None, None))


@contextlib.contextmanager
def torch_process_groups(backends: Mapping[str, str], world: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Open a process group of torch.distributed on each back end. The first is the default group and is yielded as None."""
    groups: dict[str, Any] = {}
    timeout = timedelta(seconds=TIMEOUT)
    try:
        for name, backend in backends.items():
            if groups:
                groups[name] = torch.distributed.new_group(backend=backend, timeout=timeout)
            else:
                torch.distributed.init_process_group(backend, **{**world, "timeout": timeout})
                groups[name] = None
        yield groups
    finally:
        if groups:
            torch.distributed.destroy_process_group()
