"""The process-wide default world, and the functions of torch.distributed that query it or make groups in it.

`asyncdist` and `asyncdist.sync` export the public functions of this module.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, overload

from asyncdist.base.deadline import Timeout
from asyncdist.environment import Launch
from asyncdist.errors import AlreadyInitializedError, NotInitializedError, UsageError
from asyncdist.groups.group import Group
from asyncdist.groups.members.member_watch import MemberWatch
from asyncdist.groups.subgroups import NonMember
from asyncdist.groups.world import World
from asyncdist.kernel.collectives.arguments import whole_number_of
from asyncdist.kernel.transport import registry

# -- state ------------------------------------------------------------------------------------------

_world: World | None = None
_initializing = False
_independent: list[World] = []
"""The worlds that `process_group` has opened."""
_unawaited_call = ""
"""The place of the last `asyncdist.init_process_group()` whose coroutine has not started; empty if there is none."""


def begin_initialization(enable_reconfigure: bool = False) -> None:
    """Mark the default world as being initialized.

    Raises:
        AlreadyInitializedError: There is a default world, or another call is creating one.
        UsageError: ``enable_reconfigure`` is True, which only the back end of torch.distributed supports.
    """
    global _initializing, _unawaited_call
    _unawaited_call = ""
    if enable_reconfigure:
        raise UsageError(
            "enable_reconfigure=True works through torch.distributed only. Leave enable_reconfigure out; regroup() goes on "
            "with the survivors, join() also admits newcomers; or call destroy_process_group() and init_process_group() on "
            "the ranks that are there"
        )
    if _world is not None or _initializing:
        raise AlreadyInitializedError
    _initializing = True


def note_unawaited_call(place: str) -> None:
    """Record where a program called the coroutine function `init_process_group`, for the error of a forgotten await."""
    global _unawaited_call
    _unawaited_call = place


def end_initialization(world: World | None) -> None:
    """Store the new default world and end its initialization; None says that the initialization failed."""
    global _initializing, _world
    _initializing, _world = False, world


def take_world() -> World:
    """Return the default world and clear it. The caller closes the world."""
    global _world
    world, _world = default_world(), None
    return world


@contextlib.contextmanager
def independent(world: World) -> Iterator[Group]:
    """Name a world that is not the default one in the error of calls that need the default one; yield its group."""
    _independent.append(world)
    try:
        yield world.group
    finally:
        _independent.remove(world)


def default_world() -> World:
    """Return the default world.

    Raises:
        NotInitializedError: `init_process_group` has not completed.
    """
    if _world is None:
        raise _no_world()
    return _world


def _no_world() -> NotInitializedError:
    if _initializing:
        return NotInitializedError(
            "no process group yet: init_process_group() has not completed; wait for it (in a coroutine, await it) first"
        )
    if _unawaited_call:
        return NotInitializedError(
            f"no process group: init_process_group() was called at {_unawaited_call} and never awaited: write "
            "`await dist.init_process_group(...)` there, or import asyncdist.sync in a program without an event loop"
        )
    # None of them becomes the default: a library may have opened it, or several may be open.
    if _independent:
        return NotInitializedError(
            f"no default process group: process_group() has opened group {_independent[-1].group.name!r}, which is another "
            "one. Pass it as group=, or call its methods, such as `group.new_group(ranks)`; init_process_group() makes the "
            "default one"
        )
    distributed = _torch_distributed()
    if distributed is None or not distributed.is_initialized():
        return NotInitializedError()
    return NotInitializedError(
        "asyncdist has no process group, only torch.distributed has one: call asyncdist.sync.init_process_group() too "
        "(in a coroutine `await asyncdist.init_process_group()`), or stay with torch's own functions and its "
        "DistributedDataParallel, which run on the back end 'asyncdist' as well"
    )


def _torch_distributed() -> Any:
    """Return torch.distributed; None if this process has not imported it or torch was built without it."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() else None


def default_group() -> Group:
    """Return the group of all ranks of the default world."""
    return default_world().group


class _WorldMeta(type):
    @property
    def WORLD(cls) -> Group:  # noqa: N802 - torch's name
        # Declared as a group, so that type checkers let programs pass it on. Before `init_process_group` it is None.
        return _world.group if _world is not None else None  # type: ignore[return-value]


class group(metaclass=_WorldMeta):  # noqa: N801 - torch's name
    """``group.WORLD`` is the default group, or None before `init_process_group`."""


class GroupMember(metaclass=_WorldMeta):
    """``GroupMember.NON_GROUP_MEMBER`` stands for a group on ranks that are not in it."""

    NON_GROUP_MEMBER: Final = NonMember.NON_GROUP_MEMBER


AnyGroup = Group | NonMember | None


def resolve_group(of: AnyGroup) -> Group:
    """Return the group that an argument denotes. None denotes the default group.

    Raises:
        NotInitializedError: The argument is None and there is no default group.
        UsageError: This rank is not in the group, or the group belongs to torch.distributed.
    """
    if of is None:
        if _world is None:
            raise _no_world()
        return _world.group
    # `isinstance` is slower here, because it consults an abstract base class.
    return of if type(of) is Group else _other_group(of)


def refuse_other_kinds(of: Any) -> None:
    """Raise UsageError unless the argument is a group, None, or the value that `new_group` returns to a non-member."""
    if not isinstance(of, NonMember):
        resolve_group(of)


def _other_group(of: Any) -> Group:
    """Return any other object as a group; raise UsageError for a non-member or a group of torch.distributed."""
    if isinstance(of, NonMember):
        raise UsageError("this rank is not in the group: call the collective on its members only")
    distributed = _torch_distributed()
    if distributed is not None and isinstance(of, distributed.ProcessGroup):
        raise UsageError(
            "this is a process group of torch.distributed, not of asyncdist: if it is on the back end 'asyncdist', pass "
            "its attribute `group`, else a group of asyncdist.new_group()"
        )
    # A program may wrap a group in an object of its own.
    if not hasattr(of, "group_rank"):
        raise UsageError(f"group is a group such as new_group() returns, or None for the default group, not {of!r}")
    return of  # type: ignore[no-any-return]


# -- queries ----------------------------------------------------------------------------------------


def is_available() -> bool:
    """Return True: asyncdist works with every build of torch."""
    return True


def is_backend_available(backend: str) -> bool:
    """Return whether `init_process_group` accepts ``backend``: names of transports, or a back end of torch ("auto")."""
    return registry.is_known(backend)


def is_gloo_available() -> bool:
    """Return whether torch was built with Gloo. asyncdist does not use Gloo."""
    return _torch_has("gloo")


def is_mpi_available() -> bool:
    """Return whether torch was built with MPI. asyncdist does not use the MPI of torch."""
    return _torch_has("mpi")


def is_nccl_available() -> bool:
    """Return whether torch was built with NCCL. ``asyncdist info`` says whether asyncdist can use NCCL."""
    return _torch_has("nccl")


def _torch_has(backend: str) -> bool:
    import torch.distributed

    # A torch that was built without distributed lacks these functions.
    return bool(getattr(torch.distributed, f"is_{backend}_available", bool)())


def is_torchelastic_launched() -> bool:
    """Return whether torchrun started this process."""
    return bool(Launch.from_environment().run_id)


def is_initialized() -> bool:
    """Return whether there is a default process group."""
    return _world is not None


def get_rank(group: AnyGroup = None) -> int:
    """Return the rank of this process in the group; -1 if the process is not a member."""
    return -1 if isinstance(group, NonMember) else resolve_group(group).rank()


def get_world_size(group: AnyGroup = None) -> int:
    """Return the number of ranks in the group; -1 if this process is not a member."""
    return -1 if isinstance(group, NonMember) else resolve_group(group).size()


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return the rank of this process among the processes of its host, from ``LOCAL_RANK``.

    Args:
        fallback_rank: The value to return if ``LOCAL_RANK`` is not set.

    Raises:
        UsageError: ``LOCAL_RANK`` is not set and ``fallback_rank`` is None.
    """
    local = Launch.from_environment().local_rank
    if local is None:
        if fallback_rank is None:
            raise UsageError("LOCAL_RANK is not set (torchrun sets it): set it, or pass fallback_rank=")
        return whole_number_of("fallback_rank", fallback_rank)
    return local


def get_backend(group: AnyGroup = None) -> str:
    """Return the names of the transports that the group uses, such as ``shm`` or ``shm,tcp``, preferred ones first.

    A group of one rank returns the requested back end. `init_process_group` accepts every returned value.
    """
    of = resolve_group(group)
    return ",".join(of.endpoint.transport_selector.used(of.member_ids)) or of.endpoint.backend


def get_process_group_ranks(group: AnyGroup = None) -> list[int]:
    """Return the global ranks of the group, in group order."""
    return list(resolve_group(group).ranks)


def get_group_rank(group: AnyGroup, global_rank: int) -> int:
    """Return the group rank of a global rank; raise UsageError if the global rank is not in the group."""
    return resolve_group(group).group_rank(global_rank)


def get_global_rank(group: AnyGroup, group_rank: int) -> int:
    """Return the global rank of a group rank; raise UsageError if the group has no such rank."""
    ranks, group_rank = resolve_group(group).ranks, whole_number_of("group_rank", group_rank)
    if not 0 <= group_rank < len(ranks):
        raise UsageError(f"rank {group_rank} is not in a group of {len(ranks)}")
    return ranks[group_rank]


# -- groups -----------------------------------------------------------------------------------------


def set_timeout(timeout: Timeout, group: AnyGroup = None) -> None:
    """Set the default timeout of later operations of a group on this rank, in seconds or as a timedelta."""
    resolve_group(group).set_timeout(timeout)


def revoke(reason: str = "revoke() was called", group: AnyGroup = None) -> None:
    """Fail all pending operations of a group on every rank. Connections stay usable, and `regroup` goes on.

    Args:
        reason: Part of the error of every rank.
        group: The group; None means the default group.
    """
    resolve_group(group).revoke(reason)


def watch_members(group: AnyGroup = None) -> MemberWatch:
    """Return a stream of the changes of a group's members: lost, suspected, recovered.

    Args:
        group: The group; None means the default group.

    Returns:
        A stream of `MemberChange`, for ``async for`` or, in a thread, ``for``. It ends with the group.

    Example:
        >>> async for change in dist.watch_members():
        ...     print(f"member {change.member} is {change.change}: {change.reason}")
    """
    return resolve_group(group).watch_members()


@overload
def new_group(
    ranks: None = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: object = None,
    sort_ranks: bool = True,
) -> Group: ...


@overload
def new_group(
    ranks: Sequence[int],
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: object = None,
    sort_ranks: bool = True,
) -> Group | NonMember: ...


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: object = None,
    sort_ranks: bool = True,
) -> Group | NonMember:
    """Make a group of some ranks of the default world, as `Group.new_group` of the default group does.

    Args:
        ranks: Global ranks of the members; None means all ranks.
        timeout: Default limit of the group's operations, in seconds or as a timedelta; None takes the world's.
        backend: Accepted for compatibility; has no effect. A group uses the transports of its world.
        pg_options: Accepted for compatibility; has no effect.
        use_local_synchronization: Accepted for compatibility; has no effect.
        group_desc: Name of the group in error messages and traces.
        device_id: Accepted for compatibility; has no effect.
        sort_ranks: Number the members by ascending global rank, as torch does. False keeps the order of ``ranks``.

    Returns:
        The group, or ``GroupMember.NON_GROUP_MEMBER`` on a rank that is not a member.

    Raises:
        NotInitializedError: There is no default process group.
        UsageError: ``ranks`` is empty, repeats a rank, or names a rank outside the world.

    Example:
        >>> evens = dist.new_group(range(0, dist.get_world_size(), 2))
    """
    return default_group().new_group(ranks, timeout, group_desc, sort_ranks=sort_ranks)


def new_subgroups(
    group_size: int | None = None,
    group: AnyGroup = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[Group, list[Group | NonMember]]:
    """Divide a group into subgroups of consecutive ranks, as `Group.new_subgroups` does; all ranks of the world call it.

    ``backend`` and ``pg_options`` are accepted for compatibility, and have no effect.

    Example:
        >>> mine, all_pairs = dist.new_subgroups(2)  # ranks 0 and 1, ranks 2 and 3, ...
    """
    return resolve_group(group).new_subgroups(group_size or 0, timeout, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[Group | NonMember, list[Group | NonMember]]:
    """Make one group for each list of global ranks, as `Group.new_subgroups_by_enumeration` of the default group does.

    All ranks of the world call it with the same lists. ``backend`` and ``pg_options`` are accepted for compatibility, and
    have no effect.

    Example:
        >>> mine, both = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    """
    return default_group().new_subgroups_by_enumeration(ranks_per_subgroup_list, timeout, group_desc)


def split_group(
    parent_pg: AnyGroup = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout = None,
    pg_options: object = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> Group | None:
    """Split a group, by default the default one, as `Group.split_group` does; all its ranks call it in the same order.

    ``pg_options`` and ``backend`` are accepted for compatibility, and have no effect.
    """
    return resolve_group(parent_pg).split_group(split_ranks or (), timeout, group_desc)
