"""A group of ranks and the operations among them.

Each operation is numbered, added to the flight recorder, and started. A native collective, or a small one over links, first
runs in the calling thread (`Progress.attempt`); anything else becomes an `Operation` at once. Rank arguments are group
ranks; the APIs (`asyncdist`, `asyncdist.sync`) translate global ranks.

All ranks issue the operations of one group in the same order, from any thread. Several operations may be in flight.
"""

from __future__ import annotations

import functools
import threading
from asyncio import _get_running_loop
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import torch

from asyncdist.base import lifecycle
from asyncdist.base.deadline import Timeout, seconds
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.errors import GroupAbortedError, NotInitializedError, SharedMemoryError, UsageError
from asyncdist.groups.members.member_ops import MemberOps
from asyncdist.groups.persistent import PersistentOps
from asyncdist.groups.subgroups import SubgroupOps
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.algorithms.selection import forced_by
from asyncdist.kernel.collectives import data_movement, p2p
from asyncdist.kernel.collectives.arguments import list_of
from asyncdist.kernel.collectives.call_plan import CallPlan, Result, device_of, finish_call
from asyncdist.kernel.collectives.collective_ops import CallOptions, CollectiveOps, checked_tag
from asyncdist.kernel.collectives.group_context import GroupContext
from asyncdist.kernel.collectives.hierarchical import HierarchicalCollectives
from asyncdist.kernel.collectives.object_ops import ObjectOps
from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.kernel.engine.operation import Channel, Plan, PlanOf
from asyncdist.kernel.engine.work import DONE, Work, completed
from asyncdist.kernel.memory.buffers import Scratch
from asyncdist.kernel.memory.registered import T, register
from asyncdist.kernel.memory.torch_compile import excluded_from_compile
from asyncdist.kernel.memory.user_modes import leave_user_modes
from asyncdist.kernel.torch_private import increment_version, is_profiler_enabled
from asyncdist.kernel.tracing.hooks import GroupHooks, Hook, HookFunction
from asyncdist.kernel.tracing.recorder import Entry
from asyncdist.kernel.transport import registry
from asyncdist.kernel.transport.native import preceded, raising
from asyncdist.kernel.transport.wire_format import channel_of, generation_of, in_generation

if TYPE_CHECKING:
    from asyncdist.groups.windows import GroupWindows, Window
    from asyncdist.kernel.devices.group import DeviceGroup

# Two threads may issue the first operations on a device at the same time.
_first_use_lock = threading.Lock()
lifecycle.renew_in_children(globals(), "_first_use_lock", threading.Lock)


class _PeerMessage(Protocol):
    """A send or receive that has not started: a `P2POp`."""

    @property
    def owner(self) -> Group: ...

    def start(self) -> Work[Any]: ...


@excluded_from_compile
class Group(ProcessBound, CollectiveOps, PersistentOps, ObjectOps, MemberOps, SubgroupOps):
    """An ordered set of ranks of a world, a process group in the terms of torch.distributed.

    Make groups with `asyncdist.new_group` and similar functions, or with the methods of these names, on every member in
    the same order. Other methods start an operation and return its `Work`. Each of them takes `CallOptions` as keywords.

    Attributes:
        name: Name in error messages and traces.
        ranks: Global ranks of the members, in group order: their ranks in the default group when the group was made.
        member_ids: The ids of the members, in group order: their ranks when they met. Errors name members by their ids. The
            ids stay the same in all successors of the group; see `regroup`.
        generation: How often the members have regrouped; in a job (`join`) the number of its generation.
        timeout: Default limit of an operation in seconds.
        hooks: The hooks of this group; see `register_hook`.
    """

    _elsewhere = "each process makes its own with init_process_group() and new_group(): send the ranks instead"

    _device = torch.device("cpu")
    _INTERNAL = frozenset({"channel", "context", "endpoint", "world"})
    """The attributes for the libraries, which completion does not show."""

    def __init__(
        self,
        endpoint: Endpoint,
        ranks: Sequence[int],
        name: str,
        timeout: float,
        *,
        member_ids: Sequence[int] | None = None,
        nonce: object = 0,
        world: Any = None,
        lineage: tuple[str, int, int] | None = None,
        generation: int = 0,
    ) -> None:
        CollectiveOps.__init__(self)
        self.name = name
        self.ranks = tuple(ranks)
        self.member_ids = self.ranks if member_ids is None else tuple(member_ids)
        self.timeout = timeout
        self.endpoint = endpoint
        self.generation = generation
        self._rank = self.member_ids.index(endpoint.rank)
        names = endpoint.world_id, name, *self.member_ids, nonce
        # The name of the first generation, and the numbers of its channels.
        self._lineage = lineage or (name, channel_of(*names), channel_of(*names, "point to point"))
        number, messages = (in_generation(each, generation) for each in self._lineage[1:])
        self.channel = Channel(number, name, self.member_ids, endpoint.rank)
        self._messages = Channel(messages, name, self.member_ids, endpoint.rank, point_to_point=True)
        self.channel.sibling, self._messages.sibling = self._messages, self.channel
        forced = forced_by(endpoint.config)
        model = endpoint.model
        try:
            self._native = endpoint.transport_selector.native(self.channel) if len(self.ranks) > 1 else None
            layout = endpoint.transport_selector.node_layout(self.channel) if len(self.ranks) > 1 else None
        except SharedMemoryError as cause:
            endpoint.refuse(self.channel, cause)
            raise
        hierarchical = None if layout is None else HierarchicalCollectives(*layout, model, Scratch())
        self.context = GroupContext(
            self._rank, len(self.ranks), endpoint.config, model, forced, Scratch(), max(2, endpoint.config.lanes),
            native=self._native, hierarchical=hierarchical,
        )  # fmt: skip
        self._record = endpoint.recorder.add
        self.hooks = GroupHooks(self.member_ids, endpoint.rank, self._record, everywhere=world is not None)
        self._closed = False
        self._devices: dict[torch.device, DeviceGroup] = {}
        self._windows: GroupWindows | None = None
        self._patient = False
        """Whether a background call first spins for its peers, if the calling thread runs no event loop."""
        self._aborted = False
        """Whether this rank has called `abort`. `error` may be set a moment later."""
        self.world = world
        MemberOps.__init__(self, endpoint, self.member_ids)
        # Not `submit`, which may run callbacks: some callers hold a lock.
        endpoint.progress.post(self._open)

    def _open(self) -> None:
        for collectives in (self._native, self.context.hierarchical):
            if collectives is not None:
                collectives.open()
        self.endpoint.open(self.channel)
        self.endpoint.open(self._messages)

    # -- identity -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = "destroyed" if self._closed else f"failed: {self.channel.error}" if self.channel.error else "open"
        return f"<Group {self.name!r} rank {self._rank} of {len(self.ranks)}, {state}>"

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in self._INTERNAL]

    # -- hooks ----------------------------------------------------------------------------------

    def register_hook(
        self,
        on_start: HookFunction | None = None,
        on_end: HookFunction | None = None,
        on_error: HookFunction | None = None,
    ) -> Hook:
        """Call functions at the start and at the end of every operation of this group on this rank.

        Each function gets an `OperationRecord`. Every operation that starts after this call has one start, and one end
        or error; operations on CUDA devices are included. A function must be quick and must not start or wait for
        operations of the group. The first exception of a hook is logged, and none breaks the operation. Without hooks an
        operation does no extra work. Any thread may call this method.

        Args:
            on_start: Called before an operation starts, in the calling thread.
            on_end: Called when an operation has succeeded, by the thread that has completed it. A thread that waits for the
                operation may go on a moment earlier.
            on_error: Called instead of ``on_end`` when an operation has failed.

        Returns:
            The hook, to be removed with ``remove()``, or at the end of a ``with`` statement.

        Example:
            >>> hook = group.register_hook(on_end=lambda record: print(record.op, record.nbytes, record.duration))
        """
        return Hook(on_start, on_end, on_error, self.hooks)

    # -- registered memory --------------------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        """Whether all members can read one another's registered memory; see `register`."""
        return self._native is not None

    def register(self, target: T) -> T:
        """Move a tensor, or the parameters and buffers of a module, into shared memory in place.

        Values, strides, shared storages and tensor objects (such as those in an optimizer) are kept. Collectives on
        registered tensors then copy only their results. If the members share no memory, nothing moves. Tensors on CUDA
        devices never move.

        Args:
            target: A dense tensor, or a module.

        Returns:
            ``target``.

        Raises:
            UnsupportedError: A tensor is not dense. Nothing has moved.
            SharedMemoryError: Not enough shared memory is left. Nothing has moved.
        """
        return register(target, wanted=self.shares_memory)

    def new_window(self, tensor: torch.Tensor | None = None, *, timeout: Timeout = None) -> Work[Window]:
        """Make a window: a tensor of each member, into which the others put data without its help.

        All members call it in the same order; all pass a tensor, or none does.

        Args:
            tensor: A contiguous CPU tensor: `Window.tensor_register`. It is fast in memory of `asyncdist.empty` and
                `register`. None makes a window without one.
            timeout: Seconds, or a timedelta; None takes the group's.

        Raises:
            UsageError: A member has passed no tensor that can be registered; on all members, when waiting.

        Example:
            >>> window = await group.new_window(asyncdist.empty(1000).zero_())
            >>> await window.put(part, dst_rank=1, target_offset_nelems=500)
        """
        self._refuse_destroyed()
        # Programs without windows do not import them.
        from asyncdist.groups.windows import GroupWindows

        if self._windows is None:
            with _first_use_lock:
                self._windows = self._windows or GroupWindows(self)
        window = self._windows.new()
        return completed(window) if tensor is None else window.tensor_register(tensor, timeout=timeout)

    # -- tensors on a device -------------------------------------------------------------------

    def _group_for(self, value: Any) -> CollectiveOps:
        device = device_of(value)
        return self if device is None or device.type != "cuda" else self._on(device)

    def _on(self, device: torch.device) -> DeviceGroup:
        """Return the group of the same ranks for tensors on ``device``; its first operation connects the devices."""
        found = self._devices.get(device)
        if found is None:
            with _first_use_lock:
                found = self._devices.get(device) or self._make_device_group(device)
        return found

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default timeout of later operations on this rank, in seconds or as a timedelta."""
        self.timeout = seconds(timeout)
        for carried in list(self._devices.values()):
            carried.timeout = self.timeout

    def _make_device_group(self, device: torch.device) -> DeviceGroup:
        from asyncdist.kernel.devices.group import DeviceGroup

        nonce = self.channel.number + len(self._devices)
        host = self._companion(f"its {device.type} tensors", nonce)
        kinds = registry.device_backends(self.endpoint.backend, device.type)
        made = self._devices[device] = DeviceGroup(host, device, kinds, owner=self)
        return made

    def _subgroup(self, ranks: Sequence[int], timeout: Timeout, name: str | None) -> Group | None:
        assert self.world is not None, "a companion has no subgroups"
        self.world.refuse_left()
        try:
            self._refuse_destroyed()
        except UsageError as error:
            self._refused("new_group", error)
            raise
        made: Group | None = self.world.subgroup(self, ranks, timeout, name)
        return made

    def _pass_on(self, part: Group | None, number: int) -> None:
        for device, carried in list(self._devices.items()):
            carried.split(None if part is None else part._on(device), number)

    def _sibling(self, purpose: str) -> Group:
        """Return another group of the same ranks for control traffic; ranks with the same ``purpose`` share it."""
        return self._companion(purpose, self.channel.number)

    def _companion(self, purpose: str, nonce: int) -> Group:
        name = f"{self.name} ({purpose})"
        return Group(self.endpoint, self.ranks, name, self.timeout, member_ids=self.member_ids, nonce=nonce)

    # -- starting -----------------------------------------------------------------------------

    def _run(
        self, name: str, plan: CallPlan, tensors: Sequence[Any], result: Result, options: CallOptions, work: bool = True
    ) -> Work:
        endpoint, channel = self.endpoint, self.channel
        background, timeout, limit = options.get("background", True), options.get("timeout"), self.timeout
        value, outputs, writes = result
        if timeout is not None or self._closed or (not background and _get_running_loop() is not None):
            limit = self._limit(name, background, timeout)
        # The number is taken last: a call that one rank refuses must not shift the numbers of that rank.
        number = next(channel.numbers)
        wait = not background or (self._patient and _get_running_loop() is None)
        issued, call, entry, observed = perf_counter(), plan.call, None, None
        if self.hooks.hooks or is_profiler_enabled():
            entry = self.hooks.new_entry(self.name, name, number, plan.fingerprint, plan.nbytes)
            observed = self.hooks.record(entry)
        parts: Iterable[Schedule] = ()
        try:
            if call is None or observed is not None:
                call, parts = plan.prepare(tensors, number, channel, endpoint.direct_calls, observed, wait)
            if call is not None:
                rest = endpoint.progress.attempt(call, number, tensors, channel, wait, plan.polls, not background)
                if rest is None:
                    if outputs:
                        finish_call(value, outputs, writes)
                    # As `finish_call` does.
                    elif writes:
                        increment_version(value if type(value) is list else (value,))
                    if entry is None:
                        self._record((self.name, name, number, plan.fingerprint, plan.nbytes, issued, perf_counter()))
                    elif entry.finish():
                        entry.run_hooks()
                    return completed(value, endpoint.progress) if work and background is not None else DONE
                parts = (rest,)
        # An operation that raises the error makes the group fail and notifies the peers.
        except Exception as cause:
            parts = (raising(cause),)
        # The interrupted caller gets no work, and the engine has failed the group.
        except BaseException as interruption:
            entry = entry or self._entry(name, number, plan, issued)
            if entry.finish(interruption):
                entry.run_hooks()
            raise
        entry = entry or self._entry(name, number, plan, issued)
        finish = functools.partial(finish_call, *result)
        started = Plan(parts, plan.fingerprint, plan.fold, finish, plan.window, plan.nbytes)
        return endpoint.issue(channel, started, entry, limit, background=background)

    def _entry(self, name: str, number: int, plan: CallPlan, issued: float) -> Entry:
        """Record a call without hooks that is not complete yet."""
        entry = Entry(self.name, name, number, plan.fingerprint, plan.nbytes, issued)
        self._record(entry)
        return entry

    def _limit(self, name: str, background: bool | None, timeout: Timeout) -> float:
        """Return the timeout of a call in seconds; raise if the group is destroyed or the call may not block here."""
        self._refuse_destroyed()
        if not background:
            self.endpoint.progress.refuse_loop_thread(name)
        return self.timeout if timeout is None else seconds(timeout)

    def _refuse_destroyed(self) -> None:
        if self._closed:
            raise NotInitializedError("the group was destroyed: make a new one")

    def _start_plan(self, name: str, plan: Plan, tag: int | None, background: bool | None, limit: float) -> Work:
        """Start a planned collective, or a message if there is a ``tag``."""
        channel = self.channel if tag is None else self._messages
        number = next(channel.numbers) if tag is None else tag
        entry = self.hooks.new_entry(self.name, name, number, plan.fingerprint, plan.nbytes)
        entry.peer = plan.peer
        observed = self.hooks.record(entry)
        if tag is None and self._native is not None:
            plan.parts = preceded(self._native.publish(entry.seq, plan.fingerprint), plan.parts)
        if observed is not None:
            plan.parts = observed.watch_all(plan.parts)
        return self.endpoint.issue(channel, plan, entry, limit, background=background)

    def _run_plan(
        self, name: str, make: PlanOf, arguments: tuple[Any, ...], options: CallOptions, tag: int | None = None
    ) -> Work:
        """Start the plan ``make(context, *arguments)``: a collective, or a message if there is a ``tag``."""
        left = leave_user_modes()
        try:
            plan = make(self.context, *arguments)
            background = options.get("background", True)
            limit = self._limit(name, background, options.get("timeout"))
            return self._start_plan(name, plan, None if tag is None else checked_tag(tag), background, limit)
        except UsageError as error:
            self._refused(name, error)
            raise
        finally:
            if left is not None:
                left.close()

    def _send(self, tensor: Any, peer: int, tag: int, options: CallOptions) -> Work:
        return self._run_plan("send", p2p.send, (tensor, peer), options, tag)

    def _receive(self, tensor: Any, peer: int | None, tag: int, options: CallOptions) -> Work:
        return self._run_plan("recv", self._receiving(p2p.receive), (tensor, peer, self.member_ids), options, tag)

    def _receiving(self, make: PlanOf) -> PlanOf:
        """Let the plan of a receive return the global rank of the sender instead of its id, if these differ."""
        if self.ranks == self.member_ids:
            return make

        def planned(*arguments: Any) -> Plan:
            plan = make(*arguments)
            finish = plan.finish
            assert finish is not None
            plan.finish = lambda: self.ranks[self.member_ids.index(finish())]
            return plan

        return planned

    def _start_message(self, name: str, tag: int, plan: Plan, *, timeout: float) -> Work:
        """Start a planned message in the background, for the device group that this group serves."""
        return self._start_plan(name, plan, tag, True, self._limit(name, True, timeout))

    def batch_isend_irecv(self, p2p_op_list: Sequence[_PeerMessage]) -> list[Work[Any]]:
        """Start several sends and receives of this group, and return their works in the same order.

        Args:
            p2p_op_list: The sends and receives, one at least: each a `P2POp`.

        Raises:
            UsageError: The list is empty, holds something else, or a `P2POp` of another group.

        Example:
            >>> works = group.batch_isend_irecv([P2POp(group.isend, sent, 1), P2POp(group.irecv, received, 1)])
        """
        messages = list_of("p2p_op_list", p2p_op_list, "P2POp")
        if not messages or not all(getattr(message, "owner", None) is self for message in messages):
            raise UsageError(
                f"batch_isend_irecv of group {self.name!r} takes a list of P2POp of this group, one at least: make them "
                "with P2POp(group.isend, tensor, peer) and P2POp(group.irecv, tensor, peer)"
            )
        return [message.start() for message in messages]

    # -- monitoring ------------------------------------------------------------------------------

    def monitored_barrier(self, **options: Unpack[CallOptions]) -> Work[None]:
        """Complete when every rank has called the barrier. On a timeout, the error of rank 0 names every missing rank.

        The other ranks wait twice as long, so that they receive the error of rank 0.
        """
        name = "monitored_barrier"
        if self._rank != 0:
            timeout = options.get("timeout")
            options["timeout"] = 2 * (self.timeout if timeout is None else timeout)
        return self._run_plan(name, data_movement.monitored_barrier, (), options)

    def _successor(self, member_ids: list[int]) -> Group:
        """Make the group of the members that go on, and destroy this one."""
        # The numbers on the wire count agreements: members of a job may not know yet which number the store has given.
        world, regrouped, going = self.world, generation_of(self.channel.prefix) + 1, set(member_ids)
        is_default = world is not None and world.group is self
        ranks = [rank for rank, member in zip(self.ranks, self.member_ids, strict=True) if member in going]
        successor = type(self)(
            self.endpoint, range(len(member_ids)) if is_default else ranks, f"{self._lineage[0]} (regrouped {regrouped})",
            self.timeout, member_ids=member_ids, world=world, lineage=self._lineage, generation=regrouped,
        )  # fmt: skip
        successor.generation = self.generation + 1
        successor._patient = self._patient
        if world is not None:
            world.succeed(self, successor)
        self.close()
        return successor

    # -- termination ---------------------------------------------------------------------------

    @property
    def error(self) -> Exception | None:
        """The error that made this group fail; None while the group is usable."""
        return self.channel.error

    def abort(self, reason: str = "abort() was called") -> None:
        """Fail all pending operations of this group on every rank. The group then refuses further operations."""

        def fail() -> None:
            error = GroupAbortedError(f"rank {self.endpoint.rank} aborted: {reason}", peer=self.endpoint.rank)
            self.endpoint.fail(self.channel, error)

        self._aborted = True
        if self._windows is not None:
            self._windows.abort(reason)
        self.endpoint.progress.submit(fail)
        self.endpoint.progress.ensure_driven()

    def close(self) -> None:
        """Destroy this group on this rank. Pending operations fail. Idempotent; does not notify the other ranks."""
        if not self._closed:
            self._closed = True
            for device in list(self._devices.values()):
                device.close()
            if self._windows is not None:
                self._windows.close()
            endpoint, submit = self.endpoint, self.endpoint.progress.submit
            reason = f"rank {endpoint.rank} has destroyed the group"
            submit(lambda: endpoint.agreements.leave(self.channel, reason, entirely=True))
            submit(self._watches.end)
            submit(lambda: endpoint.end(self.channel))
            submit(lambda: endpoint.end(self._messages))
            for collectives in (self._native, self.context.hierarchical):
                if collectives is not None:
                    submit(collectives.close)
            if self.world is not None:
                self.world.forget(self)
