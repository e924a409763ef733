"""Buffers of a client for the items of a subscription or a watch that the program has not read.

`AsyncStore`, `TCPStore` and `HashStore` make them. No I/O. A stream is a request with many answers. The first answer
says that the stream is open; that of a watch holds the present values. Each later answer is a message to the channel,
or a change of a key. After a reconnect the client requests its watches again. Each gets a first answer again, and drops
the values that it already has. A subscription ends with an error, because messages may have been lost.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

from asyncdist.store.protocol import operations
from asyncdist.store.protocol.operations import Command, Op

T = TypeVar("T")


class StreamBuffer(Generic[T]):
    """Received items of a stream that the program has not read, oldest first; this class is that of a subscription."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()

    def begin(self, value: Any) -> None:
        """Take the first answer. A watch gets one over each new connection."""

    def publish(self, message: Any) -> None:
        """Take a later answer."""
        self.items.append(message)


class WatchBuffer(StreamBuffer[bytes | None]):
    """The newest value of a key, None if the key is missing. It replaces an older one that is unread.

    A value that equals the one before is dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        # Equal to no value and not None, so that the first answer is always taken.
        self._last: Any = ()

    def begin(self, value: Any) -> None:
        if value != self._last:
            self._last = value
            self.items.clear()
            self.items.append(value)

    def publish(self, message: bytes) -> None:
        self.begin(operations.watched(message))


class PrefixWatchBuffer(StreamBuffer[tuple[str, bytes | None]]):
    """The changes of the keys under a prefix: each key with its value, or with None if it was deleted.

    The first answer lists the present keys, each before its value. ``hidden`` is removed from the front of each key.
    """

    def __init__(self, hidden: str) -> None:
        super().__init__()
        self._hidden = hidden
        self._values: dict[str, bytes] = {}

    def begin(self, value: Any) -> None:
        present = dict(zip(value[::2], value[1::2], strict=False))
        # The others were deleted while there was no connection.
        for key in self._values.keys() - present.keys():
            self._take_change(key, None)
        for key in sorted(present):
            self._take_change(key, present[key])

    def publish(self, message: bytes) -> None:
        self._take_change(*operations.watched_key(message))

    def _take_change(self, key: str, value: bytes | None) -> None:
        if self._values.get(key) == value:
            return
        if value is None:
            del self._values[key]
        else:
            self._values[key] = value
        self.items.append((key.removeprefix(self._hidden), value))


def stream_buffer(command: Command[Any], hidden: str = "") -> StreamBuffer[Any]:
    """Return the buffer for a stream's command; a watch of a prefix removes ``hidden`` from the front of each key."""
    match command.op:
        case Op.SUBSCRIBE:
            return StreamBuffer[bytes]()
        case Op.WATCH:
            return WatchBuffer()
        case _:
            return PrefixWatchBuffer(hidden)
