"""Point-to-point operations of a device group, over the best backend that both ranks support.

The operations use an executor and a stream of their own, so that the ranks need not order them relative to collectives. No
call in that executor blocks for a peer, so two ranks that send to each other at once do not deadlock. The CPU group matches
the messages and detects different sizes or dtypes. Small messages go through pinned host memory, which is also the last
resort of large ones.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import torch

from asyncdist.base.callables import Callback
from asyncdist.base.daemon_threads import SerialExecutor
from asyncdist.errors import MismatchError
from asyncdist.kernel.collectives import p2p
from asyncdist.kernel.devices.completion_watcher import CompletionWatcher, Pending
from asyncdist.kernel.devices.cpu_group import CpuGroup, SideGroup
from asyncdist.kernel.memory.buffers import Memory, OutputTensor
from asyncdist.kernel.transport.device_collectives import DeviceCollectives, DeviceContext
from asyncdist.kernel.transport.device_p2p import (
    CONTROL_MESSAGE_NBYTES,
    MAX_CONCURRENT_MESSAGES,
    REFUSED,
    SMALL_NBYTES,
    ControlChannel,
    ControlMessage,
    DeviceP2P,
    Transfer,
    TransferRefused,
    unlogged,
)
from asyncdist.kernel.transport.device_streams import DeviceEvent, completes_soon
from asyncdist.kernel.transport.host_group import HostWork

log = logging.getLogger("asyncdist")

_BY_HOST = "host"
# Pieces in flight of a message that goes through the host.
_PIPELINE_DEPTH = 3


TransferResult = tuple[Any, DeviceEvent]
"""The outcome of a transfer: the work's value, and the completion event."""


class DevicePointToPoint:
    """The sends and receives of one rank.

    Attributes:
        executor: Runs every step of a transfer.
        refused: Pairs of a rank in the group and a backend that cannot carry messages to it.

    Args:
        host: CPU group with the same ranks.
        context: Context with a stream for point-to-point operations.
        backend_classes: Backends in order of preference.
        watch: Watcher for intermediate events.
        guarded: Called as ``guarded(pending, call)``; runs ``call`` and fails the group if it raises.
    """

    def __init__(
        self,
        host: CpuGroup,
        context: DeviceContext,
        backend_classes: Sequence[type[DeviceCollectives]],
        watch: CompletionWatcher,
        guarded: Callable[[Pending, Callback], None],
    ) -> None:
        self.executor = SerialExecutor(f"asyncdist-{context.streams.device}-messages")
        self._host = host
        self._context, self._backend_classes, self._watcher, self._guarded = context, backend_classes, watch, guarded
        context.when_passed = watch.when_passed
        self._numbers = itertools.count()
        self._piece_nbytes = max(1, context.host.endpoint.config.device_piece_nbytes)
        self._backends: dict[str, DeviceP2P] | None = None
        self.refused: set[tuple[int, str]] = set()
        # Carries the control messages, so that they cannot match the user's tags.
        self._control_group = SideGroup(context.host, "control_group")

    # -- transfers -----------------------------------------------------------------------------

    def resume(self, transfer: Transfer[TransferResult], pending: Pending, awaited: HostWork | None = None) -> None:
        """Run a transfer until it waits for a work, whose completion resumes it. Runs in the executor.

        A thread that waits for the message drives the awaited work, and then continues the transfer itself. No other
        thread has to wake up.

        Args:
            awaited: The completed work that the transfer has waited for; None starts the transfer.
        """
        if pending.work.failed:
            transfer.close()
            return
        with self._context.streams.on_comm_stream():
            try:
                while awaited is None or awaited.is_completed():
                    if awaited is not None:
                        awaited.result()
                    awaited = next(transfer)
            except StopIteration as end:
                self._watcher.enqueued(pending, *end.value)
                return
            except BaseException:
                transfer.close()
                raise
        again = functools.partial(self._guarded, pending, functools.partial(self.resume, transfer, pending, awaited))
        promises = self._host.endpoint.progress.promises
        awaited.add_done_callback(lambda _: self.executor.put(again, inline=promises.is_made_here()))
        pending.work.suspended(awaited)

    # -- sending -------------------------------------------------------------------------------

    def send(
        self, memory: Memory, peer: int, tag: int, fingerprint: int, deadline: float, before: DeviceEvent | None
    ) -> Transfer[TransferResult]:
        """Send a tensor's elements, which are ready after the event ``before``; ``deadline`` is in monotonic seconds."""
        host, data = self._host, memory.raw

        def send_first(message: torch.Tensor) -> HostWork:
            plan = p2p.send(host.context, message, peer)
            plan.fingerprint = fingerprint
            return unlogged(host._start_message("send", tag, plan, timeout=max(0.0, deadline - monotonic())))

        if data.numel() <= SMALL_NBYTES:
            return None, (yield from self._send_small(data, send_first, before))
        number = next(self._numbers) % MAX_CONCURRENT_MESSAGES
        channel = ControlChannel(
            self._control_group.group(), peer, number, data.numel(), deadline, send_first, sends=True
        )
        for backend in [each for name, each in self.backends.items() if (peer, name) not in self.refused]:
            try:
                return None, (yield from backend.send(data, channel, before))
            except TransferRefused as why:
                self.refused.add((peer, backend.name))
                log.info("messages to rank %d cannot use %s: %s", host.member_ids[peer], backend.name, why)
        return None, (yield from self._send_by_host(data, channel, before))

    def _send_small(
        self, data: torch.Tensor, send: Callable[[torch.Tensor], HostWork], before: DeviceEvent | None
    ) -> Transfer[DeviceEvent]:
        streams = self._context.streams
        streams.wait_event(before)
        pinned = streams.pinned(_small_message_nbytes(data.numel()), torch.uint8)
        pinned[: data.numel()].copy_(data, non_blocking=True)
        event = streams.record_event()
        if not completes_soon(event):
            yield self._watcher.when_passed(event)
        yield send(pinned)
        return event

    def _send_by_host(
        self, data: torch.Tensor, channel: ControlChannel, before: DeviceEvent | None
    ) -> Transfer[DeviceEvent]:
        in_flight = deque([channel.send(_BY_HOST)])
        streams = self._context.streams
        streams.wait_event(before)
        for piece in data.split(self._piece_nbytes):
            pinned = streams.pinned(piece.numel(), piece.dtype)
            pinned.copy_(piece, non_blocking=True)
            event = streams.record_event()
            if len(in_flight) == _PIPELINE_DEPTH:
                yield in_flight.popleft()
            if not completes_soon(event):
                yield self._watcher.when_passed(event)
            in_flight.append(channel.send_data(pinned))
        yield from in_flight
        return event

    # -- receiving -----------------------------------------------------------------------------

    def receive(
        self,
        target: OutputTensor,
        peer: int | None,
        tag: int,
        fingerprint: int,
        deadline: float,
        before: DeviceEvent | None,
    ) -> Transfer[TransferResult]:
        """Receive into a tensor after the event ``before``. The value is the sender's global rank.

        ``peer`` None receives from any rank; ``deadline`` is in monotonic seconds.
        """
        host, data, streams = self._host, target.memory.raw, self._context.streams
        is_small = data.numel() <= SMALL_NBYTES
        if is_small:
            buffer = streams.pinned(_small_message_nbytes(data.numel()), torch.uint8)
        else:
            buffer = torch.empty(CONTROL_MESSAGE_NBYTES, dtype=torch.uint8, device="cpu")
        plan = p2p.receive(host.context, buffer, peer, host.member_ids)
        plan.fingerprint = fingerprint
        received = unlogged(host._start_message("recv", tag, plan, timeout=max(0.0, deadline - monotonic())))
        yield received
        source = received.result()
        member = host.member_ids.index(source)
        if is_small:
            streams.wait_event(before)
            event = streams.copy_to_device(data, buffer[: data.numel()])
        else:
            message = ControlMessage.unpacked(buffer)
            # The fingerprint holds the number of elements modulo 2**24.
            if message.nbytes != data.numel():
                expected = f"rank {source} sent {message.nbytes} bytes where {data.numel()} were expected"
                raise MismatchError(source, expected)
            channel = ControlChannel(
                self._control_group.group(), member, message.number, message.nbytes, deadline, sends=False
            )
            event = yield from self._receive_offer(message, data, channel, before)
        if target.copied:
            with streams.ordered_after(event):
                target.store()
                event = streams.record_event()
        else:
            target.store()
        return host.ranks[member], event

    def _receive_offer(
        self, message: ControlMessage, data: torch.Tensor, channel: ControlChannel, before: DeviceEvent | None
    ) -> Transfer[DeviceEvent]:
        """Receive by the first offered backend that this rank supports."""
        while message.kind != _BY_HOST:
            try:
                backend = self.backends.get(message.kind)
                if backend is None:
                    own_id = self._context.host.member_ids[self._context.rank]
                    raise TransferRefused(f"rank {own_id} does not have this backend")
                return (yield from backend.receive(data, channel, message.payload, before))
            except TransferRefused as why:
                channel.send(REFUSED, str(why).encode()[:400])
                message = yield from channel.recv()
        return (yield from self._receive_by_host(data, channel, before))

    def _receive_by_host(
        self, data: torch.Tensor, channel: ControlChannel, before: DeviceEvent | None
    ) -> Transfer[DeviceEvent]:
        streams = self._context.streams
        streams.wait_event(before)
        incoming: deque[tuple[torch.Tensor, torch.Tensor, HostWork]] = deque()
        not_posted = deque(data.split(self._piece_nbytes))
        while not_posted or incoming:
            while not_posted and len(incoming) < _PIPELINE_DEPTH:
                piece = not_posted.popleft()
                pinned = streams.pinned(piece.numel(), piece.dtype)
                incoming.append((piece, pinned, channel.recv_data(pinned)))
            piece, pinned, received = incoming.popleft()
            yield received
            streams.copy_to_device(piece, pinned)
        return streams.record_event()

    # -- backends ------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the backends have been created."""
        return self._backends is not None

    @property
    def backends(self) -> dict[str, DeviceP2P]:
        """Return the usable backends by name, the preferred first; they are created on first use."""
        if self._backends is None:
            self._backends = {}
            for cls in self._backend_classes:
                try:
                    backend = cls.make_p2p(self._context) if cls.probe() is None else None
                except Exception as cause:
                    log.info("point-to-point over %s is not available: %s: %s", cls.name, type(cause).__name__, cause)
                    continue
                if backend is not None:
                    self._backends[cls.name] = backend
        return self._backends

    # -- failure and end -----------------------------------------------------------------------

    @property
    def error(self) -> Exception | None:
        """The failure of the control group; None while it works."""
        return self._control_group.error

    def async_error(self) -> Exception | None:
        """Return a failure that no message has reported yet, or None."""
        async_errors = (backend.async_error() for backend in list((self._backends or {}).values()))
        return self.error or next((one for one in async_errors if one is not None), None)

    def abort(self, reason: str) -> None:
        """Cancel everything, as the group has failed. Never blocks."""
        self._control_group.abort(reason)
        for backend in list((self._backends or {}).values()):
            backend.abort()

    def close(self) -> None:
        """Destroy the control group; pending operations must have failed. The backends are closed in the executor."""
        self._control_group.close()
        self.executor.close(self._close_backends)

    def _close_backends(self) -> None:
        for backend in (self._backends or {}).values():
            backend.close()


def _small_message_nbytes(nbytes: int) -> int:
    """Return the size of a message without a control message; none is as large as a control message.

    The fingerprints of a small and of a large tensor can be equal, because they hold the number of elements modulo 2**24.
    """
    return nbytes + 1 if nbytes == CONTROL_MESSAGE_NBYTES else nbytes
