"""The awaited API, which the package `asyncdist` exports: ``import asyncdist as dist``.

Every collective starts at once and returns an awaitable `Work`. `init_process_group` and `destroy_process_group` are
coroutines. The running asyncio loop drives the pending operations. In a program that runs trio, the background loop does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from asyncdist.base.background_loop import background_loop, result_on
from asyncdist.base.call_site import calling_line
from asyncdist.base.deadline import Timeout
from asyncdist.groups import default_world
from asyncdist.groups.collectives_api import CollectivesApi
from asyncdist.groups.group import Group
from asyncdist.groups.persistent_api import awaited
from asyncdist.groups.world import World, open_world
from asyncdist.kernel.engine import trio_tasks


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: object = None,
    device_id: object = None,
    enable_reconfigure: bool = False,
) -> Coroutine[Any, Any, None]:
    """Join the other ranks and create the default process group. Await the call, and `destroy_process_group` at the end.

    The running asyncio loop drives the operations while no thread blocks on them. In a program that runs trio, a thread
    of the library does.

    Args:
        backend: ``"auto"`` selects the transports. A list such as ``"shm,tcp"`` names them. None, and the name of a back
            end of torch, take ``ASYNCDIST_TRANSPORT``, which is "auto" by default.
        init_method: ``env://`` (the default), ``tcp://host:port`` of rank 0, ``asyncdist://host:port/job`` of a running
            store, or ``file:///path``.
        timeout: Limit of the rendezvous and default limit of every operation, in seconds or as a timedelta.
        world_size: Number of ranks; -1 takes it from ``init_method``.
        rank: Rank of this process; -1 takes it from ``init_method``.
        store: Store to join through instead of ``init_method``; needs ``rank`` and ``world_size``.
        group_name: Name of the default group in error messages and traces.
        pg_options: Accepted for compatibility with torch; has no effect.
        device_id: Accepted for compatibility with torch; has no effect.
        enable_reconfigure: Must be False: `regroup` and `join` change the members. torch.distributed supports it.

    Raises:
        AlreadyInitializedError: There is a default process group, or another call is creating one.
        RendezvousTimeoutError: Some ranks did not arrive in time. The message names them.
        AddressError: The port is in use, the host does not resolve, or the interface does not exist.
        AuthenticationError: A rank does not hold the token of the job.
        TransportUnavailableError: A transport in ``backend`` does not work on this machine.
        UsageError: ``enable_reconfigure`` is True.

    Example:
        >>> await dist.init_process_group(init_method="tcp://10.0.0.1:29500", rank=0, world_size=4)
    """
    # A plain function, so that the error of the next call can name the line of a forgotten await.
    default_world.note_unawaited_call(calling_line())
    where = backend, init_method, timeout, world_size, rank, store, group_name
    return _init_process_group(enable_reconfigure, *where)


async def _init_process_group(enable_reconfigure: bool, *where: Any) -> None:
    default_world.begin_initialization(enable_reconfigure)
    world: World | None = None
    try:
        world = await _open(*where)
    finally:
        default_world.end_initialization(world)


async def _open(*where: Any) -> World:
    loop = asyncio._get_running_loop()
    opening = open_world(*where, home=loop, reports_dropped_works=True)
    if loop is not None:
        return await opening
    world = await trio_tasks.run_on_background_loop(opening)
    world.endpoint.progress.turns.in_trio = True
    return world


async def _close(world: World) -> None:
    running = asyncio._get_running_loop()
    if running is world.endpoint.progress.loop:
        await world.close()
    elif running is not None:
        await asyncio.to_thread(close_blocking, world)
    else:
        # A cancelled scope of trio would cancel each await, and leave connections open.
        await trio_tasks.run_on_background_loop(world.close(), shield=True)


def close_blocking(world: World) -> None:
    """Close a world on its loop, and wait for that. Any thread but the loop's own may call it."""
    loop = world.endpoint.progress.loop
    world.leave()
    if loop is background_loop().loop:
        background_loop().run(world.close())
    elif loop.is_running():
        # The loop cancels the task if it ends.
        result_on(loop, world.close())
    else:
        loop.run_until_complete(world.close())


# Python names the coroutine in its own warning of a forgotten await.
_init_process_group.__name__ = _init_process_group.__qualname__ = "init_process_group"


async def destroy_process_group(group: default_world.AnyGroup = None) -> None:
    """Destroy a group on this rank. Its pending operations fail.

    Args:
        group: The group to destroy. None, or the default group, destroys the default world with all of its groups.

    Raises:
        NotInitializedError: There is no default process group.
    """
    if isinstance(group, Group) and group is not default_world.default_group():
        group.close()
    elif group is None or isinstance(group, Group):
        await _close(default_world.take_world())
    else:
        default_world.refuse_other_kinds(group)


@asynccontextmanager
async def process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
) -> AsyncIterator[Group]:
    """Open a world that is independent of the default one, and close it on exit.

    The arguments and errors are those of `init_process_group`.

    Yields:
        The group of all ranks of the new world.

    Example:
        >>> async with process_group(rank=0, world_size=1, store=HashStore()) as group:
        ...     await group.barrier()
    """
    world = await _open(backend, init_method, timeout, world_size, rank, store, group_name)
    try:
        with default_world.independent(world) as group:
            yield group
    finally:
        await _close(world)


api = CollectivesApi()

all_gather_init = awaited(api.all_gather)
all_gather_coalesced_init = awaited(api.all_gather_coalesced)
all_gather_single_init = awaited(api.all_gather_single)
all_reduce_init = awaited(api.all_reduce)
all_reduce_coalesced_init = awaited(api.all_reduce_coalesced)
all_to_all_init = awaited(api.all_to_all)
all_to_all_single_init = awaited(api.all_to_all_single)
barrier_init = awaited(api.barrier)
broadcast_init = awaited(api.broadcast)
gather_init = awaited(api.gather)
gather_single_init = awaited(api.gather_single)
reduce_init = awaited(api.reduce)
reduce_scatter_init = awaited(api.reduce_scatter)
reduce_scatter_single_init = awaited(api.reduce_scatter_single)
scatter_init = awaited(api.scatter)
