"""What a side of a connection to a store finds in the bytes that arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncdist.net.connection.inbox import Inbox, InboxOwner
from asyncdist.net.connection.messages import IncomingMessage
from asyncdist.store.protocol.codec import framed, messages_in, packer
from asyncdist.store.protocol.long_messages import Reassembler


def frame_of(*fields: Any) -> bytes:
    """Return the frame of one message of the store's format."""
    return framed([packer()(fields)])


class ReceivedMessages(InboxOwner):
    """Collects the messages of an inbox, short and long ones, and the kinds of the frames.

    Args:
        most_nbytes: The most bytes of a long message.
    """

    def __init__(self, most_nbytes: int = 1 << 30) -> None:
        self.inbox = Inbox(self, most_nbytes=most_nbytes)
        self.messages: list[Any] = []
        self.withdrawn: list[int] = []
        """The requests whose messages were withdrawn."""

    def on_short(self, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]) -> None:
        self.messages += messages_in(head)

    def on_opening(self, message: IncomingMessage) -> None:
        message.context = Reassembler(message)

    def on_completed(self, message: IncomingMessage) -> None:
        self.messages.append(message.context.message())

    def on_withdrawn(self, message: IncomingMessage) -> None:
        self.withdrawn.append(message.context.request)

    def on_frame(self, kind: int, body: bytes) -> None:
        self.messages += messages_in(body)
