"""A group of ranks and the operations among them.

Each operation makes a plan and passes it to `Group._issue`, which numbers it, adds it to the flight recorder and starts
it. Rank arguments are group ranks; the APIs (`asyncdist`, `asyncdist.sync`) translate global ranks.

All ranks issue the operations of one group in the same order, from any thread. Several operations may be in flight.
"""

from __future__ import annotations

import functools
import threading
from asyncio import _get_running_loop
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch

from asyncdist.algorithms.schedule import Schedule
from asyncdist.algorithms.selection import Model, forced_by
from asyncdist.base.deadline import Timeout, seconds
from asyncdist.collectives import data_movement, p2p
from asyncdist.collectives.hierarchical import HierarchicalCollectives
from asyncdist.collectives.operations import CallOptions, CollectiveOps, checked_tag
from asyncdist.engine.endpoint import Endpoint
from asyncdist.engine.operation import Channel, Operation, Plan
from asyncdist.engine.work import Work, completed
from asyncdist.errors import GroupAbortedError, NotInitializedError, SharedMemoryError, UsageError
from asyncdist.memory.buffers import Scratch, changed, in_order, increment_versions
from asyncdist.memory.registered import T, register
from asyncdist.memory.torch_compile import excluded_from_compile
from asyncdist.tracing.recorder import Entry
from asyncdist.transport import registry
from asyncdist.transport.native import CallSignature, PreparedCall, announced, raising
from asyncdist.transport.wire_format import channel_of

if TYPE_CHECKING:
    from asyncdist.devices.group import DeviceGroup

_KEPT_KINDS = 512
_Tensor = torch.Tensor
# Two threads may issue the first operations on a device at the same time.
_device_group_lock = threading.Lock()


class _CachedCall(NamedTuple):
    """A prepared call for arguments of known types and shapes.

    Attributes:
        start: Makes the schedule from the number of the call and its tensors.
        fingerprint: Fingerprint of the call.
        nbytes: Number of bytes that the call moves.
        writes: Whether the call writes its first argument on this rank.
    """

    start: PreparedCall
    fingerprint: int
    nbytes: int
    writes: bool


def _cache_key(key: tuple[Hashable, ...], tensors: Sequence[Any]) -> tuple[Hashable, ...] | None:
    """Return ``key`` extended by the dtypes and shapes of the tensors; None if calls with them cannot be cached."""
    for tensor in tensors:
        looked_at = type(tensor)
        if looked_at is _Tensor:
            if not in_order(tensor):
                return None
            key += (tensor.dtype, tensor.shape)
        elif looked_at is list:
            within = _cache_key((), tensor)
            if within is None:
                return None
            key += (within,)
        elif tensor is None:
            key += (None,)
        else:
            return None
    return key


@excluded_from_compile
class Group(CollectiveOps):
    """An ordered set of ranks of a world, a process group in the terms of torch.distributed.

    Make groups with `asyncdist.new_group` and similar functions, on every rank of the world in the same order. Methods
    start an operation and return its `Work`. Each method takes `CallOptions` as keywords.

    Attributes:
        name: Name in error messages and traces.
        ranks: Global ranks of the members, in group order.
        timeout: Default limit of an operation in seconds.
    """

    def __init__(
        self, mesh: Endpoint, ranks: Sequence[int], name: str, timeout: float, *, nonce: int = 0, world: Any = None
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.timeout = timeout
        self.mesh = mesh
        self._rank = self.ranks.index(mesh.rank)
        number = channel_of(mesh.world_id, name, *self.ranks, nonce)
        self._channel = Channel(number, name, self.ranks, mesh.rank)
        self._messages = Channel(channel_of(number, "point to point"), name, self.ranks, mesh.rank, point_to_point=True)
        self._channel.sibling, self._messages.sibling = self._messages, self._channel
        self._sequence = self._channel.numbers
        forced = forced_by(mesh.config)
        model = Model(segment_nbytes=mesh.config.segment_nbytes)
        try:
            self._native = mesh.transport_selector.native(self._channel) if len(self.ranks) > 1 else None
            lies = mesh.transport_selector.islands(self._channel) if self._native is None else None
        except SharedMemoryError as cause:
            mesh.refuse(self._channel, cause)
            raise
        self._islands = None if lies is None else HierarchicalCollectives(*lies, model, Scratch())
        self._who = data_movement.GroupContext(
            self._rank, len(self.ranks), mesh.config, model, forced, Scratch(), max(2, mesh.config.lanes),
            native=self._native, islands=self._islands,
        )  # fmt: skip
        self._record = mesh.recorder.add
        self._known: dict[Hashable, _CachedCall] = {}
        self._closed = False
        self._devices: dict[torch.device, DeviceGroup] = {}
        self.patient = False
        """Whether a background call first spins for its peers, if the calling thread runs no event loop."""
        self.aborted = False
        """Whether this rank has called `abort`. `error` may be set a moment later."""
        self.world = world
        mesh.progress.submit(self._open)

    def _open(self) -> None:
        inside = self._native or self._islands
        if inside is not None:
            inside.open()
        self.mesh.open(self._channel)
        self.mesh.open(self._messages)

    # -- identity -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = "destroyed" if self._closed else f"failed: {self._channel.error}" if self._channel.error else "open"
        return f"<Group {self.name!r} rank {self._rank} of {len(self.ranks)}, {state}>"

    def group_rank(self, global_rank: int) -> int:
        """Return the group rank of a global rank; raise UsageError if the global rank is not in this group."""
        try:
            return self.ranks.index(global_rank)
        except ValueError:
            raise UsageError(
                f"global rank {global_rank} is not in group {self.name!r}, which has {self.ranks}"
            ) from None

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

    # -- tensors on a device -------------------------------------------------------------------

    def _at(self, value: Any) -> CollectiveOps:
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        return self.on(value.device) if isinstance(value, torch.Tensor) and value.is_cuda else self

    def on(self, device: torch.device) -> DeviceGroup:
        """Return the group of the same ranks for tensors on ``device``; its first operation connects the devices."""
        found = self._devices.get(device)
        if found is None:
            with _device_group_lock:
                found = self._devices.get(device) or self._make_device_group(device)
        return found

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default timeout of later operations on this rank, in seconds or as a timedelta."""
        self.timeout = seconds(timeout)
        for carried in self._devices.values():
            carried.timeout = self.timeout

    def _make_device_group(self, device: torch.device) -> DeviceGroup:
        from asyncdist.devices.group import DeviceGroup

        nonce = self._channel.number + len(self._devices)
        host = Group(self.mesh, self.ranks, f"{self.name} (its {device.type} tensors)", self.timeout, nonce=nonce)
        kinds = registry.device_backends(self.mesh.backend, device.type)
        made = self._devices[device] = DeviceGroup(host, device, kinds, owner=self)
        return made

    def pass_on(self, part: Group | None, number: int) -> None:
        """Split the device communicators of this group for its subgroups.

        All members call it, in the same order as their other operations.

        Args:
            part: The subgroup of this rank, or None if this rank is in no subgroup.
            number: The index of that subgroup, or -1.
        """
        for device, carried in list(self._devices.items()):
            carried.split(None if part is None else part.on(device), number)

    def sibling(self, purpose: str) -> Group:
        """Return another group of the same ranks for control traffic; ranks with the same ``purpose`` share it."""
        return Group(self.mesh, self.ranks, f"{self.name} ({purpose})", self.timeout, nonce=self._channel.number)

    # -- issuing ------------------------------------------------------------------------------

    def _issue(self, name: str, plan: Plan, how: CallOptions) -> Work:
        return self._start(self._channel, name, None, plan, **how)

    def _message(self, name: str, make: Callable[..., Plan], args: tuple[Any, ...], tag: int, how: CallOptions) -> Work:
        return self._start(self._messages, name, checked_tag(tag), make(self._who, *args), **how)

    def _send(self, name: str, tensor: Any, peer: int, tag: int, how: CallOptions) -> Work:
        return self._message(name, p2p.send, (tensor, peer), tag, how)

    def _receive(self, name: str, tensor: Any, peer: int | None, tag: int, how: CallOptions) -> Work:
        return self._message(name, p2p.receive, (tensor, peer, self.ranks), tag, how)

    def _start(
        self,
        channel: Channel,
        name: str,
        number: int | None,
        plan: Plan,
        background: bool = True,
        timeout: Timeout = None,
    ) -> Work:
        limit = self.timeout
        if timeout is not None or self._closed or (not background and _get_running_loop() is not None):
            limit = self._limit(name, background, timeout)
        # The number is taken last: a call that one rank refuses must not shift the numbers of that rank.
        if number is None:
            number = channel.last_number = next(channel.numbers)
        entry = Entry(self.name, name, number, plan.fingerprint, plan.nbytes)
        entry.peer = plan.peer
        self._record(entry)
        if self._native is None or channel.point_to_point:
            return self._operate(channel, plan, plan.parts, entry, background, limit)
        if plan.native is None:
            announcement = self._native.announce(number, plan.fingerprint)
            return self._operate(channel, plan, announced(announcement, plan.parts), entry, background, limit)
        return self._attempt(plan, plan.native(number, plan.fingerprint), entry, background, limit)

    def _limit(self, name: str, background: bool, timeout: Timeout) -> float:
        """Return the timeout of a call in seconds; raise if the group is destroyed or the call may not block here."""
        if self._closed:
            raise NotInitializedError("the group was destroyed: make a new one")
        if not background:
            self.mesh.progress.refuse_loop_thread(name)
        return self.timeout if timeout is None else seconds(timeout)

    def _attempt(self, plan: Plan, schedule: Schedule, entry: Entry, background: bool, limit: float) -> Work:
        """Run a native schedule in the calling thread if the peers are ready, else issue an operation for it."""
        channel = self._channel
        try:
            wait = not background or (self.patient and _get_running_loop() is None)
            if self.mesh.progress.attempt(schedule, channel, wait=wait):
                channel.count(entry.seq)
                value = plan.finish() if plan.finish is not None else None
                entry.finish()
                return completed(value)
        except Exception as cause:
            # An operation that raises the error makes the group fail and notifies the peers.
            schedule = raising(cause)
        return self._operate(channel, plan, (schedule,), entry, background, limit)

    def _operate(
        self, channel: Channel, plan: Plan, parts: Iterable[Schedule], entry: Entry, background: bool, limit: float
    ) -> Work:
        work = Work(self.mesh.progress)
        operation = Operation(channel, entry.op, entry.seq, plan, parts, work, limit, entry)
        self.mesh.issue(operation, background=background)
        return work

    # -- cached calls ---------------------------------------------------------------------------

    def _call(
        self,
        name: str,
        first: Any,
        make: Callable[..., Plan],
        tensors: tuple[Any, ...],
        how: CallOptions,
        *more: Hashable,
    ) -> Work:
        if self._native is None:
            return super()._call(name, first, make, tensors, how, *more)
        key = _cache_key((name, more), tensors)
        try:
            known = None if key is None else self._known.get(key)
        except TypeError:
            # An argument is not hashable. The plan refuses it with a proper message.
            key = known = None
        if known is None:
            make = make if key is None else functools.partial(self._plan_and_cache, key, make)
            return super()._call(name, first, make, tensors, how, *more)
        # The call differs from the cached one only in its memory.
        start, fingerprint, nbytes, writes = known
        background, timeout = how.get("background", True), how.get("timeout")
        limit = self.timeout
        if timeout is not None or self._closed or (not background and _get_running_loop() is not None):
            limit = self._named(self._limit, name, background, timeout)
        number = self._channel.last_number = next(self._sequence)
        entry = Entry(self.name, name, number, fingerprint, nbytes)
        self._record(entry)
        schedule = start(number, *tensors)
        value = tensors[0] if tensors else None
        written: Any = () if not writes else value if type(value) is list else (value,)
        try:
            wait = not background or (self.patient and _get_running_loop() is None)
            if self.mesh.progress.attempt(schedule, self._channel, wait=wait):
                self._channel.count(number)
                increment_versions(written)
                entry.finish()
                return completed(value)
        except Exception as cause:
            schedule = raising(cause)
        plan = Plan(fingerprint=fingerprint, finish=functools.partial(changed, written, value), nbytes=nbytes)
        return self._operate(self._channel, plan, (schedule,), entry, background, limit)

    def _plan_and_cache(self, key: Hashable, make: Callable[..., Plan], *args: Any) -> Plan:
        """Plan a call, and cache what later calls with the same key have in common."""
        plan = make(*args)
        # Complex tensors may be conjugate views, which the key does not distinguish.
        if plan.native and plan.kind is not None and not plan.kind.dtype.is_complex:
            self._cache(key, plan, plan.kind)
        return plan

    def _cache(self, key: Hashable, plan: Plan, kind: CallSignature) -> None:
        quick = None if self._native is None else self._native.quick(kind)
        if quick is not None:
            if len(self._known) >= _KEPT_KINDS:
                self._known.clear()
            self._known[key] = _CachedCall(quick, plan.fingerprint, plan.nbytes, kind.writes(self._rank))

    # -- monitoring ------------------------------------------------------------------------------

    def monitored_barrier(self, **how: Unpack[CallOptions]) -> Work:
        """Complete when every rank has called it. On a timeout, the error of rank 0 names every missing rank.

        The other ranks wait twice as long, so that they receive the error of rank 0.
        """
        name = "monitored_barrier"
        if self._rank != 0:
            how["timeout"] = 2 * self._named(self._limit, name, True, how.get("timeout"))
        return self._named(self._begin, name, None, data_movement.monitored_barrier, (), how)

    # -- objects -------------------------------------------------------------------------------
    # With ``weights_only``, given on every rank, objects are restricted to what torch.load(weights_only=True) reads.
    # They are then never pickled, even if ASYNCDIST_ALLOW_PICKLE allows pickles.

    def all_gather_object(
        self, output: list[Any], value: Any, weights_only: bool = False, **how: Unpack[CallOptions]
    ) -> Work:
        """Gather every rank's object into every rank's list."""
        args = output, value, weights_only
        return self._named(self._begin, "all_gather_object", None, p2p.all_gather_object, args, how)

    def gather_object(
        self, value: Any, output: list[Any] | None, dst: int, weights_only: bool = False, **how: Unpack[CallOptions]
    ) -> Work:
        """Gather every rank's object into the list of rank ``dst``; ``output`` is None on the other ranks."""
        args = value, output, dst, weights_only
        return self._named(self._begin, "gather_object", None, p2p.gather_object, args, how)

    def scatter_object_list(
        self,
        output: list[Any],
        values: Sequence[Any] | None,
        src: int,
        weights_only: bool = False,
        **how: Unpack[CallOptions],
    ) -> Work:
        """Put the ``i``-th object of rank ``src``'s list into rank ``i``'s ``output[0]``."""
        args = output, values, src, weights_only
        return self._named(self._begin, "scatter_object_list", None, p2p.scatter_objects, args, how)

    def broadcast_object_list(
        self, values: list[Any], src: int, weights_only: bool = False, **how: Unpack[CallOptions]
    ) -> Work:
        """Replace every rank's list by the list of rank ``src``."""
        args = values, src, weights_only
        return self._named(self._begin, "broadcast_object_list", None, p2p.broadcast_objects, args, how)

    def send_object_list(
        self, values: Sequence[Any], dst: int, tag: int = 0, weights_only: bool = False, **how: Unpack[CallOptions]
    ) -> Work:
        """Send a list of objects to rank ``dst``."""
        args = values, dst, weights_only
        return self._named(self._message, "send_object_list", p2p.send_objects, args, tag, how)

    def recv_object_list(
        self,
        values: list[Any],
        src: int | None = None,
        tag: int = 0,
        weights_only: bool = False,
        **how: Unpack[CallOptions],
    ) -> Work:
        """Receive a list of objects of the same length; the result is the global rank of the sender."""
        args = values, src, self.ranks, weights_only
        return self._named(self._message, "recv_object_list", p2p.receive_objects, args, tag, how)

    # -- termination ---------------------------------------------------------------------------

    @property
    def error(self) -> Exception | None:
        """The error that made this group fail; None while the group is usable."""
        return self._channel.error

    def abort(self, reason: str = "abort() was called") -> None:
        """Fail all pending operations of this group on every rank. The group then refuses further operations."""

        def fail() -> None:
            error = GroupAbortedError(f"rank {self.mesh.rank} aborted: {reason}", peer=self.mesh.rank)
            self.mesh.fail(self._channel, error)

        self.aborted = True
        self.mesh.progress.submit(fail)
        self.mesh.progress.ensure_driven()

    def close(self) -> None:
        """Destroy this group on this rank. Pending operations fail. Idempotent; does not notify the other ranks."""
        if not self._closed:
            self._closed = True
            for device in self._devices.values():
                device.close()
            self.mesh.progress.submit(lambda: self.mesh.end(self._channel))
            self.mesh.progress.submit(lambda: self.mesh.end(self._messages))
            inside = self._native or self._islands
            if inside is not None:
                self.mesh.progress.submit(inside.close)
            if self.world is not None:
                self.world.forget(self)
