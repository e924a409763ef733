"""Registration with ``torch.distributed.Backend.register_backend``, and the factory that torch then calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed import distributed_c10d

from asyncdist.base.background_loop import background_loop
from asyncdist.base.cores import has_free_cores
from asyncdist.groups.group import Group
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
    # torch 2.15 hooks its flight recorder into groups whose back end has none. This one has its own, and a group that is
    # a Python object does not support the hook.
    recording = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recording is not None:
        c10d._FR_SELF_RECORDING_BACKENDS = {*recording, name}


def make_backend(opts: Any, pg_options: object = None) -> ProcessGroup:
    """Create a process group. torch calls it on every member, in the same order.

    A subgroup of an asyncdist default group uses the connections of that group's world and needs no communication. Any
    other group performs a rendezvous through the store that torch passes. ``pg_options`` and ``enable_reconfigure`` are
    ignored.
    """
    world = _default_world()
    if world is not None and opts.global_ranks_in_group:
        return _part_of(world, opts.global_ranks_in_group, opts)
    world = background_loop().run(
        open_world(
            store=opts.store,
            rank=opts.group_rank,
            world_size=opts.group_size,
            timeout=opts.timeout,
        )
    )
    return _wrap(world.group, world)


def _part_of(world: World, ranks: Sequence[int], opts: Any) -> ProcessGroup:
    # torch's group name is not used: ranks count differently after some of them have created a group without the others.
    group = world.new_group(ranks, timeout=opts.timeout)
    assert group is not None, "torch asks members only"
    return _wrap(group, None)


def _wrap(group: Group, world: World | None) -> ProcessGroup:
    # Without a free core, a background thread that drives an operation takes the core of the calling thread, which
    # usually waits soon: DDP after its last bucket, functional collectives when the result is used.
    group.patient = not has_free_cores(group.mesh.transport_selector.local_size, torch.get_num_threads())
    return ProcessGroup(group, world)


def _default_world() -> World | None:
    """Return the world of torch's default group; None without a default group, or if it has another back end."""
    if not torch_distributed.is_initialized():
        return None
    default = torch_distributed.group.WORLD
    return default.group.world if isinstance(default, ProcessGroup) else None
