"""Messages by NCCL: one communicator for each pair of ranks that exchange any.

`Nccl.make_p2p` creates it; `devices.p2p` runs it. NCCL has no tags: both ranks must enqueue the same operations of a
communicator in the same order. So each message gets a turn. The lower of the two ranks assigns the turns, when it
knows that both ranks have issued the message:

    sender                                    receiver
    offers                              ──>   has matched the receive, and answers (the lower rank: with the turn)
    enqueues the send                   <──
    (the lower rank: sends the turn)    ──>   enqueues the receive

So neither stream waits for an operation that the peer has not issued. Each communicator has a stream of its own, so that
different pairs do not delay each other.
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

_OFFER = struct.Struct(f"<16sI{UNIQUE_ID_NBYTES}s")  # device, NCCL version, unique id
_READY = struct.Struct(f"<{UNIQUE_ID_NBYTES}sQ")
_TURN = struct.Struct("<Q")


class PairCommunicator:
    """The communicator shared with one peer, and its turns. Used only in the point-to-point executor."""

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
        """Start creating the communicator; the peer does the same."""
        if self.made is not None:
            return
        self.unique_id = self.unique_id if self.decides else unique_id
        ours, theirs = (0, 1) if self.decides else (1, 0)
        make = functools.partial(self._bindings.communicator, 2, self.unique_id, ours)
        # NCCL waits for the peer in the first call of each direction: make it on a thread that may block.
        out, into = self._token[0].data_ptr(), self._token[1].data_ptr()
        first: list[Call] = [("send", out, 1, BYTES, theirs), ("recv", into, 1, BYTES, theirs)]
        rank = self._context.host.ranks[self._context.rank]
        self.made = Communicator(self._bindings, self.streams, make, first, rank)

    def next_turn(self) -> int:
        return next(self._turns)

    def put(self, name: str, data: torch.Tensor, turn: int, before: DeviceEvent) -> Transfer[DeviceEvent]:
        """Enqueue a call when its turn has come; return the event behind it."""
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
    """One rank's part of point-to-point transfers over NCCL."""

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
            raise TransferRefused("both ranks share one device, and NCCL needs a device per rank")
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
