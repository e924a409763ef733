"""Who moves the traffic: ours blocking, ours awaited, torch.distributed over gloo, and plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import asyncdist
from asyncdist import sync
from asyncdist.bench import raw
from asyncdist.bench.plan import Plan
from asyncdist.bench.traffic import Traffic
from asyncdist.runtime import new_loop

TIMEOUT = 60.0
"""Seconds that a call may take before the run is given up."""

Pace = Callable[[], None]


class Contender(ABC):
    """One way of moving a case's traffic. ``name`` is its key in the results."""

    name: ClassVar[str]

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
    """The blocking face."""

    name = "asyncdist"

    def prepare(self, case: Traffic) -> Callable[[], object]:
        return lambda: case.call(sync)


class Gloo(Blocking):
    """torch.distributed's own back end for CPU tensors."""

    name = "gloo"

    def prepare(self, case: Traffic) -> Callable[[], object]:
        from torch import distributed

        return lambda: case.call(distributed)


class Raw(Blocking):
    """Plain sockets: see `asyncdist.bench.raw`."""

    name = "raw"

    def __init__(self, sockets: raw.Sockets) -> None:
        self._sockets = sockets
        self._prepared: tuple[Traffic, Callable[[], object]] | None = None

    def prepare(self, case: Traffic) -> Callable[[], object]:
        if self._prepared is None or self._prepared[0] is not case:
            self._prepared = case, raw.prepare(self._sockets, case)
        return self._prepared[1]


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
def open_contenders(plan: Plan, rank: int, folder: Path, sockets: raw.Sockets) -> Iterator[list[Contender]]:
    """Open everybody whom the plan asks for; ours is the first. ``folder`` is one that all ranks see."""
    with contextlib.ExitStack() as stack:
        where = {"backend": plan.transport, "rank": rank, "world_size": plan.ranks, "timeout": TIMEOUT}
        sync.init_process_group(init_method=(folder / "blocking").as_uri(), **where)  # type: ignore[arg-type]
        stack.callback(sync.destroy_process_group)
        contenders: list[Contender] = [Ours()]
        if plan.awaited:
            contenders.append(stack.enter_context(_awaited(init_method=(folder / "awaited").as_uri(), **where)))
        if "gloo" in plan.against:
            stack.callback(_open_gloo(plan, rank, folder))
            contenders.append(Gloo())
        if "raw" in plan.against:
            contenders.append(Raw(sockets))
        yield contenders


@contextlib.contextmanager
def _awaited(**where: Any) -> Iterator[Awaited]:
    loop = new_loop()
    try:
        world = asyncdist.process_group(group_name="awaited", **where)
        group = loop.run_until_complete(world.__aenter__())
        try:
            yield Awaited(loop, group)
        finally:
            loop.run_until_complete(world.__aexit__(None, None, None))
    finally:
        loop.close()


def _open_gloo(plan: Plan, rank: int, folder: Path) -> Callable[[], None]:
    """Open torch.distributed and return what closes it."""
    from torch import distributed

    distributed.init_process_group(
        "gloo",
        init_method=(folder / "gloo").as_uri(),
        rank=rank,
        world_size=plan.ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )
    return distributed.destroy_process_group
