"""Point-to-point messages over NCCL, with one communicator for each pair of ranks that exchange messages.

`Nccl.make_p2p` creates `NcclP2P`; `devices.p2p` runs it. NCCL has no tags: both ranks must enqueue the messages of
their communicator in the same order. The lower of the two ranks decides this order. It gives each message a turn, a
number that counts from 0, when both ranks have called the operation:

    sender                                              receiver
    sends the offer                               ──>   has matched its receive; if lower, takes the next turn
    if lower, takes the next turn                 <──   answers with the turn, or with 0 if it is not lower
    enqueues the send at its turn, sends the turn ──>   enqueues the receive at its turn

So neither stream waits for an operation that the peer has not called. Each communicator has a stream of its own, so
that different pairs do not delay each other.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from typing import ClassVar

import torch

from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.transport.device_collectives import DeviceContext
from asyncdist.kernel.transport.device_p2p import ControlChannel, DeviceP2P, Transfer, TransferRefused
from asyncdist.kernel.transport.device_streams import DeviceEvent
from asyncdist_transports.nccl.bindings import BYTES, UNIQUE_ID_NBYTES, Bindings, version_text
from asyncdist_transports.nccl.communicator import Call, Communicator

# Device, NCCL version, unique id. The lower rank makes the id; the other one sends zeros while it does not know it.
_OFFER = struct.Struct(f"<16sI{UNIQUE_ID_NBYTES}s")
# Unique id, turn: the receiver's answer to an offer.
_READY = struct.Struct(f"<{UNIQUE_ID_NBYTES}sQ")
_TURN = struct.Struct("<Q")


class PairCommunicator:
    """The communicator shared with one peer, and its turns.

    All calls run in the executor of the point-to-point operations. Other threads may read ``made``.

    Attributes:
        streams: The communicator's own stream.
        decides: Whether this rank is the lower one, which has rank 0 in the communicator and assigns the turns.
        unique_id: NCCL's id of the communicator, made by the lower rank; zeros on the other rank until `meet`.
        made: The communicator, None before `meet`.
    """

    def __init__(self, bindings: Bindings, context: DeviceContext, peer: int) -> None:
        self._bindings = bindings
        self._context = context
        self.streams = context.streams.with_new_stream()
        self.decides = context.rank < peer
        self.unique_id = bindings.unique_id() if self.decides else bytes(UNIQUE_ID_NBYTES)
        self.made: Communicator | None = None
        self._unassigned_turns = itertools.count()
        self._current_turn = 0
        self._waiting_by_turn: dict[int, Work] = {}
        with self.streams.on_comm_stream():
            self._first_bytes = torch.zeros(2, dtype=torch.uint8, device=context.streams.device)

    def meet(self, unique_id: bytes) -> None:
        """Start to create the communicator. It is ready when the peer has called this, too. Idempotent.

        Args:
            unique_id: The id that the peer has sent; the lower rank ignores it.
        """
        if self.made is not None:
            return
        self.unique_id = self.unique_id if self.decides else unique_id
        own, other = (0, 1) if self.decides else (1, 0)
        make = functools.partial(self._bindings.communicator, 2, self.unique_id, own)
        # The first call of each direction blocks for the peer, so the communicator's own thread makes these two.
        sent, received = self._first_bytes[0].data_ptr(), self._first_bytes[1].data_ptr()
        first: list[Call] = [("send", sent, 1, BYTES, other), ("recv", received, 1, BYTES, other)]
        rank = self._context.host.member_ids[self._context.rank]
        self.made = Communicator(self._bindings, self.streams, make, first, rank)

    def next_turn(self) -> int:
        """Return the turn of another message. Only the lower rank calls this."""
        return next(self._unassigned_turns)

    def put(self, name: str, data: torch.Tensor, turn: int, before: DeviceEvent | None) -> Transfer[DeviceEvent]:
        """Enqueue a call when its turn has come.

        Args:
            name: "send" or "recv".
            data: What to send or to receive into.
            turn: The message's turn.
            before: The event after which ``data`` may be used.

        Returns:
            The event that the device passes when the call has completed.
        """
        made = self.made
        assert made is not None
        yield made.ready
        if turn != self._current_turn:
            self._waiting_by_turn[turn] = has_come = Work()
            yield has_come
        with self.streams.on_comm_stream():
            self.streams.wait_event(before)
            made.enqueue((name, data.data_ptr(), data.numel(), BYTES, 1 if self.decides else 0))
            event = self.streams.record_event()
        self.streams.record_stream(data)
        self._current_turn += 1
        following = self._waiting_by_turn.pop(self._current_turn, None)
        if following is not None:
            following.finish()
            following.run_callbacks()
        return event


class NcclP2P(DeviceP2P):
    """One rank's part of point-to-point transfers over NCCL."""

    name: ClassVar[str] = "nccl"

    def __init__(self, context: DeviceContext, bindings: Bindings) -> None:
        self._context, self._bindings = context, bindings
        # Equal on two ranks that use the same device, which NCCL does not support.
        identity = f"{context.machine}\0{context.streams.uuid}"
        self._device = hashlib.blake2b(identity.encode(), digest_size=16).digest()
        self._pairs: dict[int, PairCommunicator] = {}

    def send(self, data: torch.Tensor, channel: ControlChannel, before: DeviceEvent | None) -> Transfer[DeviceEvent]:
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
        self, data: torch.Tensor, channel: ControlChannel, offer: bytes, before: DeviceEvent | None
    ) -> Transfer[DeviceEvent]:
        device, version, unique_id = _OFFER.unpack(offer)
        if device == self._device:
            raise TransferRefused("both ranks share one device, and NCCL needs a device per rank")
        if version != self._bindings.version:
            own_version = version_text(self._bindings.version)
            raise TransferRefused(f"NCCL is {version_text(version)} on the sender, but {own_version} on the receiver")
        pair = self._pair(channel.peer)
        pair.meet(unique_id)
        assigned = pair.next_turn() if pair.decides else 0
        channel.send(payload=_READY.pack(pair.unique_id, assigned))
        answer = yield from channel.recv()
        (turn,) = _TURN.unpack(answer.payload)
        return (yield from pair.put("recv", data, turn, before))

    def _pair(self, peer: int) -> PairCommunicator:
        if peer not in self._pairs:
            self._pairs[peer] = PairCommunicator(self._bindings, self._context, peer)
        return self._pairs[peer]

    @property
    def _communicators(self) -> list[Communicator]:
        return [pair.made for pair in list(self._pairs.values()) if pair.made is not None]

    def async_error(self) -> Exception | None:
        errors = (communicator.async_error() for communicator in self._communicators)
        return next((error for error in errors if error is not None), None)

    def abort(self) -> None:
        for communicator in self._communicators:
            communicator.abort()

    def close(self) -> None:
        for communicator in self._communicators:
            communicator.close()
