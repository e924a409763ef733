"""The ranks of a group as they carry tensors on one device.

Made by `Group.on` when the first tensor on that device comes; the ranks meet in its first operation, on the host. From
then on each operation is a plan like any other, but its native collective is an `DeviceCollectives`'s.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, cast

import torch

from asyncdist.base.daemon_threads import SerialExecutor
from asyncdist.base.deadline import seconds
from asyncdist.collectives import p2p
from asyncdist.collectives.operations import CallOptions, CollectiveOps, checked_tag
from asyncdist.devices.completion_watcher import CompletionWatcher, Pending
from asyncdist.devices.cpu_group import CpuGroup
from asyncdist.devices.desync_detector import DesyncDetector
from asyncdist.devices.negotiate import negotiate_backend
from asyncdist.devices.p2p import DevicePointToPoint
from asyncdist.devices.work import DeviceWork
from asyncdist.engine.operation import Plan
from asyncdist.engine.work import Work
from asyncdist.errors import (
    GroupAbortedError,
    GroupError,
    NotInitializedError,
    OperationTimeoutError,
    UnsupportedError,
    UsageError,
)
from asyncdist.memory.buffers import OutputTensor, input_memory
from asyncdist.tracing.recorder import Entry
from asyncdist.transport.device_collectives import DeviceCollectives, DeviceContext
from asyncdist.transport.device_streams import CudaStreams, DeviceEvent, Streams
from asyncdist.transport.native import Native

log = logging.getLogger("asyncdist")

_GRACE = 1.0  # seconds that the device has for what is in its queue when a peer is gone


class _Later:
    """Stands for the ensemble in plans that are made before the ranks have met."""

    def __init__(self, ensemble: Callable[[], DeviceCollectives]) -> None:
        self._ensemble = ensemble

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **keywords: getattr(self._ensemble(), name)(*args, **keywords)


class DeviceGroup(CollectiveOps):
    """The members of ``host``, a group of its own, for tensors on ``device``.

    ``kinds`` are the ways to try, the preferred first. ``whole`` is the group whose
    tensors on the device these are: where that has failed or was aborted, on whichever rank, so has this.
    """

    def __init__(
        self,
        host: CpuGroup,
        device: torch.device,
        kinds: Sequence[type[DeviceCollectives]],
        streams: Streams | None = None,
        whole: CpuGroup | None = None,
    ) -> None:
        self.name, self.ranks, self.timeout = host.name, host.ranks, host.timeout
        self.device = device
        self._rank = host.rank()
        self._host = host
        self._whole = host if whole is None else whole
        self._streams = CudaStreams(device) if streams is None else streams
        self._site = DeviceContext(host, self._streams)
        self._kinds = kinds
        self._ensemble: DeviceCollectives | None = None
        native = cast(Native, _Later(self._met))
        self._who = dataclasses.replace(host._who, native=native, islands=None, forced={})  # no schedules of ours here
        self._sequence = itertools.count(1)
        self._line = SerialExecutor(f"asyncdist-{device}")
        self._watch = CompletionWatcher(
            f"asyncdist-watch-{device}", self._look_for_trouble, self._too_late, self._broken
        )
        self._messages = DevicePointToPoint(
            host, DeviceContext(host, self._streams.beside()), kinds, self._watch, self._guarded
        )
        self._roll_call = DesyncDetector(self._site, self._fail_all)
        recorder = host.mesh.recorder
        recorder.pending.append(self._watch.entries)
        host.mesh.progress.submit(lambda: recorder.add_group(self.name, self.ranks, self._sequence))
        self._begun = False
        self._splitting: DeviceWork | None = None  # while a larger group splits off what we inherit
        self._closed = False
        self.error: GroupError | None = None

    @property
    def way(self) -> str | None:
        """The name of the way that was chosen; None until the first operation is under way."""
        return None if self._ensemble is None else self._ensemble.name

    # -- the one path --------------------------------------------------------------------------

    def _at(self, value: Any) -> DeviceGroup:
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, torch.Tensor) and value.device != self.device:
            raise UsageError(f"a tensor on {value.device} among those on {self.device}: one call takes one device")
        return self

    def _issue(self, name: str, plan: Plan, how: CallOptions) -> Work:
        prompt = self._ensemble is not None and not self._ensemble.blocks
        return self._start(name, None, plan, how, self._line, self._do, prompt=prompt)

    def _start(
        self,
        name: str,
        tag: int | None,
        plan: Plan,
        how: CallOptions,
        line: SerialExecutor,
        do: Callable[[Pending, DeviceEvent], None],
        *,
        held: Any = None,
        prompt: bool = False,
    ) -> DeviceWork:
        """Have a call done on a line. Messages have a tag; ``prompt`` waits for nobody; the device uses what is held."""
        if self._closed:
            raise NotInitializedError("the group was destroyed: make a new one")
        blocking = not how.get("background", True)
        if blocking:
            self._host.mesh.progress.refuse_loop_thread(name)
        if self._streams.capturing():
            raise UnsupportedError(
                "it cannot be captured into a CUDA graph: the ranks speak on the host; call it outside of the graph"
            )
        number = next(self._sequence) if tag is None else tag  # only now: a call that is refused takes none
        if tag is None:
            self._begun = True
            self._roll_call.made(number, plan.fingerprint)
        entry = Entry(self.name, name, number, plan.fingerprint, plan.nbytes)
        entry.peer = plan.peer
        self._host.mesh.recorder.add(entry)
        limit = seconds(how.get("timeout"), self.timeout)
        now = monotonic()
        work = DeviceWork(self._streams, self._host.mesh.progress)
        pending = Pending(work, plan, entry, now, now + limit, numbered=tag is None, held=held)
        before = self._streams.mark()
        self._watch.add(pending)
        call = functools.partial(self._done, pending, functools.partial(do, pending, before))
        line.put(call, inline=blocking or prompt)
        if blocking and _succeeded(pending.work):
            pending.work.wait()
        return pending.work

    def _done(self, pending: Pending, do: Callable[[], None]) -> None:
        """Do a call, on a line; a failure is the group's."""
        error = self.error or self._host.error or self._whole.error or self._messages.error
        if error is not None:
            self._fail(error, pending)
        elif not pending.work.failed:  # the group may have been destroyed meanwhile
            self._guarded(pending, do)

    def _guarded(self, pending: Pending, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as cause:
            self._fail(cause, pending)

    def _do(self, pending: Pending, before: DeviceEvent) -> None:
        plan, entry = pending.plan, pending.entry
        assert plan.native is not None
        self._site.deadline = pending.deadline
        with self._streams.ours():
            self._streams.follow(before)
            for _ in plan.native(entry.seq, entry.fingerprint):
                pass
            value = None if plan.finish is None else plan.finish()
            pending.stands(value, self._streams.mark())

    def _met(self) -> DeviceCollectives:
        """Return the ensemble; the first time, meet the others. On the line only."""
        if self._ensemble is None:
            if self._splitting is not None:
                self._splitting._until_queued(self._site.left)
            self._ensemble = negotiate_backend(self._site, self._kinds, device=str(self.device))
        return self._ensemble

    def split(self, part: DeviceGroup | None, number: int) -> None:
        """Let a part of these ranks, the ``number``-th, have what it can share with us; called on all, in order.

        If nothing was done here yet, there is nothing to share: the same on all ranks, as they make the same calls.
        """
        if not self._begun:
            return

        def do(pending: Pending, before: DeviceEvent) -> None:
            self._site.deadline = pending.deadline
            with self._streams.ours():
                self._met().split(None if part is None else part._site, number)
                pending.stands(None, self._streams.mark())

        work = self._start("split", None, Plan(), {}, self._line, do)
        if part is not None:
            part._splitting = work

    # -- messages ------------------------------------------------------------------------------

    def _send(self, name: str, tensor: Any, peer: int, tag: int, how: CallOptions) -> Work:
        memory = input_memory(tensor)
        plan = Plan((), p2p.send(self._who, memory.tensor, peer).fingerprint, nbytes=memory.nbytes, peer=peer)
        begin = self._messages.send(memory, peer, checked_tag(tag), plan.fingerprint)
        return self._start(name, tag, plan, how, self._messages.line, begin, held=memory)

    def _receive(self, name: str, tensor: Any, peer: int | None, tag: int, how: CallOptions) -> Work:
        target = OutputTensor(tensor)
        plan = Plan(
            (),
            p2p.receive(self._who, target.memory.tensor, peer, self.ranks).fingerprint,
            nbytes=target.memory.nbytes,
            peer=peer,
        )
        begin = self._messages.receive(target, peer, checked_tag(tag), plan.fingerprint)
        return self._start(name, tag, plan, how, self._messages.line, begin, held=target)

    # -- failing -------------------------------------------------------------------------------

    def _look_for_trouble(self, pending: Pending) -> None:
        self._roll_call.listen()
        ensemble = self._ensemble
        if ensemble is not None and not ensemble.compares and pending.numbered:
            self._roll_call.tell(pending.entry.seq, pending.entry.fingerprint, pending.issued)
        cause = self._host.error or self._whole.error or self._messages.trouble()
        cause = cause or (None if ensemble is None else ensemble.trouble())
        if cause is not None and pending.mark is None:
            self._fail(cause, pending)
        elif cause := cause or self._roll_call.error:
            # What stands in the queue, or is about to, may well be done without a peer that has left since, in order.
            pending.troubled = pending.troubled or monotonic()
            if monotonic() - pending.troubled > _GRACE:
                self._fail(cause, pending)

    def _too_late(self, pending: Pending) -> None:
        elapsed = monotonic() - pending.issued
        where = "in the device's queue" if pending.mark is not None else "waiting for its peers, or for calls before it"
        reason = f"not over after {elapsed:.1f} s: it is still {where}"
        peers = [rank for rank in self.ranks if rank != self.ranks[self._rank]]
        self._fail(OperationTimeoutError(reason, peers=peers, timeout=elapsed), pending)

    def _broken(self, pending: Pending, cause: Exception) -> None:
        self._fail(cause, pending)

    def _fail(self, cause: BaseException, pending: Pending) -> None:
        self._fail_one(pending, self._fail_all(cause))

    def _fail_all(self, cause: BaseException) -> GroupError:
        """Fail everything on every rank: nobody knows what the device has done of it."""
        if self.error is None:
            if isinstance(cause, GroupError):
                self.error = cause.with_traceback(None)  # its frames may be those of calls with tensors
            else:
                ours = self.ranks[self._rank]
                self.error = GroupAbortedError(f"rank {ours} failed: {cause}", peer=ours)
                self.error.__cause__ = cause
            self._host.abort(str(self.error.reason))
            self._messages.abort(str(self.error.reason))
            self._roll_call.close()
            if self._ensemble is not None:
                self._ensemble.abort()
        for one in self._watch.take_all():
            self._fail_one(one, self.error)
        return self.error

    def _fail_one(self, pending: Pending, error: GroupError) -> None:
        entry, rank = pending.entry, self.ranks[self._rank]
        elapsed = monotonic() - pending.issued
        seen = error.during(group=self.name, rank=rank, op=entry.op, seq=entry.seq, elapsed=elapsed)
        entry.finish(seen)
        pending.work.finish(error=seen)

    def close(self) -> None:
        """Destroy this group on this rank; what is pending fails. Idempotent."""
        if self._closed:
            return
        self._closed = True
        error = GroupAbortedError("the group was destroyed")
        for pending in self._watch.take_all():
            self._fail_one(pending, error)
        self._watch.close()
        self._host.mesh.recorder.pending.remove(self._watch.entries)
        self._host.close()
        self._messages.close()
        self._roll_call.close()
        self._line.close(self._leave)

    def _leave(self) -> None:
        """Let go of the others, on the line: a call that is being done ends first."""
        if self._ensemble is not None:
            self._ensemble.close()
        for left in self._site.inherited.values():
            left.close()


def _succeeded(work: DeviceWork) -> bool:
    """Wait until a call has been put into the queue; return whether it has not failed."""
    try:
        work._until_queued(None)
        work.result()
    except GroupError:
        return False
    return True
