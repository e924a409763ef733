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
from asyncdist.transport.device_p2p import ControlChannel, Conversation, DeviceP2P, TransferRefused
from asyncdist.transport.device_streams import DeviceEvent
from asyncdist_transports.nccl.bindings import BYTES, UNIQUE_ID_NBYTES, Bindings, written
from asyncdist_transports.nccl.communicator import Call, Communicator

_OFFER = struct.Struct(f"<16sI{UNIQUE_ID_NBYTES}s")  # the device, NCCL's version, and what the lower rank says first
_READY = struct.Struct(f"<{UNIQUE_ID_NBYTES}sQ")
_TURN = struct.Struct("<Q")


class Pair:
    """What we share with one other rank: a communicator, and whose turn it is there. Used on the messages' line."""

    def __init__(self, bindings: Bindings, site: DeviceContext, peer: int) -> None:
        self._bindings = bindings
        self._site = site
        self.streams = site.streams.beside()
        self.decides = site.rank < peer
        self.unique_id = bindings.unique_id() if self.decides else bytes(UNIQUE_ID_NBYTES)
        self.made: Communicator | None = None
        self._turns = itertools.count()
        self._at = 0
        self._waiting: dict[int, Work] = {}
        with self.streams.ours():
            self._token = torch.zeros(2, dtype=torch.uint8, device=site.streams.device)

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
        rank = self._site.host.ranks[self._site.rank]
        self.made = Communicator(self._bindings, self.streams, make, first, rank)

    def next_turn(self) -> int:
        return next(self._turns)

    def put(self, name: str, data: torch.Tensor, turn: int, before: DeviceEvent) -> Conversation[DeviceEvent]:
        """Put a call into the queue when it is its turn; return where it is over."""
        made = self.made
        assert made is not None
        yield made.ready
        if turn != self._at:
            self._waiting[turn] = our_turn = Work()
            yield our_turn
        with self.streams.ours():
            self.streams.follow(before)
            made.enqueue((name, data.data_ptr(), data.numel(), BYTES, 1 if self.decides else 0))
            mark = self.streams.mark()
        self.streams.keep(data)
        self._at += 1
        following = self._waiting.pop(self._at, None)
        if following is not None:
            following.finish()
            following.run_callbacks()
        return mark


class NcclP2P(DeviceP2P):
    """One rank's part."""

    name: ClassVar[str] = "nccl"

    def __init__(self, site: DeviceContext, bindings: Bindings) -> None:
        self._site, self._bindings = site, bindings
        place = f"{site.machine}\0{site.streams.uuid}"
        self._device = hashlib.blake2b(place.encode(), digest_size=16).digest()
        self._pairs: dict[int, Pair] = {}

    def send(self, data: torch.Tensor, talk: ControlChannel, before: DeviceEvent) -> Conversation[DeviceEvent]:
        pair = self._pair(talk.peer)
        talk.say(self.name, _OFFER.pack(self._device, self._bindings.version, pair.unique_id))
        answer = yield from talk.hear()
        unique_id, turn = _READY.unpack(answer.content)
        pair.meet(unique_id)
        turn = pair.next_turn() if pair.decides else turn
        mark = yield from pair.put("send", data, turn, before)
        yield talk.say(content=_TURN.pack(turn))
        return mark

    def receive(
        self, data: torch.Tensor, talk: ControlChannel, offer: bytes, before: DeviceEvent
    ) -> Conversation[DeviceEvent]:
        device, version, unique_id = _OFFER.unpack(offer)
        if device == self._device:
            raise TransferRefused("they share one device, and NCCL takes one rank a device")
        if version != self._bindings.version:
            raise TransferRefused(f"NCCL is {written(version)} there, and {written(self._bindings.version)} here")
        pair = self._pair(talk.peer)
        pair.meet(unique_id)
        ours = pair.next_turn() if pair.decides else 0
        talk.say(content=_READY.pack(pair.unique_id, ours))
        answer = yield from talk.hear()
        (turn,) = _TURN.unpack(answer.content)
        return (yield from pair.put("recv", data, turn, before))

    def _pair(self, peer: int) -> Pair:
        if peer not in self._pairs:
            self._pairs[peer] = Pair(self._bindings, self._site, peer)
        return self._pairs[peer]

    def trouble(self) -> Exception | None:
        made = [pair.made for pair in list(self._pairs.values()) if pair.made is not None]
        return next((trouble for one in made if (trouble := one.trouble()) is not None), None)

    def abort(self) -> None:
        for pair in list(self._pairs.values()):
            if pair.made is not None:
                pair.made.abort()

    def close(self) -> None:
        for pair in self._pairs.values():
            if pair.made is not None:
                pair.made.close()
