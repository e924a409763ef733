"""Our wire format: frames that carry one msgpack array each.

    frame      u64 length (little-endian), then that many bytes
    request    [id, op, argument…]                    client → server; ids are the client's own, from 1 up
    result     [id, 0, value]                         server → client, in any order
    refusal    [id, 1, [reason, text]]
    published  [id, 2, message]                       id is that of the subscription
    hello      [0, 3, [version, limit]]               server → client, once, first: the longest frame it takes

What a peer sends is believed only as far as it has been checked: a length beyond the limit, bytes that are no msgpack,
an unknown operation or an argument of a wrong type raise ProtocolError, and nothing else is ever raised.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgpack

from asyncdist.errors import ProtocolError
from asyncdist.store.operations import ARGUMENTS, FLAG, KEY, KEYS, NUMBER, VALUE, VALUES, Kind, Op

VERSION = 1
HELLO = 3
OVERHEAD_NBYTES = 64 << 10
"""What a frame may be longer than the largest value: its key, and the frame's own bytes."""

LENGTH = struct.Struct("<Q")


class Request(NamedTuple):
    """What a client sends."""

    id: int
    op: Op
    args: tuple[Any, ...]


class Answer(NamedTuple):
    """What a server sends: ``kind`` is a `operations.Kind` or HELLO."""

    id: int
    kind: int
    value: Any


def frame_limit(max_value_nbytes: int) -> int:
    """Return the longest frame to take where values have up to ``max_value_nbytes`` bytes."""
    return max_value_nbytes + OVERHEAD_NBYTES


class FrameParser:
    """Cuts a stream of bytes into frames, however the stream was split on its way.

    Buffers no more than one frame of at most ``limit`` bytes and what came in the same read; a frame that claims to be
    longer raises ProtocolError as soon as its length is there. After an error the stream cannot be read any further.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()
        self._wanted = LENGTH.size  # how long the buffer must be before looking at it again is worth while

    @property
    def pending(self) -> int:
        """How many bytes of an unfinished frame there are."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray) -> list[bytes | bytearray]:
        """Return the frames that ``data`` completes."""
        buffer = self._buffer
        if buffer:
            buffer += data
            if len(buffer) < self._wanted:
                return []
            data = buffer
        frames = []
        start, end = 0, len(data)
        while True:
            if end - start < LENGTH.size:
                self._wanted = LENGTH.size
                break
            (nbytes,) = LENGTH.unpack_from(data, start)
            if nbytes > self.limit:
                raise ProtocolError(f"a frame that claims {nbytes} bytes, when {self.limit} is the limit")
            after = start + LENGTH.size + nbytes
            if after > end:
                self._wanted = after - start
                break
            frames.append(data[after - nbytes : after])
            start = after
        if data is buffer:
            del buffer[:start]
        else:
            buffer += data[start:] if start else data
        return frames


class Encoder:
    """Makes frames. Not for two threads at a time."""

    def __init__(self) -> None:
        self._pack = msgpack.Packer(use_bin_type=True, autoreset=True).pack

    def frame(self, *fields: Any) -> bytes:
        """Return the frame of one array. Raises ValueError or OverflowError for what msgpack cannot carry."""
        body = self._pack(fields)
        return LENGTH.pack(len(body)) + body


def hello(limit: int) -> bytes:
    """Return the frame with which a server begins."""
    return Encoder().frame(0, HELLO, (VERSION, limit))


# -- decoding --------------------------------------------------------------------------------------


def decode_request(frame: bytes | bytearray) -> Request:
    """Return the request in a frame; raises ProtocolError."""
    return decode_operation(decode_fields(frame))


def decode_operation(fields: list[Any]) -> Request:
    """Return the request in a frame's fields; raises ProtocolError."""
    try:
        op = Op(fields[1])
        kinds = ARGUMENTS[op]
    except (IndexError, TypeError, ValueError):
        raise ProtocolError(f"a request for no operation that we know: {_brief(fields)}") from None
    args = tuple(fields[2:])
    if type(fields[0]) is not int or len(args) != len(kinds) or not all(map(_fits, kinds, args)):
        raise ProtocolError(f"a request with wrong arguments: {op.name} {_brief(fields)}")
    return Request(fields[0], op, args)


def decode_answer(frame: bytes | bytearray) -> Answer:
    """Return the answer in a frame; raises ProtocolError."""
    fields = decode_fields(frame)
    if len(fields) != 3 or type(fields[0]) is not int or type(fields[1]) is not int or not _sound(*fields[1:]):
        raise ProtocolError(f"an answer that is none of ours: {_brief(fields)}")
    return Answer(*fields)


def decode_fields(frame: bytes | bytearray) -> list[Any]:
    """Return the array in a frame; raises ProtocolError."""
    try:
        fields = msgpack.unpackb(frame)
    except Exception as error:  # which of its many it raises depends on msgpack's version and build
        raise ProtocolError(f"a frame that is no msgpack ({type(error).__name__}: {error})") from None
    if type(fields) is not list:
        raise ProtocolError(f"a frame that holds no array: {_brief(fields)}")
    return fields


_TYPES = {KEY: str, VALUE: bytes, NUMBER: int, FLAG: bool}
_ITEM_TYPES = {KEYS: str, VALUES: bytes}


def _fits(kind: str, argument: Any) -> bool:
    if kind in _TYPES:
        return type(argument) is _TYPES[kind]
    item = _ITEM_TYPES[kind]
    return type(argument) is list and all(type(each) is item for each in argument)


def _sound(kind: int, value: Any) -> bool:
    """Whether an answer's value has the shape that its kind promises."""
    if kind in (Kind.REFUSED, HELLO):
        second = str if kind == Kind.REFUSED else int
        return type(value) is list and len(value) == 2 and type(value[0]) is int and type(value[1]) is second
    return kind == Kind.RESULT or (kind == Kind.PUBLISHED and type(value) is bytes)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
