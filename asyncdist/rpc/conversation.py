"""What a session does with the messages of its channels: it is the handler of its port.

Each channel has a `Caller`, for the calls of this process, and a `Callee`, for those of the peer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import msgpack

from asyncdist.base.callables import Callback
from asyncdist.base.descriptors import close_all
from asyncdist.errors import PeerLostError, ProtocolError
from asyncdist.net import IncomingMessage, PeerChannel
from asyncdist.rpc.caller import Caller, HeldAnswer, Unwanted
from asyncdist.rpc.execution import Callee, CallResources, Execution
from asyncdist.rpc.loans import Buffer, ChannelLoans
from asyncdist.rpc.values import Carrier, run_aside
from asyncdist.rpc.wire import CALL, CANCEL, CREDIT, GRANT, ITEM, LENT_BYTES, OFFER, RELEASE, RESULT, VERSION

CREDITS = 1024
"""The calls of one caller that a callee accepts at a time. Further ones wait at the caller."""
WINDOW_NBYTES = 256 << 20
"""The bytes of long arguments of one caller that a callee accepts at a time; a single call may have more."""

_LENGTHS = {CALL: 7, RESULT: 3, ITEM: 3, LENT_BYTES: 3}
"""The fields of the messages that may have buffers, up to the value."""


class Conversation:
    """The calls of both directions over one channel. It is the ``context`` of the channel."""

    def __init__(self, channel: PeerChannel, resources: CallResources) -> None:
        version = channel.peer.about["version"]
        if version != VERSION:
            raise ProtocolError(f"it makes calls of version {version}, and this process of {VERSION}")
        self.channel, self.resources = channel, resources
        self.loans = ChannelLoans(channel, resources.lending)
        self.caller = Caller(channel, resources.carrier, self.loans, resources.value_threads, resources.call_timeout)
        self.callee = Callee(channel, resources, self.loans, CREDITS)


def conversation_of(channel: PeerChannel) -> Conversation:
    """Return the conversation over a channel whose peer was not refused."""
    conversation: Conversation = channel.context
    return conversation


class ConversationHandler:
    """Handles the messages of all channels of a session."""

    def __init__(self, resources: CallResources) -> None:
        self._resources, self._references = resources, resources.references

    def connected(self, channel: PeerChannel) -> None:
        channel.context = Conversation(channel, self._resources)

    def received(
        self, channel: PeerChannel, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]
    ) -> None:
        if descriptors:
            close_all(descriptors)
            raise ProtocolError("a call with descriptors")
        conversation = conversation_of(channel)
        try:
            message = self._resources.carrier.unpack_fast(head, buffers)
        # Values that are not plain are read below, and damaged ones fail again.
        except Exception:
            message = None
        # The value is None if it is the first buffer, and a loan has a number behind it.
        if message is None or (buffers and (message[-1] is None or type(message[-1]) is int)):
            arriving = ValueMessage.begin(conversation, head)
            if arriving is not None:
                arriving.complete(head, buffers)
            else:
                _discard(self._resources.carrier, head, buffers)
            return
        kind = message[0]
        if kind == CALL:
            execution = conversation.callee.called(message[1:6], is_ready=True)
            if execution is not None:
                conversation.callee.arrived(execution, message[6])
        elif kind == CANCEL:
            conversation.callee.cancel(message[1])
        elif kind == CREDIT:
            conversation.callee.credit(message[1], message[2])
        elif kind == RELEASE:
            self._references.released(channel, message[1], message[2])
        elif kind == GRANT:
            self._references.granted(channel, message[1], message[2])
        elif kind >= OFFER:
            conversation.loans.received(message, buffers)
        else:
            conversation.caller.answered(message)

    def opened(self, channel: PeerChannel, message: IncomingMessage) -> None:
        conversation = conversation_of(channel)
        arriving = message.context = ValueMessage.begin(conversation, message.head, is_ready=False)
        if arriving is None:
            message.drop(Unwanted())
            _discard(self._resources.carrier, message.head, ())
        elif arriving.kind == RESULT:
            conversation.caller.receive_into(arriving.number, message)

    def completed(self, channel: PeerChannel, message: IncomingMessage) -> None:
        arriving: ValueMessage | None = message.context
        if arriving is not None and message.error is None:
            arriving.complete(message.head, message.buffers)
        elif arriving is not None:
            arriving.give_back()
            why = message.error or type(message.error).__name__
            arriving.unreadable(f"{message.nbytes} bytes cannot be received: {why}")

    def withdrawn(self, channel: PeerChannel, message: IncomingMessage) -> None:
        arriving: ValueMessage | None = message.context
        if arriving is not None:
            arriving.give_back()
            if arriving.call is not None:
                conversation_of(channel).callee.cancel(arriving.number)

    def closed(self, channel: PeerChannel, error: PeerLostError) -> None:
        conversation: Conversation | None = channel.context
        if conversation is None:  # the peer was refused
            return
        conversation.caller.closed(error)
        conversation.callee.closed()
        conversation.loans.closed(error)
        self._references.drop_absent(channel.peer.id)


class ValueMessage:
    """A call or an answer whose value arrives in buffers, or the content of a loan.

    Args:
        is_outside: Whether the value is the first buffer instead of a part of the head.
        loan: The number of the loan of its tensors; 0 for none.
    """

    _head: bytes
    _buffers: Sequence[memoryview]
    _content: tuple[bytes | memoryview, Sequence[Buffer]]
    """The bytes of the value, or the head with the value in it, and the buffers of its tensors."""
    _held: HeldAnswer

    def __init__(
        self, conversation: Conversation, kind: int, number: int, *, is_outside: bool = False, loan: int = 0
    ) -> None:
        self._conversation, self._carrier = conversation, conversation.resources.carrier
        self.kind, self.number = kind, number
        self.call: Execution | None = None
        """The call, if this process runs it."""
        self._is_outside, self._loan = is_outside, loan

    @classmethod
    def begin(cls, conversation: Conversation, head: bytes, *, is_ready: bool = True) -> ValueMessage | None:
        """Note a call or an answer whose value is read later; None if no call wants the value."""
        try:
            envelope = msgpack.unpackb(head, strict_map_key=False, ext_hook=_unread, unicode_errors="surrogatepass")
        except ValueError as cause:
            raise ProtocolError(f"a message that is not legible: {cause}") from cause
        kind, number = envelope[:2]
        if kind not in _LENGTHS:
            raise ProtocolError(f"a message of kind {kind!r} with buffers")
        if kind == LENT_BYTES:
            return cls(conversation, kind, number) if conversation.loans.awaits(number) else None
        length = _LENGTHS[kind]
        loan = envelope[length] if len(envelope) > length else 0
        message = cls(conversation, kind, number, is_outside=envelope[length - 1] is None, loan=loan)
        if kind == CALL:
            message.call = conversation.callee.called(envelope[1:6], is_ready=is_ready and not loan)
        if message.call is not None or (kind != CALL and conversation.caller.expects(number)):
            return message
        message.give_back()
        return None

    def give_back(self) -> None:
        """Return the loan of its tensors, which are not read, if it has one."""
        if self._loan:
            self._conversation.loans.give_back(self._loan)

    def complete(self, head: bytes, buffers: Sequence[memoryview]) -> None:
        """Read the value, all of whose bytes have arrived, and deliver it."""
        loans = self._conversation.loans
        self._head, self._buffers = head, buffers
        if self.kind == LENT_BYTES:
            loans.content_arrived(self.number, buffers, msgpack.unpackb(head)[2])
        elif self._loan:
            self._conversation.resources.lending.spawn(self._borrow())
        else:
            self.arrived(buffers)

    def unreadable(self, reason: str) -> None:
        """Say why there is no value."""
        if self.kind == LENT_BYTES:
            self._conversation.loans.content_arrived(self.number, (), reason)
        elif self.call is not None:
            self._conversation.callee.refuse(self.call, f"its arguments cannot be read: {reason}")
        else:
            self._conversation.caller.unreadable(self.number, f"its result cannot be read: {reason}")

    def _is_wanted(self) -> bool:
        return self._conversation.caller.expects(self.number) if self.call is None else not self.call.is_cancelled

    async def _borrow(self) -> None:
        filled, reason = await self._conversation.loans.borrow(self._loan, self._buffers, self._is_wanted)
        try:
            if filled is not None and self._is_wanted():
                self.arrived(filled)
                return
            _discard(self._carrier, self._head, self._buffers)
            if reason and self._is_wanted():
                self.unreadable(reason)
        except Exception as error:
            self._conversation.channel.fail_by(error)

    # -- reading -----------------------------------------------------------------------------------

    def arrived(self, buffers: Sequence[Buffer]) -> None:
        """Read the value at once, or in a thread if that takes long; later answers to the call then wait."""
        data: bytes | memoryview = self._head
        if self._is_outside and buffers:
            assert isinstance(buffers[0], memoryview)
            data, buffers = buffers[0], buffers[1:]
        self._content = data, buffers
        threads = self._conversation.resources.value_threads
        if not self._carrier.takes_long(data, buffers) or not run_aside(threads, self._read_in_thread):
            self._read()
        elif self.call is None:
            self._held = self._conversation.caller.hold_answer(self.number)

    def _read(self) -> None:
        try:
            value = self._carrier.unpack(*self._content)
        except ProtocolError as error:
            self.unreadable(error.summary)
        else:
            self._deliver(value)

    def _deliver(self, value: Any) -> None:
        # The data of a value outside of the head is the value alone.
        value = value if self._is_outside else value[_LENGTHS[self.kind] - 1]
        if self.call is not None:
            self._conversation.callee.arrived(self.call, value)
        else:
            self._conversation.caller.answered((self.kind, self.number, value))

    def _read_in_thread(self) -> Callback:
        deliver: Callback
        try:
            deliver = functools.partial(self._deliver, self._carrier.unpack_aside(*self._content))
        # It has references, or is damaged: the loop reads it.
        except ProtocolError:
            deliver = self._read
        return functools.partial(self._end, deliver)

    def _end(self, deliver: Callback) -> None:
        try:
            if self.call is None:
                self._conversation.caller.take_held(self.number, self._held, deliver)
            elif not self.call.is_cancelled:
                deliver()
        except Exception as error:
            self._conversation.channel.fail_by(error)


def _discard(carrier: Carrier, head: bytes, buffers: Sequence[memoryview]) -> None:
    """Take the references out of a message that no call wants, and drop them, so that their holds are returned."""
    with contextlib.suppress(ProtocolError):
        envelope = carrier.unpack_references(head)
        if buffers and envelope[_LENGTHS[envelope[0]] - 1] is None:
            carrier.unpack_references(buffers[0])


def _unread(code: int, data: bytes) -> object:
    """Stand for a value that is read later."""
    return ...
