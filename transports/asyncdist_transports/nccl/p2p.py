"""Messages by NCCL: a communicator for each two ranks that have something to send each other.

NCCL knows no tags: what two ranks put into the queues of a communicator must be the same in the same order. So each
message has its turn. The lower of the two ranks gives the turns out, when it knows that both want the message:

    sender                                    receiver
    offers                              ──>   has a receive for it, and is ready (the lower one says whose turn it is)
    puts the send into its queue        <──
    (the lower one says whose turn)     ──>   puts the receive into its queue

So neither queue ever waits for what is not on its way, and what else a rank sends and receives goes on beside it: each
communicator has a stream of its own.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from typing import ClassVar

import torch

from asyncdist.engine.work import Work
from asyncdist.transport.device_collectives import DeviceContext
from asyncdist.transport.device_p2p import ControlChannel, DeviceP2P, Transfer, TransferRefused
from asyncdist.transport.device_streams import DeviceEvent
from asyncdist_transports.nccl.bindings import BYTES, UNIQUE_ID_NBYTES, Bindings, version_text
from asyncdist_transports.nccl.communicator import Call, Communicator

_OFFER = struct.Struct(f"<16sI{UNIQUE_ID_NBYTES}s")  # the device, NCCL's version, and what the lower rank says first
_READY = struct.Struct(f"<{UNIQUE_ID_NBYTES}sQ")
_TURN = struct.Struct("<Q")


class PairCommunicator:
    """What we share with one other rank: a communicator, and whose turn it is there. Used on the messages' line."""

    def __init__(self, bindings: Bindings, context: DeviceContext, peer: int) -> None:
        self._bindings = bindings
        self._context = context
        self.streams = context.streams.with_new_stream()
        self.decides = context.rank < peer
        self.unique_id = bindings.unique_id() if self.decides else bytes(UNIQUE_ID_NBYTES)
        self.made: Communicator | None = None
        self._turns = itertools.count()
        self._at = 0
        self._waiting: dict[int, Work] = {}
        with self.streams.on_comm_stream():
            self._token = torch.zeros(2, dtype=torch.uint8, device=context.streams.device)

    def meet(self, unique_id: bytes) -> None:
        """Begin to make the communicator: the other rank does so too."""
        if self.made is not None:
            return
        self.unique_id = self.unique_id if self.decides else unique_id
        ours, theirs = (0, 1) if self.decides else (1, 0)
        make = functools.partial(self._bindings.communicator, 2, self.unique_id, ours)
        # NCCL waits for the other rank in the first call of each direction: let that be now, on a thread that may wait.
        out, into = self._token[0].data_ptr(), self._token[1].data_ptr()
        first: list[Call] = [("send", out, 1, BYTES, theirs), ("recv", into, 1, BYTES, theirs)]
        rank = self._context.host.ranks[self._context.rank]
        self.made = Communicator(self._bindings, self.streams, make, first, rank)

    def next_turn(self) -> int:
        return next(self._turns)

    def put(self, name: str, data: torch.Tensor, turn: int, before: DeviceEvent) -> Transfer[DeviceEvent]:
        """Put a call into the queue when it is its turn; return where it is over."""
        made = self.made
        assert made is not None
        yield made.ready
        if turn != self._at:
            self._waiting[turn] = our_turn = Work()
            yield our_turn
        with self.streams.on_comm_stream():
            self.streams.wait_event(before)
            made.enqueue((name, data.data_ptr(), data.numel(), BYTES, 1 if self.decides else 0))
            event = self.streams.record_event()
        self.streams.record_stream(data)
        self._at += 1
        following = self._waiting.pop(self._at, None)
        if following is not None:
            following.finish()
            following.run_callbacks()
        return event


class NcclP2P(DeviceP2P):
    """One rank's part."""

    name: ClassVar[str] = "nccl"

    def __init__(self, context: DeviceContext, bindings: Bindings) -> None:
        self._context, self._bindings = context, bindings
        place = f"{context.machine}\0{context.streams.uuid}"
        self._device = hashlib.blake2b(place.encode(), digest_size=16).digest()
        self._pairs: dict[int, PairCommunicator] = {}

    def send(self, data: torch.Tensor, channel: ControlChannel, before: DeviceEvent) -> Transfer[DeviceEvent]:
        pair = self._pair(channel.peer)
        channel.send(self.name, _OFFER.pack(self._device, self._bindings.version, pair.unique_id))
        answer = yield from channel.recv()
        unique_id, turn = _READY.unpack(answer.payload)
        pair.meet(unique_id)
        turn = pair.next_turn() if pair.decides else turn
        event = yield from pair.put("send", data, turn, before)
        yield channel.send(payload=_TURN.pack(turn))
        return event

    def receive(
        self, data: torch.Tensor, channel: ControlChannel, offer: bytes, before: DeviceEvent
    ) -> Transfer[DeviceEvent]:
        device, version, unique_id = _OFFER.unpack(offer)
        if device == self._device:
            raise TransferRefused("they share one device, and NCCL takes one rank a device")
        if version != self._bindings.version:
            raise TransferRefused(
                f"NCCL is {version_text(version)} there, and {version_text(self._bindings.version)} here"
            )
        pair = self._pair(channel.peer)
        pair.meet(unique_id)
        ours = pair.next_turn() if pair.decides else 0
        channel.send(payload=_READY.pack(pair.unique_id, ours))
        answer = yield from channel.recv()
        (turn,) = _TURN.unpack(answer.payload)
        return (yield from pair.put("recv", data, turn, before))

    def _pair(self, peer: int) -> PairCommunicator:
        if peer not in self._pairs:
            self._pairs[peer] = PairCommunicator(self._bindings, self._context, peer)
        return self._pairs[peer]

    def async_error(self) -> Exception | None:
        made = [pair.made for pair in list(self._pairs.values()) if pair.made is not None]
        return next((async_error for one in made if (async_error := one.async_error()) is not None), None)

    def abort(self) -> None:
        for pair in list(self._pairs.values()):
            if pair.made is not None:
                pair.made.abort()

    def close(self) -> None:
        for pair in self._pairs.values():
            if pair.made is not None:
                pair.made.close()
