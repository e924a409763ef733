"""Worlds of several ranks in one process, over any transport, on one event loop or with one thread per rank.

async with world_of(4) as groups:            # awaited calls of all ranks on one loop, over inproc
await asyncio.gather(*(g.all_reduce(t) for g, t in zip(groups, tensors)))

run_ranks(4, program)                        # blocking calls: program(group) in a thread of each rank
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from asyncdist.base.background_loop import background_loop
from asyncdist.base.error_text import describe_error
from asyncdist.config import Config
from asyncdist.groups.group import Group
from asyncdist.groups.world import World, open_world
from asyncdist.store import HashStore

T = TypeVar("T")


@contextlib.asynccontextmanager
async def world_of(
    size: int,
    *,
    transport: str = "inproc",
    timeout: float = 20.0,
    config: Config | None = None,
    hosts: Sequence[str] | None = None,
) -> AsyncIterator[list[Group]]:
    """Run a world of ``size`` ranks in the running loop.

    Args:
        size: Number of ranks.
        transport: Names of transports, as ``backend`` of `init_process_group` takes them.
        timeout: Limit of the rendezvous and of every operation, in seconds.
        config: Settings of all ranks; None reads them from the environment.
        hosts: A host name for each rank. Ranks with different names share no memory, as if on several machines.

    Yields:
        The ranks' groups, by rank.
    """
    store = HashStore()
    home = asyncio.get_running_loop()
    opened: list[asyncio.Task[World]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            for rank in range(size):
                opening = open_world(
                    backend=transport, store=store, rank=rank, world_size=size, timeout=timeout, home=home,
                    config=_on_host(config, hosts, rank),
                )  # fmt: skip
                opened.append(tasks.create_task(opening))
        yield [task.result().group for task in opened]
    finally:
        worlds = [task.result() for task in opened if task.done() and not task.cancelled() and not task.exception()]
        for world in worlds:
            world.leave()
        await asyncio.gather(*(world.close() for world in worlds))


def run_ranks(
    size: int,
    program: Callable[[Group], T],
    *,
    transport: str = "inproc",
    timeout: float = 20.0,
    hosts: Sequence[str] | None = None,
) -> list[T]:
    """Run ``program(group)`` in one thread per rank and return the results by rank; ``hosts`` as in `world_of`.

    If programs raise errors, the error of the lowest rank is raised after all programs have ended, with notes of the rest.
    """
    store = HashStore()

    def rank_main(rank: int) -> T:
        threading.current_thread().name = f"rank {rank}"
        opening = open_world(
            backend=transport, store=store, rank=rank, world_size=size, timeout=timeout,
            config=_on_host(None, hosts, rank),
        )  # fmt: skip
        world = background_loop().run(opening)
        try:
            return program(world.group)
        finally:
            world.leave()
            background_loop().run(world.close())

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(rank_main, rank) for rank in range(size)]
        outcomes: list[Any] = [future.exception() for future in futures]
    errors = {rank: error for rank, error in enumerate(outcomes) if error is not None}
    for lowest, error in errors.items():
        # The others may have raised it because this one ended, or the other way round.
        for rank in errors.keys() - {lowest}:
            error.add_note(f"rank {rank} raised {type(errors[rank]).__name__}: {describe_error(errors[rank])}")
        raise error
    return [future.result() for future in futures]


def _on_host(config: Config | None, hosts: Sequence[str] | None, rank: int) -> Config | None:
    if hosts is None:
        return config
    # There are no links to measure between hosts in one process.
    return (config or Config.from_environment().with_(calibrate=False)).with_(host=hosts[rank])
