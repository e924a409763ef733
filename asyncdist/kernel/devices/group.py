"""The ranks of a group, for tensors on one device.

`Group` creates a `DeviceGroup` for the first tensor on a device. The ranks agree on a backend in its first collective.
A collective is prepared as on the host, but a `DeviceCollectives` runs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from asyncio import _get_running_loop
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import torch

from asyncdist.base.callables import Callback
from asyncdist.base.daemon_threads import SerialExecutor
from asyncdist.base.deadline import seconds
from asyncdist.base.error_text import describe_error
from asyncdist.errors import (
    GroupAbortedError,
    GroupError,
    NotInitializedError,
    OperationTimeoutError,
    UnsupportedError,
    UsageError,
)
from asyncdist.kernel.collectives import p2p
from asyncdist.kernel.collectives.call_plan import CallPlan, MemoryPlan, Result, finish_call
from asyncdist.kernel.collectives.collective_ops import CallOptions, CollectiveOps
from asyncdist.kernel.devices.completion_watcher import CompletionWatcher, Pending
from asyncdist.kernel.devices.cpu_group import CpuGroup
from asyncdist.kernel.devices.cuda_streams import CudaStreams
from asyncdist.kernel.devices.desync_detector import DesyncDetector
from asyncdist.kernel.devices.negotiate import negotiate_backend
from asyncdist.kernel.devices.p2p import DevicePointToPoint, TransferResult
from asyncdist.kernel.devices.work import DeviceWork
from asyncdist.kernel.engine.operation import Plan
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.memory.buffers import OutputTensor, input_memory
from asyncdist.kernel.memory.user_modes import leave_user_modes
from asyncdist.kernel.transport.device_collectives import DeviceCollectives, DeviceContext
from asyncdist.kernel.transport.device_p2p import Transfer
from asyncdist.kernel.transport.device_streams import DeviceEvent, Streams
from asyncdist.kernel.transport.native import CallSignature, Native, PreparedCall

log = logging.getLogger("asyncdist")

# Seconds in which the device may complete enqueued work after a peer has left.
_DRAIN_TIMEOUT = 1.0


class _DeviceNative(Native):
    """The backend as a `Native`, for calls that are prepared before the ranks have agreed on a backend.

    The first call connects the ranks, and the device group closes the backend.
    """

    def __init__(self, backend: Callable[[], DeviceCollectives]) -> None:
        self._backend = backend

    def prepare(self, signature: CallSignature) -> PreparedCall:
        return lambda sequence, *tensors: self._backend().run(signature, *tensors)


class DeviceGroup(CollectiveOps):
    """The ranks of a CPU group, for tensors on ``device``.

    Args:
        host: CPU group for control traffic, used by this device group alone.
        device: The device of all tensors.
        backend_classes: Backends to try, in order of preference.
        streams: The device's streams; default: CUDA's.
        owner: The user's group. If it fails or is aborted on any rank, so does this group. Default: ``host``.

    Attributes:
        host: The CPU group.
        messages: The point-to-point operations.
        desync_detector: Compares the calls of the ranks.
    """

    def __init__(
        self,
        host: CpuGroup,
        device: torch.device,
        backend_classes: Sequence[type[DeviceCollectives]],
        streams: Streams | None = None,
        owner: CpuGroup | None = None,
    ) -> None:
        super().__init__()
        self.name, self.ranks, self.timeout = host.name, host.ranks, host.timeout
        self.member_ids = host.member_ids
        self.device = self._device = self._device_if_not_host = device
        self._rank = host.rank()
        self.host = host
        self._owner = host if owner is None else owner
        self._streams = CudaStreams(device) if streams is None else streams
        self._context = DeviceContext(host, self._streams)
        self._backend_classes = backend_classes
        self._backend: DeviceCollectives | None = None
        native = _DeviceNative(self._connected_backend)
        self.context = dataclasses.replace(host.context, native=native, hierarchical=None, forced={})
        self._sequence = itertools.count(1)
        self._last_number = 0
        self._executor = SerialExecutor(f"asyncdist-{device}")
        self._watcher = CompletionWatcher(f"asyncdist-watch-{device}", self)
        self.messages = DevicePointToPoint(
            host, DeviceContext(host, self._streams.with_new_stream()), backend_classes, self._watcher, self._guarded
        )
        self.desync_detector = DesyncDetector(self._context, self._fail_all)
        recorder = host.endpoint.recorder
        recorder.pending.append(self._watcher.entries)
        host.endpoint.progress.post(lambda: recorder.add_group(self.name, self.member_ids, lambda: self._last_number))
        self._pending_split: DeviceWork | None = None
        self._closed = False
        self.error: GroupError | None = None

    @property
    def backend(self) -> str | None:
        """Name of the chosen backend; None until the first operation has run."""
        return None if self._backend is None else self._backend.name

    # -- issuing -------------------------------------------------------------------------------

    def _group_for(self, value: Any) -> DeviceGroup:
        return self

    def _run(
        self, name: str, plan: CallPlan, tensors: Sequence[Any], result: Result, options: CallOptions, work: bool = True
    ) -> Work:
        inline = self._backend is not None and not self._backend.blocks
        finish = functools.partial(finish_call, *result)
        started = Plan(fingerprint=plan.fingerprint, finish=finish, nbytes=plan.nbytes)
        assert isinstance(plan, MemoryPlan)
        do = functools.partial(self._run_collective, plan.call, tensors)
        return self._start(name, None, started, options, self._executor, do, held=tensors, inline=inline)

    def _start(
        self,
        name: str,
        tag: int | None,
        plan: Plan,
        options: CallOptions,
        executor: SerialExecutor,
        do: Callable[[Pending, DeviceEvent | None], None],
        *,
        held: Any = None,
        inline: bool = False,
    ) -> DeviceWork:
        """Issue a call in an executor and return its work.

        Args:
            tag: Tag of a message; None for a collective.
            executor: Executor that runs ``do``.
            do: Called as ``do(pending, before)`` in the executor; enqueues the device work, after the event
                ``before`` (None: at once).
            held: Objects to keep alive until the device is done.
            inline: Whether ``do`` may run in the calling thread, because it never waits for peers.
        """
        if self._closed:
            raise NotInitializedError("the group was destroyed: make a new one")
        blocking = not options.get("background", True)
        if blocking:
            self.host.endpoint.progress.refuse_loop_thread(name)
        if self._streams.is_capturing():
            raise UnsupportedError(
                "the call cannot be captured into a CUDA graph, because the ranks communicate on the host: "
                "call it outside of the graph"
            )
        # A call that is refused above must not use up a sequence number: the peers may not refuse it.
        if tag is None:
            number = self._last_number = next(self._sequence)
            self.desync_detector.record_call(number, plan.fingerprint)
        else:
            number = tag
        entry = self._owner.hooks.new_entry(self.name, name, number, plan.fingerprint, plan.nbytes)
        entry.peer = plan.peer
        self._owner.hooks.record(entry)
        now = monotonic()
        deadline = now + seconds(options.get("timeout"), self.timeout)
        work = DeviceWork(self._streams, self.host.endpoint.progress, waits_for_peers=not inline)
        pending = Pending(work, plan, entry, now, deadline, numbered=tag is None, held=held)
        before = self._streams.position()
        self._watcher.add(pending)
        # The caller of a blocking message drives what the message waits for.
        with self.host.endpoint.progress.promises.make() if blocking and tag is not None else contextlib.nullcontext():
            if not ((blocking or inline) and executor.run_now(self._run_call, pending, do, before)):
                executor.put(functools.partial(self._run_call, pending, do, before))
            if blocking:
                # The caller gets the error from the work.
                with contextlib.suppress(GroupError):
                    work.wait()
        return work

    def _run_call(
        self, pending: Pending, do: Callable[[Pending, DeviceEvent | None], None], before: DeviceEvent | None
    ) -> None:
        """Run a call in its executor, unless the group has failed."""
        error = self.error or self.host.error or self._owner.error or self.messages.error
        if error is not None:
            self.fail(pending, error)
        elif not pending.work.failed:
            self._guarded(pending, functools.partial(do, pending, before))

    def _guarded(self, pending: Pending, do: Callback) -> None:
        try:
            do()
        except Exception as cause:
            self.fail(pending, cause)

    def _run_collective(
        self, call: PreparedCall, tensors: Sequence[Any], pending: Pending, before: DeviceEvent | None
    ) -> None:
        self._context.deadline = pending.deadline
        with self._streams.on_comm_stream():
            self._streams.wait_event(before)
            for _ in call(pending.entry.seq, *tensors) or ():
                pass
            finish = pending.plan.finish
            value = None if finish is None else finish()
            self._watcher.enqueued(pending, value, self._streams.record_event())

    def _connected_backend(self) -> DeviceCollectives:
        """Return the backend; the first call negotiates it with the other ranks. Runs in the executor."""
        if self._backend is None:
            if self._pending_split is not None:
                self._pending_split._wait_until_enqueued(self._context.remaining)
            self._backend = negotiate_backend(self._context, self._backend_classes, device=str(self._device))
        return self._backend

    def split(self, part: DeviceGroup | None, number: int) -> None:
        """Let the backend share its resources with subgroup ``number``. Called on all ranks in issue order.

        Does nothing if this group has issued no collective yet, which is the same on all ranks: they make the same calls.
        """
        if not self._last_number:
            return

        def do(pending: Pending, before: DeviceEvent | None) -> None:
            self._context.deadline = pending.deadline
            with self._streams.on_comm_stream():
                self._connected_backend().split(None if part is None else part._context, number)
                self._watcher.enqueued(pending, None, self._streams.record_event())

        work = self._start("split", None, Plan(), {}, self._executor, do)
        if part is not None:
            part._pending_split = work

    # -- messages ------------------------------------------------------------------------------

    def _send(self, tensor: Any, peer: int, tag: int, options: CallOptions) -> Work:
        with leave_user_modes() or contextlib.nullcontext():
            memory = input_memory(self._checked(tensor))
        plan = p2p.send(self.context, memory.tensor, peer)
        transfer = functools.partial(self.messages.send, memory, peer, tag, plan.fingerprint)
        return self._start_message("send", tag, plan, transfer, memory, options)

    def _receive(self, tensor: Any, peer: int | None, tag: int, options: CallOptions) -> Work:
        with leave_user_modes() or contextlib.nullcontext():
            target = OutputTensor(self._checked(tensor))
        plan = p2p.receive(self.context, target.memory.tensor, peer, self.member_ids)
        transfer = functools.partial(self.messages.receive, target, peer, tag, plan.fingerprint)
        return self._start_message("recv", tag, plan, transfer, target, options)

    def _start_message(
        self,
        name: str,
        tag: int,
        plan: Plan,
        transfer: Callable[[float, DeviceEvent | None], Transfer[TransferResult]],
        held: Any,
        options: CallOptions,
    ) -> DeviceWork:
        def do(pending: Pending, before: DeviceEvent | None) -> None:
            self.messages.resume(transfer(pending.deadline, before), pending)

        # The first step of the first message loads drivers, for which an event loop must not wait.
        inline = self.messages.is_open and _get_running_loop() is None
        return self._start(name, tag, plan, options, self.messages.executor, do, held=held, inline=inline)

    def _checked(self, tensor: Any) -> Any:
        """Return a tensor; raise UsageError if it is on another device."""
        if isinstance(tensor, torch.Tensor) and tensor.device != self._device:
            raise UsageError(
                f"a tensor is on {tensor.device}, but the group's tensors are on {self._device}: move it first"
            )
        return tensor

    # -- failure -------------------------------------------------------------------------------

    def check_health(self, pending: Pending) -> None:
        self.desync_detector.listen()
        backend = self._backend
        if backend is not None and not backend.compares and pending.numbered:
            self.desync_detector.report_call(pending.entry.seq, pending.entry.fingerprint, pending.issued)
        cause = self.host.error or self._owner.error or self.messages.async_error()
        cause = cause or (None if backend is None else backend.async_error())
        if cause is not None and pending.event is None:
            self.fail(pending, cause)
        elif cause := cause or self.desync_detector.error:
            # Enqueued work can complete without a peer that has left in order.
            pending.problem_since = pending.problem_since or monotonic()
            if monotonic() - pending.problem_since > _DRAIN_TIMEOUT:
                self.fail(pending, cause)

    def on_calm(self) -> None:
        # A backend that does not compare calls needs the reports of ranks whose own calls are slow.
        if self._backend is not None and self._backend.compares:
            self.desync_detector.rest()

    def on_timeout(self, pending: Pending) -> None:
        elapsed = monotonic() - pending.issued
        where = (
            "in the device's queue" if pending.event is not None else "waiting for its peers, or for calls before it"
        )
        reason = f"not completed after {elapsed:.1f} s: it is still {where}"
        peers = [rank for rank in self.member_ids if rank != self.member_ids[self._rank]]
        self.fail(pending, OperationTimeoutError(reason, peers=peers, timeout=elapsed))

    def fail(self, pending: Pending, cause: BaseException) -> None:
        self._fail_one(pending, self._fail_all(cause))

    def _fail_all(self, cause: BaseException) -> GroupError:
        """Fail all pending operations on every rank, because the state of the device's queue is unknown."""
        if self.error is None:
            if isinstance(cause, GroupError):
                self.error = cause.with_traceback(None)
            else:
                rank = self.member_ids[self._rank]
                self.error = GroupAbortedError(f"rank {rank} failed: {describe_error(cause)}", peer=rank)
                self.error.__cause__ = cause
            self._abort(self.error)
        for one in self._watcher.remove_unfinished():
            self._fail_one(one, self.error)
        return self.error

    def _abort(self, error: GroupError) -> None:
        """Notify the other ranks, and end all waits of this rank for them. Idempotent."""
        self.host.abort(str(error.reason))
        self.messages.abort(str(error.reason))
        self.desync_detector.close()
        if self._backend is not None:
            self._backend.abort()

    def _fail_one(self, pending: Pending, error: GroupError) -> None:
        entry, rank = pending.entry, self.member_ids[self._rank]
        elapsed = monotonic() - pending.issued
        detailed = error.during(group=self.name, rank=rank, op=entry.op, seq=entry.seq, elapsed=elapsed)
        if entry.finish(detailed):
            entry.run_hooks()
        pending.work.finish(error=detailed)

    def close(self) -> None:
        """Destroy this group on this rank; pending operations fail. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.error is not None:
            # The thread that has found the error may not have aborted yet; the backends must not wait for peers.
            self._abort(self.error)
        error = GroupAbortedError("the group was destroyed")
        for pending in self._watcher.remove_unfinished():
            self._fail_one(pending, error)
        self._watcher.close()
        self.host.endpoint.recorder.pending.remove(self._watcher.entries)
        self.host.close()
        self.messages.close()
        self.desync_detector.close()
        self._executor.close(self._close_backend)

    def _close_backend(self) -> None:
        """Close the backend. Runs in the executor, so a running call ends first."""
        if self._backend is not None:
            self._backend.close()
        for unused in self._context.inherited.values():
            unused.close()
