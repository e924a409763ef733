"""The unread items of a subscription or a watch. The awaited and the blocking client fill them; there is no I/O here.

A stream is a request with many answers: the first one when it begins, also over a new connection, and then one message
per change. The server repeats after a reconnect what it has told before, and a watch drops those repetitions.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

from asyncdist.store.protocol import operations
from asyncdist.store.protocol.operations import Command, Op

T = TypeVar("T")


class StreamBuffer(Generic[T]):
    """Received items of a stream that the program has not read, oldest first."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()

    def begin(self, value: Any) -> None:
        """Take the first answer over a connection."""

    def publish(self, message: bytes) -> None:
        """Take a later message."""
        raise NotImplementedError


class SubscriptionBuffer(StreamBuffer[bytes]):
    """The messages of a channel."""

    def publish(self, message: bytes) -> None:
        self.items.append(message)


class WatchBuffer(StreamBuffer[bytes | None]):
    """The newest value of a key, None if the key is missing."""

    def __init__(self) -> None:
        super().__init__()
        self._last: Any = ()

    def begin(self, value: Any) -> None:
        if value != self._last:
            self._last = value
            self.items.clear()
            self.items.append(value)

    def publish(self, message: bytes) -> None:
        self.begin(operations.watched(message))


class PrefixWatchBuffer(StreamBuffer[tuple[str, bytes | None]]):
    """The changes of the keys under a prefix: each key with its value, or with None when it is deleted."""

    def __init__(self, hidden: str) -> None:
        super().__init__()
        self._hidden = hidden
        self._known: dict[str, bytes] = {}

    def begin(self, value: Any) -> None:
        present = dict(zip(value[::2], value[1::2], strict=False))
        for key in self._known.keys() - present.keys():  # deleted while there was no connection
            self._change(key, None)
        for key in sorted(present):
            self._change(key, present[key])

    def publish(self, message: bytes) -> None:
        self._change(*operations.watched_key(message))

    def _change(self, key: str, value: bytes | None) -> None:
        if self._known.get(key) == value:
            return
        if value is None:
            del self._known[key]
        else:
            self._known[key] = value
        self.items.append((key.removeprefix(self._hidden), value))


def stream_buffer(command: Command[Any], hidden: str = "") -> StreamBuffer[Any]:
    """Return the buffer for a stream's command; ``hidden`` is cut off the front of each key that it yields."""
    match command.op:
        case Op.SUBSCRIBE:
            return SubscriptionBuffer()
        case Op.WATCH:
            return WatchBuffer()
        case _:
            return PrefixWatchBuffer(hidden)
