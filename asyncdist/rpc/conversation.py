"""What a session does with the messages of its channels: it is the handler of its port.

Each channel has a `Caller`, for the calls of this process, and a `Callee`, for those of the peer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from asyncdist.base.callables import Callback
from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.base.descriptors import close_all
from asyncdist.errors import PeerLostError, ProtocolError
from asyncdist.net import IncomingMessage, PeerChannel
from asyncdist.rpc.calls import Caller
from asyncdist.rpc.execution import Callee, CallResources, Execution
from asyncdist.rpc.loans import Buffer, ChannelLoans
from asyncdist.rpc.references import ReferenceTable
from asyncdist.rpc.values import run_aside
from asyncdist.rpc.wire import CALL, CANCEL, CREDIT, GRANT, ITEM, LENT_BYTES, OFFER, RELEASE, RESULT, VERSION

CREDITS = 1024
"""The calls of one caller that a callee accepts at a time. Further ones wait at the caller."""
WINDOW_NBYTES = 256 << 20
"""The bytes of long arguments of one caller that a callee accepts at a time; a single call may have more."""

_LENGTHS = {CALL: 7, RESULT: 3, ITEM: 3, LENT_BYTES: 3}
"""The fields of the messages that may have buffers, up to the value."""


class Conversation:
    """The calls of both directions over one channel. It is the ``context`` of the channel."""

    def __init__(self, channel: PeerChannel, resources: CallResources, timeout: float) -> None:
        about = channel.peer.about
        if about["version"] != VERSION:
            raise ProtocolError(f"it makes calls of version {about['version']}, and this process of {VERSION}")
        self.channel = channel
        self.loans = ChannelLoans(channel, resources.lending)
        self.caller = Caller(
            channel,
            resources.carrier,
            self.loans,
            resources.value_threads,
            credits=about["credits"],
            window_nbytes=about["window"],
            timeout=timeout,
        )
        self.callee = Callee(channel, resources, self.loans, CREDITS)


def conversation_of(channel: PeerChannel) -> Conversation:
    """Return the conversation over a channel whose peer was not refused."""
    conversation: Conversation = channel.context
    return conversation


class ConversationHandler:
    """Handles the messages of all channels of a session.

    Args:
        resources: What the callers of the session share.
        timeout: Seconds of a call without a timeout of its own.
    """

    def __init__(self, resources: CallResources, timeout: float, references: ReferenceTable) -> None:
        self._resources, self._timeout, self._references = resources, timeout, references

    def connected(self, channel: PeerChannel) -> None:
        channel.context = Conversation(channel, self._resources, self._timeout)

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
            context = self._begin(conversation, head)
            if context is not None:
                self._complete(conversation, context, head, buffers)
            else:
                self._discard(head, buffers)
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
        if message.descriptors:
            close_all(message.descriptors)
            raise ProtocolError("a call with descriptors")
        conversation = conversation_of(channel)
        context = message.context = self._begin(conversation, message.head, is_ready=False)
        if context is None:
            message.drop(CancelledMessage())
            self._discard(message.head, ())
        elif context.kind == RESULT:
            conversation.caller.receive_into(context.number, message)

    def completed(self, channel: PeerChannel, message: IncomingMessage) -> None:
        conversation, context = conversation_of(channel), _context_of(message)
        if context is None:
            return
        if message.error is None:
            self._complete(conversation, context, message.head, message.buffers)
        else:
            reason = f"{message.nbytes} bytes cannot be received: {message.error or type(message.error).__name__}"
            self._give_back(conversation, context.loan)
            self._unreadable(conversation, context, reason)

    def withdrawn(self, channel: PeerChannel, message: IncomingMessage) -> None:
        conversation, context = conversation_of(channel), _context_of(message)
        if context is None:
            return
        self._give_back(conversation, context.loan)
        if context.call is not None:
            conversation.callee.cancel(context.number)

    def closed(self, channel: PeerChannel, error: PeerLostError, messages: Sequence[IncomingMessage]) -> None:
        conversation: Conversation | None = channel.context
        if conversation is None:  # the peer was refused
            return
        conversation.caller.closed(error)
        conversation.callee.closed()
        conversation.loans.closed(error)
        self._references.departed(channel)

    # -- messages with buffers ---------------------------------------------------------------------

    def _begin(self, conversation: Conversation, head: bytes, *, is_ready: bool = True) -> ValueContext | None:
        """Note a call or an answer whose value is read later; None if no call wants the value."""
        try:
            envelope = msgpack.unpackb(head, strict_map_key=False, ext_hook=_unread, unicode_errors="surrogatepass")
        except ValueError as cause:
            raise ProtocolError(f"a message that is not legible: {cause}") from cause
        kind, number = envelope[:2]
        if kind not in _LENGTHS:
            raise ProtocolError(f"a message of kind {kind!r} with buffers")
        if kind == LENT_BYTES:
            return ValueContext(kind, number) if conversation.loans.awaits(number) else None
        length = _LENGTHS[kind]
        loan = envelope[length] if len(envelope) > length else 0
        is_outside = envelope[length - 1] is None
        if kind == CALL:
            execution = conversation.callee.called(envelope[1:6], is_ready=is_ready and not loan)
            if execution is not None:
                return ValueContext(kind, number, execution, is_outside, loan)
        elif conversation.caller.expects(number):
            return ValueContext(kind, number, None, is_outside, loan)
        self._give_back(conversation, loan)
        return None

    def _give_back(self, conversation: Conversation, loan: int) -> None:
        """Return the loan of a message whose tensors are not read, if it has one."""
        if loan:
            conversation.loans.give_back(loan)

    def _discard(self, head: bytes, buffers: Sequence[memoryview]) -> None:
        """Take the references out of a message that no call wants, and drop them, so that their holds are returned."""
        carrier = self._resources.carrier
        with contextlib.suppress(ProtocolError):
            envelope = carrier.unpack_references(head)
            if buffers and envelope[_LENGTHS[envelope[0]] - 1] is None:
                carrier.unpack_references(buffers[0])

    def _complete(
        self, conversation: Conversation, context: ValueContext, head: bytes, buffers: Sequence[memoryview]
    ) -> None:
        if context.kind == LENT_BYTES:
            conversation.loans.content_arrived(context.number, buffers, msgpack.unpackb(head)[2])
        elif context.loan:
            conversation.loans.borrow(context.loan, buffers, _LentMessage(self, conversation, context, head, buffers))
        else:
            self._unpack(conversation, context, head, buffers)

    def _unpack(
        self, conversation: Conversation, context: ValueContext, head: bytes, buffers: Sequence[Buffer]
    ) -> None:
        data: bytes | memoryview = head
        if context.is_outside and buffers:
            assert isinstance(buffers[0], memoryview)
            data, buffers = buffers[0], buffers[1:]
        message = _ValueMessage(self, conversation, context, data, buffers)
        if not self._resources.carrier.takes_long(data, buffers) or not message.read_aside(
            self._resources.value_threads
        ):
            message.read()

    def _arrived(self, conversation: Conversation, context: ValueContext, value: Any) -> None:
        if context.call is not None:
            conversation.callee.arrived(context.call, value)
        else:
            conversation.caller.answered((context.kind, context.number, value))

    def _unreadable(self, conversation: Conversation, context: ValueContext, reason: str) -> None:
        if context.kind == LENT_BYTES:
            conversation.loans.content_arrived(context.number, (), reason)
        elif context.call is not None:
            conversation.callee.refuse(context.call, f"its arguments cannot be read: {reason}")
        else:
            conversation.caller.unreadable(context.number, f"its result cannot be read: {reason}")


class _LentMessage:
    """A message with lent tensors, which are being read: the `Borrower` of its loan."""

    def __init__(
        self,
        handler: ConversationHandler,
        conversation: Conversation,
        context: ValueContext,
        head: bytes,
        buffers: Sequence[memoryview],
    ) -> None:
        self._handler, self._conversation, self._context = handler, conversation, context
        self._head, self._buffers = head, buffers

    def is_wanted(self) -> bool:
        call = self._context.call
        return self._conversation.caller.expects(self._context.number) if call is None else not call.is_cancelled

    def arrived(self, buffers: Sequence[Buffer]) -> None:
        self._handler._unpack(self._conversation, self._context, self._head, buffers)

    def failed(self, reason: str) -> None:
        self._handler._discard(self._head, self._buffers)
        self._handler._unreadable(self._conversation, self._context, reason)

    def dropped(self) -> None:
        self._handler._discard(self._head, self._buffers)


class _ValueMessage:
    """A message whose value is read at once, or in a thread if that takes long; later answers to the call then wait."""

    def __init__(
        self,
        handler: ConversationHandler,
        conversation: Conversation,
        context: ValueContext,
        data: bytes | memoryview,
        buffers: Sequence[Buffer],
    ) -> None:
        self._handler, self._conversation, self._context = handler, conversation, context
        self._data, self._buffers = data, buffers
        self._carrier = handler._resources.carrier

    def read(self) -> None:
        """Read the value, and deliver it."""
        try:
            value = self._carrier.unpack(self._data, self._buffers)
        except ProtocolError as error:
            self._handler._unreadable(self._conversation, self._context, error.summary)
            return
        self._deliver(value)

    def _deliver(self, value: Any) -> None:
        context = self._context
        # The data of a value outside of the head is the value alone.
        self._handler._arrived(self._conversation, context, value if context.is_outside else value[context.place])

    def read_aside(self, threads: DaemonThreadPool) -> bool:
        """Begin to read the value in a thread; return False if the session has no threads any more."""
        if not run_aside(threads, self._read_in_thread):
            return False
        if self._context.call is None:
            self._held = self._conversation.caller.hold_answer(self._context.number)
        return True

    def _read_in_thread(self) -> Callback:
        deliver: Callback
        try:
            deliver = functools.partial(self._deliver, self._carrier.unpack_aside(self._data, self._buffers))
        # It has references, or is damaged: the loop reads it.
        except ProtocolError:
            deliver = self.read
        return functools.partial(self._end, deliver)

    def _end(self, deliver: Callback) -> None:
        conversation, context = self._conversation, self._context
        try:
            if context.call is None:
                conversation.caller.take_held(context.number, self._held, deliver)
            elif not context.call.is_cancelled:
                deliver()
        except Exception as error:
            conversation.channel.fail_by(error)


class ValueContext(NamedTuple):
    """A call or an answer whose value arrives in buffers, or the content of a loan.

    Attributes:
        kind: CALL, RESULT, ITEM or LENT_BYTES.
        number: The number of the call, or of the loan.
        call: The call, if this process runs it.
        is_outside: Whether the value is the first buffer instead of a part of the head.
        loan: The number of the loan of its tensors; 0 for none.
    """

    kind: int
    number: int
    call: Execution | None = None
    is_outside: bool = False
    loan: int = 0

    @property
    def place(self) -> int:
        """The place of the value in the head."""
        return _LENGTHS[self.kind] - 1


def _context_of(message: IncomingMessage) -> ValueContext | None:
    context: ValueContext | None = message.context
    return context


class CancelledMessage(Exception):
    """Nobody wants a message any more, or its call was refused."""


def _unread(code: int, data: bytes) -> object:
    """Stand for a value that is read later."""
    return ...
