"""The blocking API, a replacement for torch.distributed: ``import asyncdist.sync as dist``.

A collective blocks until it is complete and returns None. With ``async_op=True`` it returns a `Work` at once, and the
operation continues in the background. The calling thread drives the progress of a blocking call.
"""

from __future__ import annotations

import importlib
from asyncio import _get_running_loop
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import asyncdist
from asyncdist.base.background_loop import background_loop
from asyncdist.base.call_site import refuse_await
from asyncdist.base.deadline import Timeout
from asyncdist.base.ops import ReduceOp, premul_sum
from asyncdist.groups import aio, default_world
from asyncdist.groups.blocking_api import BlockingApi
from asyncdist.groups.blocking_help import without_await
from asyncdist.groups.collectives_api import P2POp
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
    revoke,
    set_timeout,
    split_group,
    watch_members,
)
from asyncdist.groups.group import Group
from asyncdist.groups.members.member_watch import MemberChange
from asyncdist.groups.members.regrouping import Agreed
from asyncdist.groups.members.step import GroupStep
from asyncdist.groups.members.training_state import State
from asyncdist.groups.persistent import PersistentCollective, start_all
from asyncdist.groups.persistent_api import blocking
from asyncdist.groups.subgroups import NonMember
from asyncdist.groups.world import World, open_world
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.memory.registered import empty
from asyncdist.kernel.tracing.hooks import OperationRecord, register_hook
from asyncdist.kernel.tracing.metrics import GroupMetrics, serve_metrics
from asyncdist.store import PrefixStore

if TYPE_CHECKING:
    from asyncdist.ddp import DistributedDataParallel
    from asyncdist.ddp.low_communication.diloco import BlockingDiLoCo as DiLoCo
    from asyncdist.ddp.low_communication.diloco import BlockingLocalSGD as LocalSGD
    from asyncdist.ddp.low_communication.outer_training import CommunicationSavings
    from asyncdist.ddp.sampler import DistributedSampler
    from asyncdist.ddp.sharded_optimizer import ZeroRedundancyOptimizer
    from asyncdist.ddp.sync_batchnorm import SyncBatchNorm
    from asyncdist.elastic.session import JobSession, join
    from asyncdist.groups.windows import Window
    from asyncdist.kernel.tracing.otel import trace_operations
    from asyncdist.store import FileStore, HashStore, TCPStore


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
    """Join the other ranks and create the default process group. Call `destroy_process_group` at the end."""
    default_world.begin_initialization(enable_reconfigure)
    world: World | None = None
    try:
        world = background_loop().run(
            open_world(backend, init_method, timeout, world_size, rank, store, group_name, reports_dropped_works=True)
        )
    finally:
        default_world.end_initialization(world)


_, _heading, _details = (aio.init_process_group.__doc__ or "").partition("    Args:")
init_process_group.__doc__ = f"{init_process_group.__doc__}\n\n{_heading}{without_await(_details)}"


def destroy_process_group(group: default_world.AnyGroup = None) -> None:
    """Destroy a group on this rank. Its pending operations fail.

    Args:
        group: The group to destroy. None, or the default group, destroys the default world with all of its groups.

    Raises:
        NotInitializedError: There is no default process group.
        LoopThreadError: The running event loop has opened the world: await `asyncdist.destroy_process_group`.
    """
    if isinstance(group, Group) and group is not default_world.default_group():
        group.close()
    elif group is None or isinstance(group, Group):
        default_world.default_world().endpoint.progress.refuse_loop_thread("destroy_process_group")
        aio.close_blocking(default_world.take_world())
    else:
        default_world.refuse_other_kinds(group)


def process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
) -> AbstractContextManager[Group]:
    """Open a world that is independent of the default one, and close it on exit.

    The arguments and errors are those of `init_process_group`.

    Yields:
        The group of all ranks of the new world.

    Example:
        >>> with process_group(rank=0, world_size=1, store=HashStore()) as group:
        ...     group.barrier().wait()
    """
    if _get_running_loop() is not None:
        refuse_await()
    return _process_group(backend, init_method, timeout, world_size, rank, store, group_name)


@contextmanager
def _process_group(*where: Any) -> Iterator[Group]:
    world = background_loop().run(open_world(*where, reports_dropped_works=True))
    try:
        with default_world.independent(world) as group:
            yield group
    finally:
        aio.close_blocking(world)


# The name of torch.distributed, for annotations.
ProcessGroup = Group

_api = BlockingApi()

agree = _api.agree
all_gather = _api.all_gather
all_gather_coalesced = _api.all_gather_coalesced
all_gather_into_tensor = _api.all_gather_single
all_gather_object = _api.all_gather_object
all_gather_single = _api.all_gather_single
all_reduce = _api.all_reduce
all_reduce_coalesced = _api.all_reduce_coalesced
all_to_all = _api.all_to_all
all_to_all_single = _api.all_to_all_single
barrier = _api.barrier
batch_isend_irecv = _api.batch_isend_irecv
broadcast = _api.broadcast
broadcast_object_list = _api.broadcast_object_list
gather = _api.gather
gather_into_tensor = _api.gather_single
gather_object = _api.gather_object
gather_single = _api.gather_single
irecv = _api.irecv
isend = _api.isend
monitored_barrier = _api.monitored_barrier
recv = _api.recv
recv_object_list = _api.recv_object_list
reduce = _api.reduce
reduce_scatter = _api.reduce_scatter
reduce_scatter_single = _api.reduce_scatter_single
reduce_scatter_tensor = _api.reduce_scatter_single
regroup = _api.regroup
scatter = _api.scatter
scatter_object_list = _api.scatter_object_list
send = _api.send
send_object_list = _api.send_object_list

all_gather_init = blocking(aio.api.all_gather)
all_gather_coalesced_init = blocking(aio.api.all_gather_coalesced)
all_gather_single_init = blocking(aio.api.all_gather_single)
all_reduce_init = blocking(aio.api.all_reduce)
all_reduce_coalesced_init = blocking(aio.api.all_reduce_coalesced)
all_to_all_init = blocking(aio.api.all_to_all)
all_to_all_single_init = blocking(aio.api.all_to_all_single)
barrier_init = blocking(aio.api.barrier)
broadcast_init = blocking(aio.api.broadcast)
gather_init = blocking(aio.api.gather)
gather_single_init = blocking(aio.api.gather_single)
reduce_init = blocking(aio.api.reduce)
reduce_scatter_init = blocking(aio.api.reduce_scatter)
reduce_scatter_single_init = blocking(aio.api.reduce_scatter_single)
scatter_init = blocking(aio.api.scatter)


_BLOCKING = {"DiLoCo": "BlockingDiLoCo", "LocalSGD": "BlockingLocalSGD"}


def __getattr__(name: str) -> Any:
    # Programs that only exchange tensors do not import the modules for training, elastic jobs, windows and other stores.
    if name in _BLOCKING:
        value = getattr(importlib.import_module("asyncdist.ddp.low_communication.diloco"), _BLOCKING[name])
    elif name == "weights":
        value = importlib.import_module("asyncdist.weights.blocking")
    elif name in __all__:
        value = getattr(asyncdist, name)
    else:
        raise AttributeError(f"module 'asyncdist.sync' has no attribute {name!r}")
    globals()[name] = value
    return value


__all__ = [
    "Agreed", "CommunicationSavings", "DiLoCo", "DistributedDataParallel", "DistributedSampler", "FileStore", "Group",
    "GroupMember", "GroupMetrics", "GroupStep", "HashStore", "JobSession", "LocalSGD", "MemberChange", "NonMember",
    "OperationRecord", "P2POp", "PersistentCollective", "PrefixStore", "ProcessGroup", "ReduceOp", "State",
    "SyncBatchNorm", "TCPStore", "Window", "Work", "ZeroRedundancyOptimizer", "agree", "all_gather", "all_gather_coalesced",
    "all_gather_coalesced_init", "all_gather_init", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_gather_single_init", "all_reduce", "all_reduce_coalesced", "all_reduce_coalesced_init", "all_reduce_init",
    "all_to_all", "all_to_all_init", "all_to_all_single", "all_to_all_single_init", "barrier", "barrier_init",
    "batch_isend_irecv", "broadcast", "broadcast_init", "broadcast_object_list", "destroy_process_group", "empty",
    "gather", "gather_init", "gather_into_tensor", "gather_object", "gather_single", "gather_single_init", "get_backend",
    "get_global_rank", "get_group_rank", "get_node_local_rank", "get_process_group_ranks", "get_rank", "get_world_size",
    "group", "init_process_group", "irecv", "is_available", "is_backend_available", "is_gloo_available", "is_initialized",
    "is_mpi_available", "is_nccl_available", "is_torchelastic_launched", "isend", "join", "monitored_barrier",
    "new_group", "new_subgroups", "new_subgroups_by_enumeration", "premul_sum", "process_group", "recv",
    "recv_object_list", "reduce", "reduce_init", "reduce_scatter", "reduce_scatter_init", "reduce_scatter_single",
    "reduce_scatter_single_init", "reduce_scatter_tensor", "register_hook", "regroup", "revoke", "scatter",
    "scatter_init", "scatter_object_list", "send", "send_object_list", "serve_metrics", "set_timeout", "split_group",
    "start_all", "trace_operations", "watch_members",
]  # fmt: skip
