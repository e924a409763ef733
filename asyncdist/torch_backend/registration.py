"""Registration with ``torch.distributed.Backend.register_backend``, and the factory that torch then calls.

The package registers the back end when it is imported. torch calls `make_backend` in ``init_process_group`` and
``new_group``. `asyncdist.bench.contenders.null_backend` registers a second back end here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed import distributed_c10d

from asyncdist.base.background_loop import background_loop
from asyncdist.base.cores import has_free_cores
from asyncdist.groups.world import World, open_world
from asyncdist.torch_backend.process_group import NAME, ProcessGroup

c10d: Any = distributed_c10d


def register_backend() -> None:
    """Make ``"asyncdist"`` a back end of torch.distributed. Idempotent."""
    add_backend(NAME, make_backend, ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"])


def add_backend(name: str, maker: Callable[[Any, object], ProcessGroup], devices: Sequence[str]) -> None:
    """Register ``maker``, a function like `make_backend`, as the factory of the back end ``name``. Idempotent."""
    backends: Any = torch_distributed.Backend
    if name.upper() not in backends._plugins:
        backends.register_backend(name, maker, extended_api=True, devices=list(devices))
    # torch 2.15 hooks its flight recorder into groups of back ends that do not record themselves. asyncdist's does, and
    # a process group that is a Python object does not support the hook.
    self_recording = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if self_recording is not None:
        c10d._FR_SELF_RECORDING_BACKENDS = {*self_recording, name}


def make_backend(opts: Any, pg_options: object = None) -> ProcessGroup:
    """Create a process group. torch calls this on every member. Members create the groups that they share in one order.

    If the default group is asyncdist's, a further group uses the connections of its world and needs no communication.
    Otherwise the ranks of the group perform a rendezvous through the store that torch passes.

    Args:
        opts: torch's ``_DistributedBackendOptions``: store, ranks and timeout. Its ``enable_reconfigure`` is ignored.
        pg_options: Ignored.
    """
    world, own_world = _default_world(), None
    if world is not None and opts.global_ranks_in_group:
        # torch's group name is not used. It is a count that each rank keeps for itself, and the counts differ after some
        # ranks have created a group without the others.
        group = world.new_group(opts.global_ranks_in_group, timeout=opts.timeout)
        assert group is not None, "torch calls make_backend on members only"
    else:
        own_world = background_loop().run(
            open_world(store=opts.store, rank=opts.group_rank, world_size=opts.group_size, timeout=opts.timeout)
        )
        group = own_world.group
    # Without a free core, the background loop's thread would take the calling thread's core. The calling thread
    # therefore spins for its peers; it usually waits soon anyway, such as DDP after its last bucket.
    group.patient = not has_free_cores(group.mesh.transport_selector.local_size, torch.get_num_threads())
    return ProcessGroup(group, own_world)


def _default_world() -> World | None:
    """Return the world of torch's default group; None without a default group, or if it has another back end."""
    if not torch_distributed.is_initialized():
        return None
    default = torch_distributed.group.WORLD
    return default.group.world if isinstance(default, ProcessGroup) else None
