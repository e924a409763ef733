"""Long messages in chunks, between which other messages pass.

Clients and the server use it. No I/O. A value longer than `LONG_NBYTES` is sent before its message, in chunks; the message
refers to it by a number. A message that is long for another reason, such as very many keys, is sent before a reference
to it in the same way. Each direction of a connection carries one chunked message at a time.

    chunk       [id, PIECE, number, bytes] of a request, [id, PIECE, [number, bytes]] of a reply; alone in its frame.
                A chunk without bytes: the sender has abandoned the message.
    reference   msgpack extension 1 in place of a value, 2 in place of a message; its data is the number, 4 bytes

The receiver does not copy the complete value, because that would delay all other messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

from msgpack import ExtType

from asyncdist.errors import ProtocolError
from asyncdist.store.protocol.codec import TOGETHER_NBYTES, messages_in
from asyncdist.store.protocol.operations import Op, OperationKind

LONG_NBYTES = TOGETHER_NBYTES
"""The longest message that is sent in one frame; the frame may carry further messages."""
PIECE_NBYTES = 256 << 10
FRAME_NBYTES = PIECE_NBYTES + 1024
"""The longest frame, which is that of a chunk."""

_VALUE, _MESSAGE = 1, 2
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


class ChunkedMessage:
    """A long message. Iterating yields its chunks and then the message itself; send each in a frame of its own.

    ``len`` is in bytes. ``request`` and ``kind`` are the message's first fields. ``is_under_way`` is true after the first
    chunk and before the last one.

    Args:
        pack: Encodes a message from its fields.
        fields: The message.
        wrap: `request_piece` or `answer_piece`.
    """

    __slots__ = ("_message", "_nbytes", "_piece", "_pieces", "_values", "is_under_way", "kind", "request")

    def __init__(self, pack: Callable[[Any], bytes], fields: Fields, wrap: Callable[[int, int, Any], Fields]) -> None:
        self.request, self.kind = fields[:2]
        request = self.request
        self._piece: Callable[[int, Any], bytes] = lambda number, content: pack(wrap(request, number, content))
        self._values: list[bytes] = []
        self._message = pack(tuple(map(self._set_apart, fields)))
        if len(self._message) > LONG_NBYTES:
            self._message = pack(self._reference(_MESSAGE, self._message))
        self._nbytes = sum(map(len, self._values)) + len(self._message)
        self.is_under_way = False
        self._pieces = _cut(self._values, self._message, self._piece)

    def _set_apart(self, field: Any) -> Any:
        if type(field) is list:
            return list(map(self._set_apart, field))
        return self._reference(_VALUE, field) if type(field) is bytes and len(field) > LONG_NBYTES else field

    def _reference(self, code: int, value: bytes) -> ExtType:
        self._values.append(value)
        return ExtType(code, (len(self._values) - 1).to_bytes(4, "little"))

    def __len__(self) -> int:
        return self._nbytes

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        message = next(self._pieces)
        self.is_under_way = message is not self._message
        return message

    def abandoned(self) -> bytes:
        """Abandon the rest; return the empty chunk that tells the receiver, b"" if no chunk has been sent."""
        was_under_way, self.is_under_way = self.is_under_way, False
        return self._piece(0, b"") if was_under_way else b""


def _cut(values: list[bytes], message: bytes, piece: Callable[[int, Any], bytes]) -> Iterator[bytes]:
    """Yield the chunks. This is not a method, whose reference cycle would keep the values alive."""
    for number, value in enumerate(values):
        view = memoryview(value)
        for start in range(0, len(view), PIECE_NBYTES):
            yield piece(number, view[start : start + PIECE_NBYTES])
    yield message


def request_piece(request: int, number: int, piece: Any) -> Fields:
    """Return the fields of a chunk of a request."""
    return request, Op.PIECE, number, piece


def answer_piece(request: int, number: int, piece: Any) -> Fields:
    """Return the fields of a chunk of a reply."""
    return request, OperationKind.PIECE, (number, piece)


class Reassembler:
    """The chunks that have arrived before the message that refers to them; at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._values: dict[int, BytesIO] = {}
        self._discarding = self._discarded = False

    def add(self, number: int, piece: bytes) -> None:
        """Add a chunk. Raises ProtocolError beyond the limit."""
        if self._discarding and piece:
            return
        if not piece:
            self.drop()
            return
        self.nbytes += len(piece)
        if number not in self._values:
            self._values[number] = BytesIO()
        if self.nbytes > self.limit or len(self._values) > 2 + self.limit // LONG_NBYTES:
            raise ProtocolError(f"a chunked message of more than {self.limit} bytes")
        self._values[number].write(piece)

    def drop(self) -> None:
        """Drop all chunks."""
        self._values.clear()
        self.nbytes = 0
        self._discarding = self._discarded = False

    def discard(self) -> None:
        """Drop the chunks of the message that is arriving, and ignore its further chunks and the message."""
        self.drop()
        self._discarding = True

    @property
    def busy(self) -> bool:
        """Whether a chunked message is arriving."""
        return self.nbytes > 0 or self._discarding

    def messages_in(self, frame: bytes | bytearray) -> list[Any]:
        """Return the messages of a frame, with the chunked values in place of references. Raises ProtocolError."""
        messages = messages_in(frame, self._referred)
        if self._discarded:
            self._discarding = self._discarded = False
            return []
        if type(messages[0]) is ExtType:  # a reference to a message is alone in its frame
            messages = messages_in(self._take(messages[0].data), self._referred)
        return messages

    def _referred(self, code: int, data: bytes) -> Any:
        if self._discarding:
            self._discarded = True
            return None
        return self._take(data) if code == _VALUE else ExtType(code, data)

    def _take(self, data: bytes) -> bytes:
        value = self._values.pop(int.from_bytes(data, "little"), None)
        if value is None:
            raise ProtocolError("a message that refers to chunks that have not arrived")
        content = value.getvalue()
        self.nbytes -= len(content)
        return content
