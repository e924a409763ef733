"""Who moves the traffic: ours blocking and awaited, on ordinary and on registered tensors, and the rivals.

The last one moves nothing to anybody: it copies memory, which no collective can beat by much.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import asyncdist
from asyncdist import sync
from asyncdist.base.background_loop import new_loop
from asyncdist.bench.contenders import mpi, plain_sockets
from asyncdist.bench.pace import StartPacer
from asyncdist.bench.plan import THROUGH_TORCH, BenchPlan
from asyncdist.bench.workloads.collectives import Traffic
from asyncdist.errors import BenchmarkError

TIMEOUT = 60.0
"""Seconds that a call may take before the run is given up."""

Start = Callable[[], None]
"""Returns on all ranks at the same instant."""


class Contender(ABC):
    """One way of moving a case's traffic. ``name`` is its key in the results."""

    name: str

    def empty(self, count: int) -> torch.Tensor:
        """Make a tensor of the kind that it moves."""
        return torch.empty(count)

    def enters(self, collective: str) -> bool:
        """Say whether it takes part in a collective."""
        return True

    def verify(self, case: Traffic, start: Start) -> None:
        """Do one call and compare every element; BenchmarkError if one is wrong."""
        case.load()
        self.run(case, 1, start, lambda: None)
        case.check(self.name)

    @abstractmethod
    def run(self, case: Traffic, calls: int, before: Callable[[], None], after: Callable[[], None]) -> list[float]:
        """Call so often; return the seconds of each. ``before`` and ``after`` each call are not timed."""


class Blocking(Contender):
    """A contender that does its calls in the calling thread."""

    @abstractmethod
    def prepare(self, case: Traffic) -> Callable[[], object]:
        """Return what does one call."""

    def run(self, case: Traffic, calls: int, before: Callable[[], None], after: Callable[[], None]) -> list[float]:
        call = self.prepare(case)
        seconds = []
        for _ in range(calls):
            before()
            start = perf_counter()
            call()
            seconds.append(perf_counter() - start)
            after()
        return seconds


class Ours(Blocking):
    """The blocking face, in the default world or in that of ``group``."""

    def __init__(self, name: str = "asyncdist", group: asyncdist.Group | None = None) -> None:
        self.name = name
        self._group = group

    def prepare(self, case: Traffic) -> Callable[[], object]:
        return lambda: case.call(sync, self._group)


class Registered(Ours):
    """The blocking face on tensors that live where all ranks see them."""

    def __init__(self) -> None:
        super().__init__("registered")

    def empty(self, count: int) -> torch.Tensor:
        made: torch.Tensor = asyncdist.empty(count, dtype=torch.float32, shared=True)
        return made


_BACKENDS = {"torch": "asyncdist", "gloo": "gloo"}
"""torch.distributed's names of its back ends, by contender."""


class Torch(Blocking):
    """The calls of torch.distributed, in a process group of one of `_BACKENDS`; None is the default group."""

    def __init__(self, name: str, group: Any) -> None:
        self.name = name
        self.group = group

    def prepare(self, case: Traffic) -> Callable[[], object]:
        from torch import distributed

        return lambda: case.call(distributed, self.group)


class Idle(Blocking):
    """The calls of torch.distributed on a back end that does nothing: see `asyncdist.bench.contenders.null_backend`."""

    name = "idle"

    def __init__(self, group: Any) -> None:
        self._group = group

    def enters(self, collective: str) -> bool:
        return collective in THROUGH_TORCH

    def verify(self, case: Traffic, start: Start) -> None:
        self.run(case, 1, start, lambda: None)

    def prepare(self, case: Traffic) -> Callable[[], object]:
        from torch import distributed

        return lambda: case.call(distributed, self._group)

    def run(self, case: Traffic, calls: int, before: Callable[[], None], after: Callable[[], None]) -> list[float]:
        return super().run(case, calls, before, lambda: None)  # there is no result to look at


class Raw(Blocking):
    """Plain sockets: see `asyncdist.bench.contenders.plain_sockets`."""

    name = "raw"

    def __init__(self, sockets: plain_sockets.Sockets) -> None:
        self._sockets = sockets
        self._prepared: tuple[Traffic, Callable[[], object]] | None = None

    def prepare(self, case: Traffic) -> Callable[[], object]:
        if self._prepared is None or self._prepared[0] is not case:
            self._prepared = case, plain_sockets.prepare_socket_call(self._sockets, case)
        return self._prepared[1]


class Mpi(Blocking):
    """Open MPI through mpi4py: see `asyncdist.bench.contenders.mpi`."""

    name = "mpi"

    def __init__(self) -> None:
        self._world = mpi.communicator()

    def prepare(self, case: Traffic) -> Callable[[], object]:
        return mpi.prepare_mpi_call(self._world, case)


class Copy(Contender):
    """One core copies as many bytes from one ordinary tensor to another, on rank 0 while the other ranks sleep."""

    name = "copy"

    def __init__(self, pace: StartPacer) -> None:
        self._pace = pace
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = None

    def enters(self, collective: str) -> bool:
        return collective != "barrier"

    def verify(self, case: Traffic, start: Start) -> None:
        self._tensors = None
        if case.rank == 0:
            count = case.nbytes // 4
            self._tensors = torch.arange(count, dtype=torch.float32), torch.zeros(count)
        self.run(case, 1, start, lambda: None)
        if self._tensors is not None and not torch.equal(*self._tensors):
            raise BenchmarkError("a memory copy gave something else than what was copied")

    def run(self, case: Traffic, calls: int, before: Callable[[], None], after: Callable[[], None]) -> list[float]:
        seconds = [0.0] * calls

        def copy() -> None:
            assert self._tensors is not None
            source, target = self._tensors
            for call in range(calls):
                start = perf_counter()
                target.copy_(source)
                seconds[call] = perf_counter() - start

        self._pace.alone(copy)
        return seconds


class Awaited(Contender):
    """The async face, in a world of its own whose home is this loop (uvloop where installed)."""

    name = "awaited"

    def __init__(self, loop: asyncio.AbstractEventLoop, group: asyncdist.Group) -> None:
        self._loop = loop
        self._group = group

    def run(self, case: Traffic, calls: int, before: Callable[[], None], after: Callable[[], None]) -> list[float]:
        return self._loop.run_until_complete(self._run(case, calls, before, after))

    async def _run(
        self, case: Traffic, calls: int, before: Callable[[], None], after: Callable[[], None]
    ) -> list[float]:
        seconds = []
        for _ in range(calls):
            before()
            start = perf_counter()
            await case.call(asyncdist, self._group)
            seconds.append(perf_counter() - start)
            after()
        return seconds


@contextlib.contextmanager
def open_contenders(
    plan: BenchPlan, rank: int, folder: Path, sockets: plain_sockets.Sockets, pace: StartPacer
) -> Iterator[list[Contender]]:
    """Open everybody whom the plan asks for; ours is the first. ``folder`` is one that all ranks see."""
    with contextlib.ExitStack() as stack:

        def where(name: str, transport: str) -> dict[str, Any]:
            meeting = (folder / name).as_uri()
            ours = {"backend": transport, "rank": rank, "world_size": plan.ranks}
            return {**ours, "init_method": meeting, "timeout": TIMEOUT}

        first, *further = plan.transports
        sync.init_process_group(**where("blocking", first))
        stack.callback(sync.destroy_process_group)
        contenders: list[Contender] = [Ours()]
        if plan.registered:
            contenders.append(Registered())
        for name in further:
            group = stack.enter_context(sync.process_group(group_name=name, **where(f"over-{name}", name)))
            contenders.append(Ours(name, group))
        if plan.awaited:
            contenders.append(Awaited(*stack.enter_context(awaited_world(**where("awaited", first)))))
        contenders += stack.enter_context(_torch(plan, rank, folder))
        if "mpi" in plan.against:
            contenders.append(Mpi())
        if "raw" in plan.against:
            contenders.append(Raw(sockets))
        yield [*contenders, Copy(pace)]


@contextlib.contextmanager
def awaited_world(**where: Any) -> Iterator[tuple[asyncio.AbstractEventLoop, asyncdist.Group]]:
    """Hold a world, and the loop that is its home: what is awaited on it goes on while that runs."""
    with contextlib.closing(new_loop()) as loop:
        world = asyncdist.process_group(group_name="awaited", **where)
        group = loop.run_until_complete(world.__aenter__())
        try:
            yield loop, group
        finally:
            loop.run_until_complete(world.__aexit__(None, None, None))


@contextlib.contextmanager
def _torch(plan: BenchPlan, rank: int, folder: Path) -> Iterator[list[Torch | Idle]]:
    """Open torch.distributed on every back end that is asked for; the default group is on ours if that is one."""
    from torch import distributed

    names = [name for name in _BACKENDS if name in plan.contenders]
    if "torch" in names:
        import asyncdist.torch_backend  # noqa: F401 - registers ours
    torchs: list[Torch | Idle] = []
    timeout = timedelta(seconds=TIMEOUT)
    meeting = (folder / "torch").as_uri()
    try:
        for name in names:
            backend, group = _BACKENDS[name], None
            if torchs:
                group = distributed.new_group(backend=backend, timeout=timeout)
            else:
                distributed.init_process_group(
                    backend, init_method=meeting, rank=rank, world_size=plan.ranks, timeout=timeout
                )
            torchs.append(Torch(name, group))
        if "idle" in plan.contenders:
            from asyncdist.bench.contenders import null_backend

            null_backend.register_null_backend()
            torchs.append(Idle(distributed.new_group(backend=null_backend.NAME, timeout=timeout)))
        yield torchs
    finally:
        if torchs:
            distributed.destroy_process_group()


def torch_groups(contenders: Iterable[Contender]) -> dict[str, Any]:
    """Return the process groups of torch.distributed, by the contender that uses them."""
    from torch import distributed

    return {one.name: one.group or distributed.group.WORLD for one in contenders if isinstance(one, Torch)}
