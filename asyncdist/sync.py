"""The blocking face: ``import asyncdist.sync as dist`` where a program says ``import torch.distributed as dist``.

Collectives return None when they are over, or with ``async_op=True`` a `Work` that goes on in the background. A blocking
call is driven by the calling thread itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from asyncdist.base.background_loop import background_loop
from asyncdist.base.deadline import Timeout
from asyncdist.base.ops import ReduceOp, premul_sum
from asyncdist.engine.work import Work
from asyncdist.groups import default_world
from asyncdist.groups.collectives_api import CollectivesApi, P2POp
from asyncdist.groups.default_world import (
    GroupMember,
    get_backend,
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_initialized,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    set_timeout,
    split_group,
)
from asyncdist.groups.group import Group
from asyncdist.groups.world import World, open_world
from asyncdist.memory.registered import empty
from asyncdist.store import FileStore, HashStore, PrefixStore, TCPStore


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
) -> None:
    """Meet the other ranks and make the default process group. Call `destroy_process_group` at the end.

    ``backend`` is None or ``"auto"``, a transport (``"shm,tcp"``: several), or a name of torch's (taken as "auto");
    ``init_method`` is ``env://`` (the default), ``tcp://host:port`` of rank 0, ``asyncdist://host:port/job`` of a store
    that runs already, or ``file:///path``; or pass ``store``, ``rank`` and ``world_size``.
    ``timeout`` (seconds or timedelta) limits this and every operation. ``pg_options`` and ``device_id`` change nothing;
    ``enable_reconfigure=True`` is a UsageError that says what to do instead. Raises RendezvousTimeoutError, which names
    who is missing, AddressError, AuthenticationError, TransportUnavailableError, AlreadyInitializedError.
    """
    default_world.begin_initialization(enable_reconfigure)
    world: World | None = None
    try:
        world = background_loop().run(
            open_world(
                backend=backend,
                init_method=init_method,
                timeout=timeout,
                world_size=world_size,
                rank=rank,
                store=store,
                name=group_name,
            )
        )
    finally:
        default_world.end_initialization(world)


def destroy_process_group(group: default_world.AnyGroup = None) -> None:
    """Destroy a group; the default one with everything that stands on it. What is pending fails."""
    if isinstance(group, Group) and group is not default_world.default_group():
        group.close()
    elif group is None or isinstance(group, Group):
        _close(default_world.take_world())


def _close(world: World) -> None:
    world.leave()
    background_loop().run(world.close())


@contextmanager
def process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
) -> Iterator[Group]:
    """Hold a world of its own, independent of the default one: ``with process_group(...) as group:``."""
    world = background_loop().run(
        open_world(
            backend=backend,
            init_method=init_method,
            timeout=timeout,
            world_size=world_size,
            rank=rank,
            store=store,
            name=group_name,
        )
    )
    try:
        yield world.group
    finally:
        _close(world)


def _finish(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    if not work.is_success():
        work.result()
    return None


def _value(work: Work) -> Any:
    return work.result()


ProcessGroup = Group  # torch's name, for annotations

_face: CollectivesApi[Work | None, Any] = CollectivesApi(_finish, _value, blocking=True)

all_gather = _face.all_gather
all_gather_coalesced = _face.all_gather_coalesced
all_gather_into_tensor = _face.all_gather_single
all_gather_object = _face.all_gather_object
all_gather_single = _face.all_gather_single
all_reduce = _face.all_reduce
all_reduce_coalesced = _face.all_reduce_coalesced
all_to_all = _face.all_to_all
all_to_all_single = _face.all_to_all_single
barrier = _face.barrier
batch_isend_irecv = _face.batch_isend_irecv
broadcast = _face.broadcast
broadcast_object_list = _face.broadcast_object_list
gather = _face.gather
gather_into_tensor = _face.gather_single
gather_object = _face.gather_object
gather_single = _face.gather_single
irecv = _face.irecv
isend = _face.isend
monitored_barrier = _face.monitored_barrier
recv = _face.recv
recv_object_list = _face.recv_object_list
reduce = _face.reduce
reduce_scatter = _face.reduce_scatter
reduce_scatter_single = _face.reduce_scatter_single
reduce_scatter_tensor = _face.reduce_scatter_single
scatter = _face.scatter
scatter_object_list = _face.scatter_object_list
send = _face.send
send_object_list = _face.send_object_list

__all__ = [
    "FileStore", "Group", "GroupMember", "HashStore", "P2POp", "PrefixStore", "ProcessGroup", "ReduceOp",
    "TCPStore", "Work", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "destroy_process_group", "empty", "gather",
    "gather_into_tensor", "gather_object", "gather_single", "get_backend", "get_global_rank", "get_group_rank",
    "get_node_local_rank", "get_process_group_ranks", "get_rank", "get_world_size", "group", "init_process_group",
    "irecv", "is_available", "is_backend_available", "is_gloo_available", "is_initialized", "is_mpi_available",
    "is_nccl_available", "is_torchelastic_launched", "isend", "monitored_barrier", "new_group", "new_subgroups",
    "new_subgroups_by_enumeration", "premul_sum", "process_group", "recv", "recv_object_list", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "send_object_list", "set_timeout", "split_group",
]  # fmt: skip
