"""Messages of ranks that map one another's device memory: the receiver copies from the sender's tensor.

`CudaIpc.make_p2p` creates a `CudaIpcP2P`; `devices.p2p` runs its transfers.

    sender                                                    receiver
    records an event, offers: location of the data      ──>   waits for the event, and copies
    waits for the receiver's event: done                <──   records an event, answers with its handle: done

The host polls the events, and no stream waits for another process. They are interprocess events, each for one peer. A rank
records an event again only when it knows that the peer has seen it pass. The answer tells the sender. A later offer, which
lists the messages whose answers the sender has seen pass, tells the receiver. The answer is the last control message, so
that a peer may leave after it.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections import defaultdict
from typing import ClassVar

import torch

from asyncdist.kernel.transport.device_collectives import DeviceContext
from asyncdist.kernel.transport.device_p2p import (
    MAX_PAYLOAD_NBYTES,
    ControlChannel,
    DeviceP2P,
    Transfer,
    TransferRefused,
)
from asyncdist.kernel.transport.device_streams import DeviceEvent
from asyncdist_transports.cuda_ipc.driver import HANDLE_NBYTES, Driver
from asyncdist_transports.cuda_ipc.handles import EXPORTED_NBYTES, Event, EventPool, ExportedMemory
from asyncdist_transports.cuda_ipc.peer_memory import PROBE_NBYTES, PeerMemory

_OFFER = struct.Struct(f"<16s{PROBE_NBYTES}s{EXPORTED_NBYTES}s{HANDLE_NBYTES}s")
_ACKNOWLEDGED = struct.Struct("<I")
_MAX_ACKNOWLEDGED = (MAX_PAYLOAD_NBYTES - _OFFER.size) // _ACKNOWLEDGED.size


class CudaIpcP2P(DeviceP2P):
    """One rank's part of point-to-point transfers over CUDA IPC."""

    name: ClassVar[str] = "cuda_ipc"

    def __init__(self, context: DeviceContext, driver: Driver) -> None:
        self._context, self._driver = context, driver
        self._memory = PeerMemory(driver, context.streams)
        self._events = EventPool(driver)
        self._machine = hashlib.blake2b(context.machine.encode(), digest_size=16).digest()
        self._free_slots: list[int] = []
        self._new_slots = itertools.count()
        self._answered: dict[tuple[int, int], Event] = {}
        """By peer and message number: events that the peer's stream may not wait for yet."""
        self._acknowledged: dict[int, list[int]] = defaultdict(list)
        """By peer: answered messages of this rank that the next offer lists."""

    def send(self, data: torch.Tensor, channel: ControlChannel, before: DeviceEvent | None) -> Transfer[DeviceEvent]:
        streams = self._context.streams
        streams.wait_event(before)
        slot = self._free_slots.pop() if self._free_slots else next(self._new_slots)
        own = self._events.acquire(channel.peer)
        try:
            _, location = self._memory.exports.export(data, slot)
            streams.record_event(own[0])
            offer = _OFFER.pack(self._machine, self._memory.probe, location.pack(), own[1])
            acknowledged = self._acknowledged[channel.peer]
            channel.send(self.name, offer + b"".join(map(_ACKNOWLEDGED.pack, acknowledged[:_MAX_ACKNOWLEDGED])))
            del acknowledged[:_MAX_ACKNOWLEDGED]
            answer = yield from channel.recv()
            # After a refusal the peer may still look at the event's record, so it is not reused.
            self._events.release(channel.peer, own)
            yield from self._passed(self._events.of(channel.peer, answer.payload))
            acknowledged.append(channel.number)
            return streams.record_event()
        finally:
            self._free_slots.append(slot)

    def receive(
        self, data: torch.Tensor, channel: ControlChannel, offer: bytes, before: DeviceEvent | None
    ) -> Transfer[DeviceEvent]:
        streams, peer = self._context.streams, channel.peer
        machine, probe, location, handle = _OFFER.unpack_from(offer)
        if machine != self._machine:
            raise TransferRefused("it is on another host")
        self._memory.verify(peer, probe)
        sent = self._memory.imports.open(peer, ExportedMemory.unpack(location))
        offered = self._events.of(peer, handle)
        for (number,) in _ACKNOWLEDGED.iter_unpack(offer[_OFFER.size :]):
            self._events.release(peer, self._answered.pop((peer, number)))
        yield from self._passed(offered)
        streams.wait_event(before)
        data.copy_(sent)
        answer, handle = self._answered[peer, channel.number] = self._events.acquire(peer)
        streams.record_event(answer)
        event = streams.record_event()
        yield channel.send(payload=handle)
        return event

    def _passed(self, event: DeviceEvent) -> Transfer[None]:
        """Wait until the device of the peer has passed an event."""
        if not event.query():
            yield self._context.when_passed(event)

    def close(self) -> None:
        self._memory.close(self._events.made)
