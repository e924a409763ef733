"""A group of ranks and the operations among them.

Every operation is one line: a plan, handed to `Group._issue`, which numbers it, writes it into the flight recorder and
starts it. Ranks in arguments are ranks in the group; the faces (`asyncdist`, `asyncdist.sync`) translate global ones.

Ranks issue the operations of one group in the same order, from any thread; several may be in flight.
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
_coming = threading.Lock()  # to a device: two threads may come at once, with the first tensors there


class _CachedCall(NamedTuple):
    """How calls of one kind go on from here, and whether they write their first argument on this rank."""

    start: PreparedCall
    fingerprint: int
    nbytes: int
    writes: bool


def _looks(key: tuple[Hashable, ...], tensors: Sequence[Any]) -> tuple[Hashable, ...] | None:
    """Return a key with what plans see of tensors, and of lists of them, behind it; None if they must look closer."""
    for tensor in tensors:
        looked_at = type(tensor)
        if looked_at is _Tensor:
            if not in_order(tensor):
                return None
            key += (tensor.dtype, tensor.shape)
        elif looked_at is list:
            within = _looks((), tensor)
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
    """Some ranks of a world, in an order of their own.

    Made by `asyncdist.new_group` and its kin, on every rank of the world in the same order. ``ranks`` are global ranks,
    by rank in the group. Methods start an operation and return its `Work`. Each takes `CallOptions` as keywords.
    """

    def __init__(self, mesh: Endpoint, ranks: Sequence[int], name: str, timeout: float, *, nonce: int = 0) -> None:
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
        """Whether what may go on by itself waits for its peers at the call as long as one spins, off any event loop."""
        self.aborted = False
        """Whether this rank has called `abort`; that it has failed may be seen a moment later."""
        self.world: Any = None
        mesh.progress.submit(self._open)

    def _open(self) -> None:
        inside = self._native or self._islands
        if inside is not None:
            inside.open()
        self.mesh.open(self._channel)
        self.mesh.open(self._messages)

    # -- who we are ----------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = "destroyed" if self._closed else f"failed: {self._channel.error}" if self._channel.error else "open"
        return f"<Group {self.name!r} rank {self._rank} of {len(self.ranks)}, {state}>"

    def group_rank(self, global_rank: int) -> int:
        """Return a member's rank in this group; UsageError if the global rank is not in it."""
        try:
            return self.ranks.index(global_rank)
        except ValueError:
            raise UsageError(
                f"global rank {global_rank} is not in group {self.name!r}, which has {self.ranks}"
            ) from None

    # -- memory that all members see -----------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        """Whether all members see one another's registered memory; see `register`."""
        return self._native is not None

    def register(self, target: T) -> T:
        """Move a tensor, or a module's parameters and buffers, into mapped memory, and return it.

        In place: values, strides, ties, and the tensor objects that optimizers hold stay. Collectives on it then copy
        nothing but their result. Where the members share no memory, nothing is moved, and so is nothing on a CUDA device,
        whose memory stays mapped anyway. UnsupportedError for what is not dense, SharedMemoryError if no memory is left;
        then nothing was moved.
        """
        return register(target, wanted=self.shares_memory)

    # -- tensors on a device -------------------------------------------------------------------

    def _at(self, value: Any) -> CollectiveOps:
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        return self.on(value.device) if isinstance(value, torch.Tensor) and value.is_cuda else self

    def on(self, device: torch.device) -> DeviceGroup:
        """Return these ranks as they carry tensors on a device; they meet when the first operation is issued there."""
        found = self._devices.get(device)
        if found is None:
            with _coming:
                found = self._devices.get(device) or self._make_device_group(device)
        return found

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long operations that are called from now on may take, where they do not say; on this rank."""
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
        """Let a part of this group have what the devices here can share; all members call it, in order with all else.

        ``part`` is the part that we are in and ``number`` which it is; None and -1 if we are in none.
        """
        for device, carried in list(self._devices.items()):
            carried.split(None if part is None else part.on(device), number)

    def sibling(self, purpose: str) -> Group:
        """Return another group of the same ranks for control traffic; the same on every rank for one ``purpose``."""
        return Group(self.mesh, self.ranks, f"{self.name} ({purpose})", self.timeout, nonce=self._channel.number)

    # -- the one path --------------------------------------------------------------------------

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
        if number is None:  # counted only now: a call that was refused on one rank must not shift its numbers
            number = next(self._sequence)
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
        """Return within which time a call is to be over; refuse it where there can be none."""
        if self._closed:
            raise NotInitializedError("the group was destroyed: make a new one")
        if not background:
            self.mesh.progress.refuse_loop_thread(name)
        return self.timeout if timeout is None else seconds(timeout)

    def _attempt(self, plan: Plan, schedule: Schedule, entry: Entry, background: bool, limit: float) -> Work:
        """Run a native schedule here and now if its peers are there; make an operation of it if they are not."""
        channel = self._channel
        try:
            wait = not background or (self.patient and _get_running_loop() is None)
            if self.mesh.progress.attempt(schedule, channel, wait=wait):
                channel.count(entry.seq)
                value = plan.finish() if plan.finish is not None else None
                entry.finish()
                return completed(value)
        except Exception as cause:
            schedule = raising(cause)  # an operation that fails of it fails the group, and tells the peers
        return self._operate(channel, plan, (schedule,), entry, background, limit)

    def _operate(
        self, channel: Channel, plan: Plan, parts: Iterable[Schedule], entry: Entry, background: bool, limit: float
    ) -> Work:
        work = Work(self.mesh.progress)
        operation = Operation(channel, entry.op, entry.seq, plan, parts, work, limit, entry)
        self.mesh.issue(operation, background=background)
        return work

    # -- what was called before, in a hurry ------------------------------------------------------

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
        key = _looks((name, more), tensors)
        try:
            known = None if key is None else self._known.get(key)
        except TypeError:  # what no look-up takes, no plan does
            key = known = None
        if known is None:
            make = make if key is None else functools.partial(self._learning, key, make)
            return super()._call(name, first, make, tensors, how, *more)
        # From here on it differs from a call before in nothing but its memory.
        start, fingerprint, nbytes, writes = known
        background, timeout = how.get("background", True), how.get("timeout")
        limit = self.timeout
        if timeout is not None or self._closed or (not background and _get_running_loop() is not None):
            limit = self._named(self._limit, name, background, timeout)
        number = next(self._sequence)
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

    def _learning(self, key: Hashable, make: Callable[..., Plan], *args: Any) -> Plan:
        """Plan a call, and remember what those like it, that have its key, will have in common."""
        plan = make(*args)
        if plan.native and plan.kind is not None and not plan.kind.dtype.is_complex:  # those may be conjugate views
            self._learn(key, plan, plan.kind)
        return plan

    def _learn(self, key: Hashable, plan: Plan, kind: CallSignature) -> None:
        quick = None if self._native is None else self._native.quick(kind)
        if quick is not None:
            if len(self._known) >= _KEPT_KINDS:
                self._known.clear()
            self._known[key] = _CachedCall(quick, plan.fingerprint, plan.nbytes, kind.writes(self._rank))

    # -- for people who look for the missing ----------------------------------------------------

    def monitored_barrier(self, **how: Unpack[CallOptions]) -> Work:
        """Complete when every rank has called it; its timeout names, on rank 0, every rank that has not.

        The other ranks wait twice as long, so that what they hear is whom rank 0 misses.
        """
        name = "monitored_barrier"
        if self._rank != 0:
            how["timeout"] = 2 * self._named(self._limit, name, True, how.get("timeout"))
        return self._named(self._begin, name, None, data_movement.monitored_barrier, (), how)

    # -- objects -------------------------------------------------------------------------------
    # With ``weights_only``, on every rank, they carry what torch.load(weights_only=True) reads, and no pickle in any case.

    def all_gather_object(
        self, output: list[Any], value: Any, weights_only: bool = False, **how: Unpack[CallOptions]
    ) -> Work:
        """Gather every rank's object into every rank's list."""
        args = output, value, weights_only
        return self._named(self._begin, "all_gather_object", None, p2p.all_gather_object, args, how)

    def gather_object(
        self, value: Any, output: list[Any] | None, dst: int, weights_only: bool = False, **how: Unpack[CallOptions]
    ) -> Work:
        """Gather every rank's object into the list of rank ``dst``; None elsewhere."""
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
        """Replace every rank's list by that of rank ``src``."""
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
        """Receive a list of objects of the same length; the value is the sender's global rank."""
        args = values, src, self.ranks, weights_only
        return self._named(self._message, "recv_object_list", p2p.receive_objects, args, tag, how)

    # -- the end -------------------------------------------------------------------------------

    @property
    def error(self) -> Exception | None:
        """The error that this group failed with; None while it works."""
        return self._channel.error

    def abort(self, reason: str = "abort() was called") -> None:
        """Fail everything pending on this group, here and on every other rank; it takes no more operations."""

        def fail() -> None:
            error = GroupAbortedError(f"rank {self.mesh.rank} aborted: {reason}", peer=self.mesh.rank)
            self.mesh.fail(self._channel, error)

        self.aborted = True
        self.mesh.progress.submit(fail)
        self.mesh.progress.ensure_driven()

    def close(self) -> None:
        """Destroy this group on this rank; what is pending fails. Idempotent, and nothing is said to the others."""
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
