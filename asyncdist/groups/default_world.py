"""Process-wide state: the default world, and the questions and groups that go back to it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from asyncdist.base.deadline import Timeout
from asyncdist.config import Launch
from asyncdist.errors import AlreadyInitializedError, NotInitializedError, UsageError
from asyncdist.groups.group import Group
from asyncdist.groups.world import World
from asyncdist.transport import registry

# -- state ------------------------------------------------------------------------------------------

_world: World | None = None
_initializing = False


SAME_RANKS = (
    "the ranks of a group never change. Leave enable_reconfigure out; when ranks were lost or have "
    "joined, call destroy_process_group() and init_process_group() on those that are there"
)


def begin_initialization(enable_reconfigure: bool = False) -> None:
    """Note that a default world is being made; AlreadyInitializedError if there is one, or another on its way.

    UsageError if it is to be one whose ranks can be exchanged.
    """
    global _initializing
    if enable_reconfigure:
        raise UsageError(f"enable_reconfigure=True: {SAME_RANKS}")
    if _world is not None or _initializing:
        raise AlreadyInitializedError
    _initializing = True


def end_initialization(world: World | None) -> None:
    """Take the default world that was made; None if that failed."""
    global _initializing, _world
    _initializing, _world = False, world


def take_world() -> World:
    """Return the default world and forget it; the caller closes it."""
    global _world
    world, _world = default_world(), None
    return world


def default_world() -> World:
    """Return the default world; raise NotInitializedError before `init_process_group`."""
    if _world is None:
        raise _no_world()
    return _world


def _no_world() -> NotInitializedError:
    torchs = _torchs()
    if torchs is None or not torchs.is_initialized():
        return NotInitializedError()
    return NotInitializedError(
        "asyncdist has no process group, only torch.distributed has one: call asyncdist.sync.init_process_group() too "
        "(in a coroutine `await asyncdist.init_process_group()`), or stay with torch's own functions and its "
        "DistributedDataParallel, which run on the back end 'asyncdist' as well"
    )


def _torchs() -> Any:
    """Return torch.distributed where this process has it and it can do anything, else None."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() else None


def default_group() -> Group:
    """Return the group of all ranks of the default world."""
    return default_world().group


class _NonMember:
    """What `new_group` returns on a rank that is not in the group."""

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


class _WorldMeta(type):
    @property
    def WORLD(cls) -> Group | None:  # noqa: N802 - torch's name
        return _world.group if _world is not None else None


class group(metaclass=_WorldMeta):  # noqa: N801 - torch's name
    """``group.WORLD`` is the default group, None while there is none."""


class GroupMember(metaclass=_WorldMeta):
    """``GroupMember.NON_GROUP_MEMBER`` stands for a group on ranks that are not in it."""

    NON_GROUP_MEMBER = _NonMember()


AnyGroup = Group | _NonMember | None


def resolve_group(of: AnyGroup) -> Group:
    """Return a group argument as a group: None is the default one.

    UsageError on a rank outside the group, and for a group of torch.distributed's.
    """
    if of is None:
        if _world is None:
            raise _no_world()
        return _world.group
    return of if type(of) is Group else _stranger(of)  # `isinstance` asks an abstract class, which takes its time


def _stranger(of: Any) -> Group:
    """Refuse what is no group to call; what behaves like one is taken for one."""
    if isinstance(of, _NonMember):
        raise UsageError("this rank is not in the group: call the collective on its members only")
    torchs = _torchs()
    if torchs is not None and isinstance(of, torchs.ProcessGroup):
        raise UsageError(
            "this is a process group of torch.distributed, not of asyncdist: of one on the back end 'asyncdist' pass the "
            "attribute `group`, else a group of asyncdist.new_group()"
        )
    return of  # type: ignore[no-any-return]


# -- asking -----------------------------------------------------------------------------------------


def is_available() -> bool:
    """Return True: this package needs nothing that torch may lack."""
    return True


def is_backend_available(backend: str) -> bool:
    """Return whether `init_process_group` takes it: transports' names, or one of torch's, which stand for "auto"."""
    return registry.is_known(backend)


def is_gloo_available() -> bool:
    """Return what torch says of itself, for programs that choose by it; we need no gloo."""
    return _torch_has("gloo")


def is_mpi_available() -> bool:
    """Return what torch says of itself, for programs that choose by it; we need no MPI."""
    return _torch_has("mpi")


def is_nccl_available() -> bool:
    """Return what torch says of itself, for programs that choose by it; ``asyncdist info`` says whether we can use NCCL."""
    return _torch_has("nccl")


def _torch_has(backend: str) -> bool:
    import torch.distributed

    return bool(getattr(torch.distributed, f"is_{backend}_available", bool)())  # a torch without distributed has none


def is_torchelastic_launched() -> bool:
    """Return whether torchrun started this process."""
    return bool(Launch.from_environment().run_id)


def is_initialized() -> bool:
    """Return whether there is a default process group."""
    return _world is not None


def get_rank(group: AnyGroup = None) -> int:
    """Return this process's rank in the group, -1 if it is not in it."""
    return -1 if isinstance(group, _NonMember) else resolve_group(group).rank()


def get_world_size(group: AnyGroup = None) -> int:
    """Return the number of ranks in the group, -1 if this process is not in it."""
    return -1 if isinstance(group, _NonMember) else resolve_group(group).size()


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return which of its host's processes this one is, as its launcher says, or else ``fallback_rank``.

    UsageError if there is neither.
    """
    local = Launch.from_environment().local_rank
    if local is None and fallback_rank is None:
        raise UsageError("LOCAL_RANK is not set (torchrun sets it): set it, or pass fallback_rank=")
    return int(fallback_rank) if local is None and fallback_rank is not None else int(local or 0)


def get_backend(group: AnyGroup = None) -> str:
    """Return the names of the transports that the group uses, the preferred first, as ``shm`` or ``shm,tcp``.

    Of a group of one, what was asked for. `init_process_group` takes what this returns.
    """
    of = resolve_group(group)
    return ",".join(of.mesh.transport_selector.used(of.ranks)) or of.mesh.backend


def get_process_group_ranks(group: AnyGroup = None) -> list[int]:
    """Return the global ranks of the group, by rank in the group."""
    return list(resolve_group(group).ranks)


def get_group_rank(group: AnyGroup, global_rank: int) -> int:
    """Return the rank in the group of a global rank; UsageError if it is not in it."""
    return resolve_group(group).group_rank(global_rank)


def get_global_rank(group: AnyGroup, group_rank: int) -> int:
    """Return the global rank of a rank in the group; raise UsageError if the group has no such rank."""
    ranks = resolve_group(group).ranks
    if not 0 <= group_rank < len(ranks):
        raise UsageError(f"rank {group_rank} is not in a group of {len(ranks)}")
    return ranks[group_rank]


# -- groups -----------------------------------------------------------------------------------------


def set_timeout(timeout: Timeout, group: AnyGroup = None) -> None:
    """Set how long operations of a group that are called from now on may take (seconds or timedelta); on this rank."""
    resolve_group(group).set_timeout(timeout)


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: object = None,
    sort_ranks: bool = True,
) -> Group | _NonMember:
    """Make a group of some ranks (all if None); NON_GROUP_MEMBER on the other ranks.

    Its ranks are numbered in ascending order, as torch does it, or with ``sort_ranks=False`` in the given one. Costs no
    communication. Members make groups with equal ranks in the same order; ``backend``, ``pg_options`` and ``device_id``
    are taken for compatibility and change nothing: a group uses its world's transports.
    """
    if ranks is not None and sort_ranks:
        ranks = sorted(ranks)
    return default_world().new_group(ranks, group_desc, timeout) or GroupMember.NON_GROUP_MEMBER


def new_subgroups(
    group_size: int | None = None,
    group: AnyGroup = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[Group | _NonMember, list[Group | _NonMember]]:
    """Cut a group into subgroups of ``group_size`` neighbours; return (ours, all)."""
    parent = resolve_group(group)
    if not group_size or parent.size() % group_size:
        raise UsageError(f"group_size={group_size} does not divide the {parent.size()} ranks of the group")
    cut = [parent.ranks[start : start + group_size] for start in range(0, parent.size(), group_size)]
    return new_subgroups_by_enumeration(cut, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[Group | _NonMember, list[Group | _NonMember]]:
    """Make one group for each list of global ranks, which must not overlap; return (ours, all)."""
    return _parts(ranks_per_subgroup_list, timeout, group_desc, sort_ranks=True)


def _parts(
    lists: Sequence[Sequence[int]], timeout: Timeout, name: str | None, *, sort_ranks: bool
) -> tuple[Group | _NonMember, list[Group | _NonMember]]:
    named = [rank for ranks in lists for rank in ranks]
    if len(set(named)) != len(named):
        raise UsageError("the subgroups overlap: a rank may be in one of them only")
    made = [new_group(ranks, timeout, group_desc=name, sort_ranks=sort_ranks) for ranks in lists]
    ours = next((one for one in made if isinstance(one, Group)), GroupMember.NON_GROUP_MEMBER)
    return ours, made


def split_group(
    parent_pg: AnyGroup = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout = None,
    pg_options: object = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> Group | None:
    """Split a group by lists of ranks in it; return the part that we are in, None if in none.

    A part's ranks are in the group's order. Costs no communication on the host. All ranks of the group call it, in one
    order with its other calls: where it has carried tensors between devices, what it has there may be split too.
    """
    parent = resolve_group(parent_pg)
    if not split_ranks:
        raise UsageError("split_ranks needs at least one list of ranks")
    parts = [[get_global_rank(parent, rank) for rank in sorted(ranks)] for ranks in split_ranks]
    ours, _ = _parts(parts, timeout, group_desc, sort_ranks=False)
    part = ours if isinstance(ours, Group) else None
    own = get_global_rank(parent, parent.rank())
    parent.pass_on(part, next((number for number, ranks in enumerate(parts) if own in ranks), -1))
    return part
