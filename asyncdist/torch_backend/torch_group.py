"""A `Group` by torch's names: the methods that `ProcessGroup` and `Backend` have in common.

torch calls one method per operation, with an options object and with ranks of the group. Those of `call_forms.FORMS` pass
the operation of `Group`, its output tensors and its arguments to `TorchGroup._run`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch

from asyncdist.base.background_loop import background_loop
from asyncdist.base.callables import Callback
from asyncdist.base.cores import has_free_cores
from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.elastic.reconfiguration import Reconfiguration, completed_group
from asyncdist.errors import (
    GroupAbortedError,
    GroupError,
    NotInitializedError,
    OperationTimeoutError,
    PeerLostError,
    SharedMemoryError,
    UnsupportedError,
)
from asyncdist.groups import BackgroundCall, Group, World
from asyncdist.kernel import Hook, c10d_private, excluded_from_compile
from asyncdist.kernel.engine import work as started
from asyncdist.torch_backend.call_forms import FORMS, Start, Tensors, Together, collective, method_of, single
from asyncdist.torch_backend.callback_order import CallbackOrder, order_of, running
from asyncdist.torch_backend.memory_pool import MemoryPool
from asyncdist.torch_backend.one_sided.window import TorchWindow
from asyncdist.torch_backend.torch_work import DONE, Work, add_monitored_barrier, add_words


class NoGroupYet:
    """Takes the place of the group before the first call of `TorchGroup.reconfigure`. Its operations raise.

    Rank and size are those that torch was given; ``timeout`` is that of the group to come, in seconds.
    """

    error = None
    _aborted = shares_memory = False

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self._rank, self._size = rank, size
        self.timeout = timeout

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def set_timeout(self, timeout: Timeout) -> None:
        self.timeout = seconds(timeout)

    def register_hook(self, **functions: Any) -> Hook:
        hook = Hook(None, None, None, None)
        hook.remove()
        return hook

    def abort(self, reason: str) -> None:
        """Do nothing: no operation is pending."""

    def close(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotInitializedError(
            "the process group was made with enable_reconfigure=True and has no members yet: exchange the handles of "
            "torch.distributed._get_reconfigure_handle(), then call torch.distributed._reconfigure() on every member"
        )


NAME = "asyncdist"

HAS_PYTHON_BACKENDS = hasattr(c10d_private.Backend, "split")
"""Whether Python classes can derive from ``c10d::Backend``: from torch 2.14 on."""

_NO_TIME = timedelta(0)
"""torch passes a negative timeout where the group's own timeout applies."""


class TorchGroup(ProcessBound):
    """The operations, properties and the end of a `Group`, by the names by which torch calls them.

    Ranks in arguments are ranks in the group.

    Attributes:
        group: The group; features that torch has no name for are there.
    """

    _elsewhere = "each process makes its own with init_process_group() and new_group(): send the ranks instead"

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = False
    supports_shrinking = True
    supports_window = True
    supports_abort_hooks = True
    supports_completion_hooks = False

    group: Group

    def _serve(self, group: Group | NoGroupYet, world: World | None, shared: Any = None) -> None:
        """Serve ``group``, and close ``world`` with it; None if another group closes it.

        Args:
            group: The group; or what takes its place until the first call of `reconfigure`.
            world: The world.
            shared: The store that torch has passed for the group; None for a part of a process group.
        """
        self._world = world
        self._shared = shared
        self._coalesced: list[started.Work] | None = None
        self._hooks: dict[Any, tuple[Hook, dict[str, Any]]] = {}
        self._pool = MemoryPool()
        self._reconfiguration: Reconfiguration | None = None
        self._is_revocable = isinstance(group, NoGroupYet)
        self._whole_of: weakref.ref[TorchGroup] = weakref.ref(self)
        self._take(group)

    @property
    def _whole(self) -> TorchGroup:
        """The owner of the world: the process group in which this back end is, or this object."""
        return self._whole_of() or self

    def _parts(self) -> tuple[TorchGroup, ...]:
        """Return the objects that serve one group together."""
        return (self,)

    def _take(self, group: Group | NoGroupYet) -> None:
        """Serve this group from now on, with the hooks of the group before."""
        self.group = cast(Group, group)
        for key, (_, functions) in list(self._hooks.items()):
            self._hooks[key] = group.register_hook(**functions), functions
        self._order = order_of(group) if isinstance(group, Group) else CallbackOrder("no group yet")
        if isinstance(group, Group):
            # Without a free core, the background loop's thread would take the calling thread's core. The calling thread
            # therefore spins for its peers; it usually waits soon anyway, such as DDP after its last bucket.
            group._patient = not has_free_cores(group.endpoint.transport_selector.local_size, torch.get_num_threads())

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.size()

    # -- starting operations -------------------------------------------------------------------

    def _run(self, opts: Any, call: Sequence[Any]) -> Work:
        """Start an operation according to torch's options; a synchronous operation is complete on return.

        Args:
            opts: The options.
            call: What `Form.start` returns.
        """
        start, outputs, *args = call
        timeout = opts.timeout
        limit = None if timeout < _NO_TIME else timeout
        if self._coalesced is not None:
            return self._background(start, outputs, limit, *args)
        order = self._order
        if running:
            start, order = self._in_callback(start)
        if opts.asyncOp:
            return Work(start(*args, timeout=limit), outputs, None, order)
        work = start(*args, background=None) if limit is None else start(*args, background=None, timeout=limit)
        if work is not started.DONE and not work.is_success():
            try:
                work.result()
            except GroupError as error:
                add_words(error)
                raise
        return DONE

    def _in_callback(self, start: Start) -> tuple[Start, CallbackOrder]:
        """Return ``start`` and the order of callbacks: of the group for callbacks, if this thread runs one."""
        outer = running.get(threading.get_ident())
        if outer is None:
            return start, self._order
        group, order = self._order.within(outer, self.group)
        if isinstance(start, Together):
            return Together(method_of(group, start.start), start.calls), order
        return method_of(group, start), order

    def _background(self, start: Start, outputs: Tensors, limit: Timeout, *args: Any, **extra: Any) -> Work:
        work = start(*args, timeout=limit)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return Work(work, outputs, **extra)

    # -- operations that are no collectives of tensors: those are in `call_forms.FORMS` --------------

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has called it; after ``timeout``, rank 0's error names every missing rank.

        ``wait_all_ranks`` concerns gloo's words within the message: they name every missing rank instead of the first.
        """
        try:
            self.group.monitored_barrier(timeout=timeout, background=False).result()
        except GroupError as error:
            add_monitored_barrier(error, self.group.ranks, self.group.rank(), wait_all_ranks)
            raise

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        return self._background(self.group.send, [], None, single(tensors), dst, tag)

    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> Work:
        start = self.group.recv
        return self._background(start, tensors, None, single(tensors), src, tag, source=self.group)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self.recv(tensors, None, tag)

    # -- coalescing ----------------------------------------------------------------------------

    def start_coalescing(self, device: object = None) -> None:
        self._coalesced = []

    def end_coalescing(self, device: object = None) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return Work(started.joined(works), [], None, self._order)

    # torch's Python code calls these names, its C++ code the others.
    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    # -- properties that torch reads -----------------------------------------------------------

    def supports_tensor_alloc(self, device: torch.device | int) -> bool:
        """Return whether `allocate_tensor` returns memory that all ranks share.

        torch's C++ code passes an index and would then call ``allocateTensor`` with options that it cannot convert.
        """
        return isinstance(device, torch.device) and device.type == "cpu" and self.group.shares_memory

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor of shape ``(size,)``, in registered memory unless that is full."""
        if size and self.supports_tensor_alloc(device):
            with contextlib.suppress(SharedMemoryError):
                return self._pool.lend(size * dtype.itemsize).view(dtype)
        return torch.empty(size, dtype=dtype, device=device)

    def new_window(self, tensor: torch.Tensor | None = None) -> TorchWindow:
        """Make a window of the group, by torch's names. Callers of torch in C++ can get none: see `TorchWindow`."""
        return TorchWindow(self.group, tensor)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    name = _get_backend_name = getBackendName

    def _get_sequence_number_for_group(self) -> int:
        return self.group.channel.highest

    def _set_default_timeout(self, timeout: Timeout) -> None:
        self.group.set_timeout(timeout)

    set_timeout = _set_default_timeout

    # -- changing the members ------------------------------------------------------------------

    @property
    def supports_reconfigure(self) -> bool:
        """Whether torch can change the members of this group: only if asyncdist serves all of its devices."""
        return self._whole._shared is not None or not HAS_PYTHON_BACKENDS

    def get_reconfigure_handle(self) -> str:
        """Return a text by which other processes name this one in `reconfigure`.

        It changes with each reconfiguration, and when a peer is lost. Without ASYNCDIST_TOKEN it contains a generated
        token, and must be kept as secret.

        Raises:
            AuthenticationError: Ranks on other hosts would need ASYNCDIST_TOKEN.
        """
        whole = self._whole
        return background_loop().run(whole._meeting().handle(whole._group_or_none(), whole.group.timeout))

    def reconfigure(self, opts: Any) -> Work:
        """Replace the members of this process group by the processes of some handles. All of them call it.

        The members of the group before that are left out get an error of their pending operations. Groups that were made
        of this one are not changed: make them again. After an error the group is as before, and handles must be exchanged
        again.

        Args:
            opts: torch's ``ReconfigureOptions``: ``uuid``, a number that each process uses once; ``handles``, a list in
                order of rank, or a set; ``timeout``, None for that of the group; ``hints``, ignored.

        Raises:
            UnsupportedError: The process group has several back ends.
            UsageError: ``uuid`` was used before, or the handles are not usable; when waiting.
            RendezvousError: A member has ended, or has not called it in time; when waiting.
        """
        if not self.supports_reconfigure:
            raise UnsupportedError(
                "torch reconfigures only process groups with one back end: make the default group with "
                'init_process_group("asyncdist", enable_reconfigure=True)'
            )
        return Work(BackgroundCall(self._whole._reconfigure(opts.uuid, opts.handles, opts.timeout)), [])

    def _meeting(self) -> Reconfiguration:
        if self._reconfiguration is None:
            self._reconfiguration = Reconfiguration(self._shared)
        return self._reconfiguration

    def _group_or_none(self) -> Group | None:
        return self.group if isinstance(self.group, Group) else None

    async def _reconfigure(self, uuid: int, handles: Iterable[str], timeout: Timeout) -> None:
        old, owned, timeout_of_all = self._group_or_none(), self._world, self.group.timeout
        meeting = self._meeting()
        formed = await meeting.form(old, uuid, handles, seconds(timeout, timeout_of_all))
        formed.set_timeout(timeout_of_all)
        is_moved = old is None or formed.world is not old.world
        if is_moved:
            self._world = formed.world
            self._world.timeout = timeout_of_all
        elif old is formed.world.group:
            formed.world.succeed(old, formed)
        for part in self._parts():
            part._take(formed)
        if old is not None:
            meeting.retire(old, formed, owned if is_moved else None)

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None) -> TorchGroup:
        """Make the group of the other ranks, which call it all, over the same connections. ``shrink_group`` calls it.

        Args:
            ranks_to_exclude: The ranks to leave out. They take no part, and may have ended.
            shrink_flags: torch's ``SHRINK_ABORT`` first fails the pending operations of this group on every rank.
            opts_override: torch's options; their timeout replaces that of the group.

        Raises:
            RendezvousError: A rank that is not excluded was lost.
            OperationTimeoutError: A rank that is not excluded did not call it in time.
        """
        whole, old = self._whole, self.group
        if shrink_flags:
            old.abort("shrink_group was called with SHRINK_ABORT")
        timeout = old.timeout if opts_override is None else seconds(opts_override._timeout)
        left = [rank for rank in range(old.size()) if rank not in set(ranks_to_exclude)]
        name = f"{old.name} without ranks {sorted(ranks_to_exclude)}"
        group = old.world.group_of_members([old.member_ids[rank] for rank in left], name, timeout)
        completed = completed_group(group, [str(rank) for rank in left], Deadline.after(timeout))
        background_loop().run(completed)
        if old.world.group is old:
            old.world.succeed(old, group)
        world, whole._world = whole._world, None
        return whole._like(group, world)

    def _like(self, group: Group, world: World | None) -> TorchGroup:
        """Return an object of this kind for another group."""
        raise NotImplementedError

    # -- failures ------------------------------------------------------------------------------

    def _hook(self, key: Any, **functions: Any) -> None:
        """Register hooks, also with the groups that replace this one."""
        self._hooks[key] = self.group.register_hook(**functions), functions

    def register_abort_hook(self, hook_id: int, hook: Callback) -> None:
        """Call ``hook`` when an operation of this group fails on this rank, and before `abort`; it may be called again."""
        self.unregister_abort_hook(hook_id)
        self._hook(hook_id, on_error=lambda _: hook())

    def unregister_abort_hook(self, hook_id: int) -> None:
        if hook_id in self._hooks:
            self._hooks.pop(hook_id)[0].remove()

    def get_error(self) -> Any:
        """Return torch's ``ErrorType`` for the error that made this group fail.

        With ``enable_reconfigure=True`` an abort by this rank is no error: `reconfigure` follows.
        """
        error, kind = self.group.error, c10d_private.ErrorType
        if self._whole._is_revocable and self.group._aborted and isinstance(error, GroupAbortedError):
            return kind.SUCCESS
        if isinstance(error, OperationTimeoutError):
            return kind.TIMEOUT
        if isinstance(error, PeerLostError | GroupAbortedError):
            return kind.REMOTE_ERROR
        return kind.SUCCESS if error is None else kind.COMM_ERROR

    # -- closing -------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Destroy the group, and its world if this group owns one. Idempotent; groups may close in any order."""
        self._order.close()
        self.group.close()
        world, self._world = self._world, None
        meeting, self._reconfiguration = self._reconfiguration, None
        if world is not None:
            world.leave()
            background_loop().run(world.close())
        if meeting is not None:
            background_loop().run(meeting.close())

    def abort(self) -> None:
        """Call the abort hooks, fail every pending operation on every rank, and leave the world with its last group.

        torch never calls `shutdown` on a group that it has aborted. With ``enable_reconfigure=True`` the rank stays in
        the world, for `reconfigure`.
        """
        for _, functions in list(self._hooks.values()):
            if "on_error" in functions:
                functions["on_error"](None)
        reason = "torch.distributed aborted the process group"
        self.group.abort(reason)
        self._order.abort(reason)
        if self._whole._is_revocable:
            return
        if self._world is not None and all(group._aborted for group in self._world.groups):
            self._world.leave()
            background_loop().submit(self._world.close())

    def __repr__(self) -> str:
        return f"<asyncdist {self.group!r}>"


for _name in FORMS:
    setattr(TorchGroup, _name, collective(_name))
excluded_from_compile(TorchGroup)
