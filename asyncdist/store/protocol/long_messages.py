"""Requests and replies that are too long for one frame: they are long messages of `asyncdist.net.connection`. No I/O.

Clients and the server use it. The values longer than `LONG_NBYTES` are the buffers of the long message, whose parts let
short messages pass between them. Its head is the number of the request and the message, in which a reference stands in
place of each such value: msgpack extension 1, whose data is the index of the value, 4 bytes. A message that is long for
another reason, such as very many keys, is itself the last buffer, and the head has only the number.

The receiver does not copy the complete value, because that would delay all other messages.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

from msgpack import ExtType

from asyncdist.errors import ProtocolError
from asyncdist.net.connection.frames import pack_opening
from asyncdist.net.connection.messages import IncomingMessage, OutgoingMessage
from asyncdist.store.protocol.codec import TOGETHER_NBYTES, messages_in

LONG_NBYTES = TOGETHER_NBYTES
"""The longest message that is sent in one frame; the frame may carry further messages."""

_VALUE = 1
_MOST_VALUES = 1 << 14
"""Further long values stay in the message: an opening has the size of each."""
_ITEM_NBYTES = 5
"""The largest encoding overhead of a list item."""

Fields = tuple[Any, ...]


def weight(fields: Fields) -> int:
    """Return the approximate size of values and lists in bytes, without packing them."""
    total = 0
    for field in fields:
        if type(field) is bytes or type(field) is str:
            total += len(field)
        elif type(field) is list:
            total += sum(map(len, field)) + _ITEM_NBYTES * len(field)
    return total


class LongMessage(OutgoingMessage):
    """A long message. ``len`` is in bytes; ``request`` and ``kind`` are the message's first fields.

    Args:
        pack: Encodes a message from its fields.
        fields: The message.
        is_wanted: Tells whether the rest of the request's message still has to be sent.
    """

    __slots__ = ("_is_wanted", "_nbytes", "kind", "request")

    def __init__(self, pack: Callable[[Any], bytes], fields: Fields, is_wanted: Callable[[int], bool]) -> None:
        self.request, self.kind = fields[:2]
        self._is_wanted = is_wanted
        values: list[bytes] = []
        message = pack(tuple(_set_apart(field, values) for field in fields))
        if len(message) > LONG_NBYTES:
            values.append(message)
            message = b""
        sizes = list(map(len, values))
        self._nbytes = sum(sizes) + len(message)
        super().__init__(0, [memoryview(value) for value in values])
        # One at a time is open in each direction, so that all have the same number.
        self.opening = pack_opening(self.number, pack(self.request) + message, sizes)

    def __len__(self) -> int:
        return self._nbytes

    def is_wanted(self) -> bool:
        return self._is_wanted(self.request)


def _set_apart(field: Any, values: list[bytes]) -> Any:
    """Return a field with references in place of its long values, which are added to ``values``."""
    if type(field) is list:
        return [_set_apart(each, values) for each in field]
    if type(field) is not bytes or len(field) <= LONG_NBYTES or len(values) >= _MOST_VALUES:
        return field
    values.append(field)
    return ExtType(_VALUE, (len(values) - 1).to_bytes(4, "little"))


class Reassembler:
    """A long message that arrives: the sink of its bytes. Raises ProtocolError if it does not belong to the store."""

    def __init__(self, opened: IncomingMessage) -> None:
        self._head, self._sizes = opened.head, opened.sizes
        self.request = messages_in(self._head)[0]
        if type(self.request) is not int:
            raise ProtocolError("a long message without the number of its request")
        self._values: list[bytes] = []
        self._value = BytesIO()
        opened.sink = self

    def write(self, part: memoryview) -> None:
        while part:
            size = self._sizes[len(self._values)]
            taken = self._value.write(part[: size - self._value.tell()])
            part = part[taken:]
            if self._value.tell() == size:
                self._values.append(self._value.getvalue())
                self._value = BytesIO()

    def message(self) -> Any:
        messages = messages_in(self._head, self._referred)
        if len(messages) == 1 and self._values:
            messages += messages_in(self._values.pop(), self._referred)
        if len(messages) != 2:
            raise ProtocolError("a frame that holds no long message, or several")
        return messages[1]

    def _referred(self, code: int, data: bytes) -> bytes:
        index = int.from_bytes(data, "little")
        if code != _VALUE or index >= len(self._values):
            raise ProtocolError("a message that refers to a value that has not arrived")
        return self._values[index]
