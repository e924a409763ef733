"""Ranks that ``asyncdist top`` looks at: one holds up the others until the test lets it go on."""

import asyncio
import contextlib
import time
from typing import Any

import torch

import asyncdist as awaited
import asyncdist.sync as dist
from asyncdist.errors import GroupError


def block(test: Any, where: str, rank: int, size: int, late: int) -> None:
    """Reduce three times; the rank ``late`` then waits for the test before the fourth time."""
    dist.init_process_group(init_method=where, rank=rank, world_size=size, timeout=60.0)
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    test.send("reduced")
    if rank == late:
        test.recv()  # the rank is late here
    with contextlib.suppress(GroupError):
        dist.all_reduce(torch.ones(1000))  # the others wait here
    test.send("done")
    test.recv()
    dist.destroy_process_group()


def compute_in_the_loop(test: Any, where: str, rank: int, size: int, late: int) -> None:
    """Await, while the rank ``late`` blocks its event loop."""

    async def wait_for_all() -> None:
        await awaited.all_reduce(torch.ones(1000))  # the task waits here

    async def main() -> None:
        await awaited.init_process_group(init_method=where, rank=rank, world_size=size, timeout=60.0)
        await awaited.all_reduce(torch.ones(1000))
        test.send("reduced")
        if rank == late:
            test.recv()  # the loop is blocked here
        await asyncio.create_task(wait_for_all(), name="waiter")
        await awaited.destroy_process_group()

    asyncio.run(main())


def hold_the_interpreter(test: Any, where: str, rank: int, size: int, late: int) -> None:
    """Join, and let the rank ``late`` hold the interpreter's lock."""
    import ctypes

    dist.init_process_group(init_method=where, rank=rank, world_size=size, timeout=60.0)
    dist.barrier()
    test.send("reduced")
    if rank == late:
        # PyDLL keeps the lock during the call.
        ctypes.PyDLL(None).sleep(60)
    time.sleep(60)
