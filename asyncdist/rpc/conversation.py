"""What a session does with the messages of its channels: it is the handler of its port.

Each channel has a `Caller`, for the calls of this process, and a `Callee`, for those of the peer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from asyncdist.channels.channel import PeerChannel
from asyncdist.channels.messages import IncomingMessage
from asyncdist.errors import PeerLostError, ProtocolError
from asyncdist.rpc.calls import Caller
from asyncdist.rpc.execution import CallBudget, Callee, Execution
from asyncdist.rpc.references import ReferenceTable
from asyncdist.rpc.wire import CALL, CANCEL, CREDIT, GRANT, ITEM, RELEASE, RESULT, VERSION

CREDITS = 1024
"""The calls of one caller that a callee accepts at a time. Further ones wait at the caller."""
WINDOW_NBYTES = 256 << 20
"""The bytes of long arguments of one caller that a callee accepts at a time; a single call may have more."""


class Conversation:
    """The calls of both directions over one channel. It is the ``context`` of the channel."""

    def __init__(self, channel: PeerChannel, budget: CallBudget, timeout: float, references: ReferenceTable) -> None:
        about = channel.peer.about
        if about["version"] != VERSION:
            raise ProtocolError(f"it makes calls of version {about['version']}, and this process of {VERSION}")
        self.caller = Caller(
            channel,
            budget.carrier,
            credits=about["credits"],
            window_nbytes=about["window"],
            timeout=timeout,
            on_reference=references.sent,
        )
        self.callee = Callee(channel, budget, CREDITS, references.sent)


class ConversationHandler:
    """Handles the messages of all channels of a session.

    Args:
        budget: The objects of the session, and what its callers share.
        timeout: Seconds of a call without a timeout of its own.
        references: The references of the session.
    """

    def __init__(self, budget: CallBudget, timeout: float, references: ReferenceTable) -> None:
        self._budget, self._timeout, self._references = budget, timeout, references

    def connected(self, channel: PeerChannel) -> None:
        channel.context = Conversation(channel, self._budget, self._timeout, self._references)

    def received(
        self, channel: PeerChannel, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]
    ) -> None:
        if descriptors:
            close_all(descriptors)
            raise ProtocolError("a call with descriptors")
        conversation: Conversation = channel.context
        try:
            message = self._budget.carrier.unpack_fast(head, buffers)
        # Values that are not plain are read below, and damaged ones fail again.
        except Exception:
            message = None
        if message is None or (buffers and message[-1] is None):
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
        else:
            conversation.caller.answered(message)

    def opened(self, channel: PeerChannel, message: IncomingMessage) -> None:
        if message.descriptors:
            close_all(message.descriptors)
            raise ProtocolError("a call with descriptors")
        message.context = self._begin(channel.context, message.head, is_ready=False)
        if message.context is None:
            message.drop(CancelledMessage())
            self._discard(message.head, ())
        elif message.context.kind == RESULT:
            channel.context.caller.receive_into(message.context.number, message)

    def completed(self, channel: PeerChannel, message: IncomingMessage) -> None:
        if message.context is None:
            return
        if message.error is None:
            self._complete(channel.context, message.context, message.head, message.buffers)
        else:
            reason = f"{message.nbytes} bytes cannot be received: {message.error or type(message.error).__name__}"
            self._unreadable(channel.context, message.context, reason)

    def withdrawn(self, channel: PeerChannel, message: IncomingMessage) -> None:
        if message.context is not None and isinstance(message.context.call, Execution):
            channel.context.callee.cancel(message.context.number)

    def closed(self, channel: PeerChannel, error: PeerLostError, messages: Sequence[IncomingMessage]) -> None:
        conversation: Conversation | None = channel.context
        if conversation is None:  # the peer was refused
            return
        conversation.caller.closed(error)
        conversation.callee.closed()
        self._references.departed(channel)

    # -- messages with buffers ---------------------------------------------------------------------

    def _begin(self, conversation: Conversation, head: bytes, *, is_ready: bool = True) -> ValueContext | None:
        """Note a call or an answer whose value is read later; None if no call wants the value."""
        try:
            envelope = msgpack.unpackb(head, strict_map_key=False, ext_hook=_unread, unicode_errors="surrogatepass")
        except ValueError as cause:
            raise ProtocolError(f"a message that is not legible: {cause}") from cause
        kind, number = envelope[:2]
        if kind == CALL:
            execution = conversation.callee.called(envelope[1:6], is_ready=is_ready)
            return None if execution is None else ValueContext(kind, number, execution, envelope[6] is None)
        if kind not in (RESULT, ITEM):
            raise ProtocolError(f"a message of kind {kind!r} with buffers")
        if not conversation.caller.expects(number):
            return None
        return ValueContext(kind, number, None, envelope[2] is None)

    def _discard(self, head: bytes, buffers: Sequence[memoryview]) -> None:
        """Take the references out of a message that no call wants, and drop them, so that their holds are returned."""
        with contextlib.suppress(ProtocolError):
            self._budget.carrier.unpack(head, buffers)

    def _complete(
        self, conversation: Conversation, context: ValueContext, head: bytes, buffers: Sequence[memoryview]
    ) -> None:
        carrier = self._budget.carrier
        try:
            if context.is_outside and buffers:
                value = carrier.unpack(buffers[0], buffers[1:])
            else:
                value = carrier.unpack(head, buffers)[-1]
        except ProtocolError as error:
            self._unreadable(conversation, context, error.message)
            return
        if context.call is not None:
            conversation.callee.arrived(context.call, value)
        else:
            conversation.caller.answered((context.kind, context.number, value))

    def _unreadable(self, conversation: Conversation, context: ValueContext, reason: str) -> None:
        if context.call is not None:
            conversation.callee.refuse(context.call, f"its arguments cannot be read: {reason}")
        else:
            conversation.caller.unreadable(context.number, f"its result cannot be read: {reason}")


class ValueContext(NamedTuple):
    """A call or an answer whose value arrives in buffers.

    Attributes:
        kind: CALL, RESULT or ITEM.
        number: The number of the call.
        call: The call, if this process runs it.
        is_outside: Whether the value is the first buffer instead of a part of the head.
    """

    kind: int
    number: int
    call: Execution | None
    is_outside: bool


class CancelledMessage(Exception):
    """Nobody wants a message any more, or its call was refused."""


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that came with a message."""
    for each in descriptors:
        os.close(each)


def _unread(code: int, data: bytes) -> object:
    """Stand for a value that is read later."""
    return ...
