"""Device tensors of messages that the receiver reads where they lie: the loans of both directions over one channel.

docs/architecture.md describes the way of such a tensor. Until the peer has accepted the OFFER, and after a refusal, tensors
go through host memory, so that no call waits for the answer, or fails because of it. The sender keeps lent tensors until
the peer has RETURNED the loan, which it does exactly once for each message that arrives, or until the channel ends. A peer
that cannot map a tensor after all has DECLINED the loan; the sender then sends its content as LENT_BYTES.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgpack
import torch

from asyncdist.base.callables import Callback, Predicate
from asyncdist.base.error_text import describe_error
from asyncdist.errors import PeerLostError, ProtocolError
from asyncdist.kernel import (
    DeviceEvent,
    DeviceLending,
    DeviceLoan,
    DeviceLoans,
    OwnerHasEnded,
    TransferRefused,
    input_memory,
    tensor_of,
)
from asyncdist.net import PeerChannel
from asyncdist.rpc.wire import ANSWER, DECLINED, LENT_BYTES, OFFER, RETURNED, pack_plain

log = logging.getLogger("asyncdist")

_channel_numbers = itertools.count(1)
_MOST_REASON = 500
"""The most characters of the reason of a refusal."""

_LENT = memoryview(b"")
"""The buffer of a message that takes the place of a lent tensor."""

Buffer = memoryview | torch.Tensor
"""The content of a tensor that has arrived: in host memory, or as a uint8 tensor of a device."""


class DevicePart:
    """A device tensor of a message, flat and contiguous, which is lent to its receiver or copied to host memory."""

    def __init__(self, tensor: torch.Tensor, loans: DeviceLoans) -> None:
        self.raw, self.loans = tensor.view(torch.uint8), loans
        self.ready: DeviceEvent | None = None
        """The event after which its device has computed it; `mark_ready` sets it."""
        self._in_host_memory: memoryview | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, loans: DeviceLoans, *, snapshot: bool) -> DevicePart | None:
        """Return a tensor as a part of a message; None if the device has no memory for a copy that is needed."""
        plain = tensor_of(tensor)
        try:
            dense = plain.resolve_conj().resolve_neg().contiguous()
            if snapshot and dense.data_ptr() == plain.data_ptr():
                dense = dense.clone()
            return cls(dense.as_strided((dense.numel(),), (1,)), loans)
        except torch.OutOfMemoryError:
            return None

    def in_host_memory(self) -> memoryview:
        """Return a copy in host memory, made on first use. Blocks until the device has made it."""
        if self._in_host_memory is None:
            assert self.ready is not None
            with self.loans.streams.ordered_after(self.ready):
                self._in_host_memory = input_memory(self.raw.cpu()).view
        return self._in_host_memory


def mark_ready(parts: Iterable[DevicePart]) -> None:
    """Record an event on each device for the parts of a message, which the calling thread has just made."""
    events: dict[int, DeviceEvent] = {}
    for part in parts:
        if id(part.loans) not in events:
            events[id(part.loans)] = part.loans.streams.record_event()
        part.ready = events[id(part.loans)]


class TensorLender(Protocol):
    """Decides which device tensors of a message may be lent."""

    def part(self, tensor: torch.Tensor, *, snapshot: bool) -> DevicePart | None:
        """Return a tensor as a part of a message; None if it goes through host memory. Thread-safe.

        With ``snapshot`` it is copied, because it may change before it is read.
        """


@dataclass(eq=False)
class MessageLoan:
    """The tensors of one message that are lent to its receiver.

    Attributes:
        number: The number of the loan, unique among those of its sender over one channel.
        parts: The lent tensors.
        ended: Whether the tensors are read no more.
        on_end: Called once on the loop when they are read no more.
    """

    number: int
    parts: list[DevicePart] = field(default_factory=list)
    held: list[tuple[DeviceLoans, DeviceLoan]] = field(default_factory=list)
    ended: bool = False
    on_end: Callback | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.raw.nbytes for part in self.parts)

    def end(self) -> None:
        """Release the tensors. Idempotent."""
        if self.ended:
            return
        self.ended = True
        for loans, loan in self.held:
            loans.end(loan)
        self.parts, self.held = [], []
        if self.on_end is not None:
            self.on_end()


@dataclass(eq=False)
class _Offer:
    """The offer of a device, and the answer of the peer."""

    device: torch.device
    number: int
    loans: DeviceLoans | None = None
    """The loans of the device, when the peer has accepted the offer."""


class ChannelLoans:
    """The loans of both directions over one channel. It is a `TensorLender` for the peer."""

    def __init__(self, channel: PeerChannel, lending: DeviceLending) -> None:
        self._channel, self._lending = channel, lending
        self._loop = asyncio.get_running_loop()
        self._owner = f"{channel.peer.id}, channel {next(_channel_numbers)}"
        """The peer, for the devices of this process: another channel to it has mappings of its own."""
        self._numbers = itertools.count(1)
        self._offers: dict[torch.device, _Offer] = {}
        """The offers to the peer. A thread that packs a result may add an offer at any time."""
        self._lent: dict[int, MessageLoan] = {}
        self._returned: asyncio.Future[None] | None = None
        self._accepted: set[str] = set()
        """The kinds of devices whose memory this process maps."""
        self._awaited: dict[int, asyncio.Future[Sequence[Buffer]]] = {}
        """The content of loans that this process has declined."""

    # -- lending: any thread ----------------------------------------------------------------------------

    def lends(self, tensor: torch.Tensor) -> DeviceLoans | None:
        """Return what may lend a tensor to the peer, None for nothing. The first tensor of a device begins the offer."""
        if not self._channel.is_local or tensor.nbytes <= DeviceLoans.min_nbytes:
            return None
        offer = self._offers.get(tensor.device)
        if offer is None:
            offer = _Offer(tensor.device, next(self._numbers))
            if self._offers.setdefault(tensor.device, offer) is offer:
                self._loop.call_soon_threadsafe(self._begin_offer, offer)
            return None
        loans = offer.loans
        if loans is None or tensor.nbytes <= loans.min_nbytes or loans.streams.is_capturing():
            return None
        return loans if loans.can_lend(tensor) else None

    def part(self, tensor: torch.Tensor, *, snapshot: bool) -> DevicePart | None:
        loans = self.lends(tensor)
        return None if loans is None else DevicePart.of(tensor, loans, snapshot=snapshot)

    # -- lending: the loop ------------------------------------------------------------------------------

    def _begin_offer(self, offer: _Offer) -> None:
        if self._channel.is_open:
            self._lending.spawn(self._make_offer(offer))

    async def _make_offer(self, offer: _Offer) -> None:
        try:
            loans = await self._lending.open(offer.device)
        except TransferRefused as why:
            self._log_refusal(offer, str(why))
            return
        self._send([OFFER, offer.number, offer.device.type, loans.name, loans.probe])

    def attach(self, buffers: Sequence[memoryview | DevicePart]) -> tuple[Sequence[memoryview], MessageLoan | None]:
        """Return the buffers of a message, and the loan of those of its device tensors that are lent.

        The message must be sent with the number of the loan, or the loan be ended.
        """
        for each in buffers:
            if type(each) is DevicePart:
                break
        else:
            return buffers, None  # type: ignore[return-value]
        loan, places = MessageLoan(next(self._numbers)), []
        groups: dict[int, list[tuple[int, DevicePart]]] = {}
        for place, each in enumerate(buffers):
            if isinstance(each, DevicePart):
                groups.setdefault(id(each.loans), []).append((place, each))
        for group in groups.values():
            places += self._lend(loan, group)
        lent = {place for place, *_ in places}
        try:
            plain = [
                each if not isinstance(each, DevicePart) else _LENT if place in lent else each.in_host_memory()
                for place, each in enumerate(buffers)
            ]
        except BaseException:
            loan.end()
            raise
        if not places:
            return plain, None
        self._lent[loan.number] = loan
        return [*plain, memoryview(msgpack.packb(places))], loan

    def _lend(self, loan: MessageLoan, group: Sequence[tuple[int, DevicePart]]) -> list[list[Any]]:
        """Add tensors of one device to a loan; return the place, kind, bytes and location of each that is lent."""
        parts = [part for _, part in group]
        loans, ready = parts[0].loans, parts[0].ready
        assert ready is not None
        offer = next((each for each in list(self._offers.values()) if each.loans is loans), None)
        # Other receivers of the same call accept them, and this one does not.
        if offer is None:
            return []
        try:
            lent = loans.lend([part.raw for part in parts], ready)
        # Drivers raise errors of any type.
        except Exception as cause:
            self._refuse(offer, f"this process cannot lend them: {describe_error(cause)}")
            return []
        loan.parts += parts
        loan.held.append((loans, lent))
        kind = offer.device.type
        return [
            [place, kind, part.raw.nbytes, location]
            for (place, part), location in zip(group, lent.locations, strict=True)
        ]

    async def all_returned(self) -> None:
        """Wait until the peer has returned all loans, or the channel has ended."""
        while self._lent:
            if self._returned is None:
                self._returned = self._loop.create_future()
            await asyncio.wait([self._returned])

    def end(self, number: int) -> None:
        """End a loan, which the peer has returned or whose message has not been sent."""
        loan = self._lent.pop(number, None)
        if loan is not None:
            loan.end()
        if not self._lent and self._returned is not None:
            self._returned.set_result(None)
            self._returned = None

    def _answered(self, number: int, reason: str) -> None:
        offer = next((each for each in list(self._offers.values()) if each.number == number), None)
        if offer is None:
            raise ProtocolError(f"an answer to offer {number}, which was not made")
        if reason:
            self._log_refusal(offer, reason)
            return
        offer.loans = self._lending.loans_of(offer.device)
        log.info("%s reads tensors of %s where they lie", self._channel.peer.name, offer.device)

    def _declined(self, number: int, reason: str) -> None:
        """Send the content of a loan that the peer cannot read, and lend it nothing of these devices any more."""
        loan = self._lent.get(number)
        if loan is None:
            raise ProtocolError(f"loan {number} was declined, which was not made")
        for offer in list(self._offers.values()):
            if offer.loans is not None and any(offer.loans is part.loans for part in loan.parts):
                self._refuse(offer, reason)
        try:
            self._send([LENT_BYTES, number, ""], [part.in_host_memory() for part in loan.parts])
        # A device that has failed raises errors of any type.
        except Exception as cause:
            self._send([LENT_BYTES, number, f"they cannot be sent from host memory: {describe_error(cause)}"])

    def _refuse(self, offer: _Offer, reason: str) -> None:
        if offer.loans is not None:
            offer.loans = None
            self._log_refusal(offer, reason)

    def _log_refusal(self, offer: _Offer, reason: str) -> None:
        log.info("tensors of %s go to %s through host memory: %s", offer.device, self._channel.peer.name, reason)

    # -- borrowing ----------------------------------------------------------------------------------------

    async def _answer(self, number: int, kind: str, name: str, probe: bytes) -> None:
        reason = ""
        try:
            await self._lending.verify(kind, name, self._owner, probe)
            self._accepted.add(kind)
        # Drivers raise errors of any type.
        except Exception as cause:
            reason = str(cause) if isinstance(cause, TransferRefused) else describe_error(cause)
        self._send([ANSWER, number, reason[:_MOST_REASON]])

    def give_back(self, number: int) -> None:
        """Return a loan whose message is not wanted any more."""
        self._send([RETURNED, number])

    async def borrow(
        self, number: int, buffers: Sequence[memoryview], is_wanted: Predicate
    ) -> tuple[Sequence[Buffer] | None, str]:
        """Read the lent tensors of a message that has arrived, and return the loan.

        Returns:
            The buffers with copies of the tensors, or None, and the reason why they cannot be read; neither if the message
            is not wanted any more.
        """
        filled, reason = None, ""
        try:
            filled = await self._filled(number, buffers, lambda: self._channel.is_open and is_wanted())
        except (OwnerHasEnded, PeerLostError):
            pass
        except torch.OutOfMemoryError as error:
            reason = f"the device has no memory for its tensors: {error}"
        except Exception as error:
            reason = f"its device tensors cannot be read: {describe_error(error)}"
        self.give_back(number)
        return filled, reason

    async def _filled(self, number: int, buffers: Sequence[memoryview], is_wanted: Predicate) -> list[Buffer] | None:
        """Return the buffers of a message with copies of its lent tensors; None if it is not wanted any more."""
        places = [(int(place), str(kind), int(n), bytes(at)) for place, kind, n, at in msgpack.unpackb(buffers[-1])]
        filled: list[Buffer] = list(buffers[:-1])
        try:
            copies = await self._read(places, is_wanted)
        except (OwnerHasEnded, torch.OutOfMemoryError):
            raise
        # Drivers raise errors of any type.
        except Exception as cause:
            copies = await self._decline(number, describe_error(cause)) if is_wanted() else None
        if copies is None:
            return None
        for (place, *_), copy in zip(places, copies, strict=True):
            if filled[place].nbytes:
                raise ValueError(f"buffer {place} is not that of a lent tensor")
            filled[place] = copy
        return filled

    async def _read(
        self, places: Sequence[tuple[int, str, int, bytes]], is_wanted: Predicate
    ) -> Sequence[Buffer] | None:
        kind = places[0][1]
        if any(each != kind or each not in self._accepted for _, each, *_ in places):
            raise TransferRefused(f"this process has not accepted tensors on {kind}")
        lent = [(nbytes, location) for _, _, nbytes, location in places]
        return await self._lending.read(self._owner, kind, lent, is_wanted)

    async def _decline(self, number: int, reason: str) -> Sequence[Buffer]:
        """Ask for the content of a loan in host memory."""
        content: asyncio.Future[Sequence[Buffer]] = self._loop.create_future()
        self._awaited[number] = content
        self._send([DECLINED, number, reason[:_MOST_REASON]])
        return await content

    def awaits(self, number: int) -> bool:
        """Return whether the content of a loan is awaited in host memory."""
        return number in self._awaited

    def content_arrived(self, number: int, buffers: Sequence[memoryview], reason: str = "") -> None:
        """Handle the content of a loan that this process has declined, or the reason why it cannot arrive."""
        content = self._awaited.pop(number, None)
        if content is None:
            raise ProtocolError(f"the content of loan {number}, which was not declined")
        # The task that awaited it may have been cancelled.
        if content.done():
            return
        if reason:
            content.set_exception(TransferRefused(reason))
        else:
            content.set_result(buffers)

    # -- the channel ----------------------------------------------------------------------------------------

    def received(self, message: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        kind, number, *rest = message
        if kind == OFFER:
            self._lending.spawn(self._answer(number, *rest))
        elif kind == ANSWER:
            self._answered(number, *rest)
        elif kind == RETURNED:
            self.end(number)
        elif kind == DECLINED:
            self._declined(number, *rest)
        else:
            self.content_arrived(number, buffers, *rest)

    def _send(self, message: list[Any], buffers: Sequence[memoryview] = ()) -> None:
        if self._channel.is_open:
            self._channel.send(pack_plain(message), buffers)

    def closed(self, error: PeerLostError) -> None:
        """End all loans: the channel has ended."""
        for offer in list(self._offers.values()):
            offer.loans = None
        for number in list(self._lent):
            self.end(number)
        for content in self._awaited.values():
            if not content.done():
                content.set_exception(error)
        self._awaited.clear()
        self._lending.abandon(self._owner)


class AnyLender:
    """Lends tensors of a message to several peers, if at least one accepts them."""

    def __init__(self, lenders: Iterable[ChannelLoans]) -> None:
        self._lenders = list(dict.fromkeys(lenders))

    def part(self, tensor: torch.Tensor, *, snapshot: bool) -> DevicePart | None:
        # `lends` makes an offer, so that each learns whether its peer accepts such tensors.
        willing = [loans for each in self._lenders if (loans := each.lends(tensor)) is not None]
        return DevicePart.of(tensor, willing[0], snapshot=snapshot) if willing else None
