"""The contenders on the CPU: asyncdist's blocking and awaited APIs, its rivals, and a memory copy as the physical limit.

`rank` opens them, `measure` times them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
from asyncdist.base.callables import Callback
from asyncdist.cli.bench.contenders import mpi, plain_sockets
from asyncdist.cli.bench.pace import StartPacer
from asyncdist.cli.bench.plan import COLLECTIVES, THROUGH_TORCH, BenchPlan
from asyncdist.cli.bench.workloads.collectives import Empty, Traffic
from asyncdist.errors import BenchmarkError

TIMEOUT = 60.0
"""Seconds after which a call fails, which ends the run."""

Call = Callback
Start = Callback
"""Returns on all ranks at the same instant."""
CallTime = tuple[float, float]
"""Seconds until a call returned, and until its data was there."""


def nothing() -> None:
    """Do nothing before or after a call."""


class Contender:
    """One way to execute collectives, with calls that block the calling thread.

    Args:
        name: The contender's key in the results.
        prepare: Returns a function that makes one call of a collective.
        empty: Makes a tensor of the kind that the contender uses.
        collectives: The collectives that the contender can execute; None for all.
        has_result: Whether there is a result to check.

    Attributes:
        latest_tick: The most seconds by which a periodic task on the contender's event loop was late; None without one.
    """

    latest_tick: float | None = None

    def __init__(
        self,
        name: str,
        prepare: Callable[[Traffic], Call],
        *,
        empty: Empty = torch.empty,
        collectives: Collection[str] | None = None,
        has_result: bool = True,
    ) -> None:
        self.name, self.empty, self.has_result = name, empty, has_result
        self._prepare, self._collectives = prepare, collectives
        self._prepared: tuple[Traffic, Call] | None = None

    def enters(self, collective: str) -> bool:
        """Return whether the contender can execute a collective."""
        return self._collectives is None or collective in self._collectives

    def verify(self, case: Traffic, start: Start) -> None:
        """Make one call and compare every element; raise BenchmarkError if one is wrong."""
        case.load()
        self.run(case, 1, start, nothing)
        if self.has_result:
            case.check(self.name)

    def call_of(self, case: Traffic) -> Call:
        """Return a function that makes one call. It is prepared once for each traffic."""
        if self._prepared is None or self._prepared[0] is not case:
            self._prepared = case, self._prepare(case)
        return self._prepared[1]

    def run(self, case: Traffic, calls: int, before: Call, after: Call) -> list[CallTime]:
        """Make ``calls`` calls and return the times of each. ``before`` and ``after`` run around each call, untimed."""
        call = self.call_of(case)
        after = after if self.has_result else nothing
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
    """Memory traffic of rank 0 alone, while the other ranks sleep. ``copy`` must make the tensors of ``make`` equal."""

    def __init__(
        self,
        pace: StartPacer,
        make: Callable[[Traffic], list[torch.Tensor]],
        copy: Callable[[str, list[torch.Tensor]], object],
        **options: Any,
    ) -> None:
        super().__init__("copy", lambda case: partial(copy, case.name, self._tensors), **options)
        self._pace, self._make = pace, make
        self._tensors: list[torch.Tensor] = []

    def verify(self, case: Traffic, start: Start) -> None:
        self._tensors = self._make(case) if case.rank == 0 else []
        self._prepared = None
        self.run(case, 1, start, nothing)
        if any(not torch.equal(self._tensors[0], tensor) for tensor in self._tensors[1:]):
            raise BenchmarkError("a memory copy gave a wrong result")

    def run(self, case: Traffic, calls: int, before: Call, after: Call) -> list[CallTime]:
        times = [(0.0, 0.0)] * calls

        def work() -> None:
            times[:] = super(Copy, self).run(case, calls, nothing, nothing)

        self._pace.alone(work)
        return times


class Awaited(Contender):
    """asyncdist's awaited API, in a world on an event loop of its own (uvloop if installed)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, group: asyncdist.Group, empty: Empty = torch.empty) -> None:
        super().__init__("awaited", lambda case: partial(case.start, asyncdist, group), empty=empty)
        self._loop = loop

    def run(self, case: Traffic, calls: int, before: Call, after: Call) -> list[CallTime]:
        return self._loop.run_until_complete(self._run(self.call_of(case), calls, before, after))

    async def _run(self, call: Callable[[], Any], calls: int, before: Call, after: Call) -> list[CallTime]:
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
    return Contender(name, lambda case: partial(case.call, api, group), **options)


def memory_copy(pace: StartPacer) -> Copy:
    """Return the contender in which one core copies the bytes of the tensor from one ordinary tensor to another."""

    def make(case: Traffic) -> list[torch.Tensor]:
        count = case.nbytes // 4
        return [torch.arange(count, dtype=torch.float32), torch.zeros(count)]

    sized = [name for name in COLLECTIVES if name != "barrier"]
    return Copy(pace, make, lambda name, tensors: tensors[1].copy_(tensors[0]), collectives=sized)


# -- opening them -----------------------------------------------------------------------------------


@dataclass
class Contenders:
    """The contenders of a run on one rank.

    Attributes:
        members: The contenders.
        absent: Why other contenders are not measured, by name.
        device: The name of the CUDA devices; empty on the CPU.
        host: A group of all ranks for exchanges between host memories; None on the CPU.
        torch_groups: By contender, the process groups of torch.distributed on which training steps are measured.
    """

    members: list[Contender]
    absent: dict[str, str] = field(default_factory=dict)
    device: str = ""
    host: asyncdist.Group | None = None
    torch_groups: dict[str, Any] = field(default_factory=dict)

    def latest_ticks(self) -> dict[str, float]:
        """Return the largest `Contender.latest_tick` of the ranks other than 0; called on every rank."""
        ticks = {member.name: member.latest_tick for member in self.members if member.latest_tick is not None}
        if self.host is None:
            return ticks
        by_rank: list[Any] = [None] * self.host.size()
        self.host.all_gather_object(by_rank, ticks, background=False).result()
        return {name: max(found[name] for found in by_rank[1:] or by_rank) for name in ticks}


@contextlib.contextmanager
def open_contenders(
    plan: BenchPlan, rank: int, folder: Path, sockets: plain_sockets.Sockets, pace: StartPacer
) -> Iterator[Contenders]:
    """Open the contenders of a plan, asyncdist first. All ranks have the same ``folder``."""
    first, *further = plan.transports
    with contextlib.ExitStack() as stack:
        sync.init_process_group(backend=first, **init_arguments(plan, rank, folder, "blocking"))
        stack.callback(sync.destroy_process_group)
        members = [of_api("asyncdist", sync)]
        if plan.registered:
            registered = partial(asyncdist.empty, dtype=torch.float32, shared=True)
            members.append(of_api("registered", sync, empty=registered))
        for name in further:
            arguments = init_arguments(plan, rank, folder, f"over-{name}")
            group = stack.enter_context(sync.process_group(backend=name, group_name=name, **arguments))
            members.append(of_api(name, sync, group))
        if plan.awaited:
            arguments = init_arguments(plan, rank, folder, "awaited")
            members.append(Awaited(*stack.enter_context(awaited_world(backend=first, **arguments))))
        groups = stack.enter_context(_open_torch(plan, rank, folder))
        members += [
            of_api(name, torch.distributed, group, **_TORCH_OPTIONS.get(name, {})) for name, group in groups.items()
        ]
        if "mpi" in plan.against:
            members.append(Contender("mpi", partial(mpi.prepare_mpi_call, mpi.communicator())))
        if "raw" in plan.against:
            members.append(Contender("raw", partial(plain_sockets.prepare_socket_call, sockets)))
        trained = {name: group or torch.distributed.group.WORLD for name, group in groups.items() if name != "idle"}
        if "copy" in plan.contenders:
            members.append(memory_copy(pace))
        yield Contenders(members, torch_groups=trained)


_TORCH_OPTIONS: dict[str, dict[str, Any]] = {"idle": {"collectives": THROUGH_TORCH, "has_result": False}}


def init_arguments(plan: BenchPlan, rank: int, folder: Path, name: str) -> dict[str, Any]:
    """Return the arguments of `init_process_group` for a world of all ranks, which meet at the file ``folder/name``."""
    return {"init_method": (folder / name).as_uri(), "rank": rank, "world_size": plan.ranks, "timeout": TIMEOUT}


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


def _open_torch(plan: BenchPlan, rank: int, folder: Path) -> AbstractContextManager[dict[str, Any]]:
    """Open a process group of torch.distributed for each contender that needs one."""
    backends = {"torch": "asyncdist", "gloo": "gloo", "idle": "asyncdist_idle"}
    if plan.through:
        import asyncdist.torch_backend  # noqa: F401 - registers the back end
        from asyncdist.cli.bench.contenders import null_backend

        null_backend.register_null_backend()
    wanted = {name: backend for name, backend in backends.items() if name in plan.contenders}
    return torch_process_groups(wanted, plan, rank, folder)


@contextlib.contextmanager
def torch_process_groups(
    backends: Mapping[str, str], plan: BenchPlan, rank: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """Open a process group of torch.distributed on each back end. The first is the default group and is yielded as None."""
    groups: dict[str, Any] = {}
    timeout = timedelta(seconds=TIMEOUT)
    try:
        for name, backend in backends.items():
            if groups:
                groups[name] = torch.distributed.new_group(backend=backend, timeout=timeout)
            else:
                arguments = {**init_arguments(plan, rank, folder, "torch"), "timeout": timeout}
                torch.distributed.init_process_group(backend, **arguments)
                groups[name] = None
        yield groups
    finally:
        if groups:
            torch.distributed.destroy_process_group()
