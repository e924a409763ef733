"""The store's own wire format: messages in msgpack, and frames that carry one message or several. No I/O.

    frame      u64 length (little-endian), then that many bytes: messages one after the other
    request    [id, op, argument…]                    client → server; ids are the client's own, from 1 up
    result     [id, 0, value]                         server → client, in any order
    refusal    [id, 1, [reason, text]]
    published  [id, 2, message]                       id is that of the subscription
    hello      [0, 3, [version, limit]]               server → client, once, first: the longest message it accepts

Messages that are too long for a frame are sent in chunks (`chunking`).

Input from a peer is checked. A length beyond the limit, bytes that are not msgpack, an unknown operation and an argument
of a wrong type raise ProtocolError; no other error is raised.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgpack

from asyncdist.errors import ProtocolError
from asyncdist.store.protocol.operations import ARGUMENTS, FLAG, KEY, KEYS, NUMBER, VALUE, VALUES, Op, OperationKind

VERSION = 3
HELLO = 3
OVERHEAD_NBYTES = 64 << 10
"""The largest size of a message without its value and key."""
TOGETHER_NBYTES = 64 << 10
"""The longest frame of several messages in bytes. Every store accepts it."""
_MARK = bytes(range(0xF0, 0x100))
_END = msgpack.packb(_MARK)
"""Appended to a frame while it is decoded, to detect a last message that is cut short."""

LENGTH = struct.Struct("<Q")


class Request(NamedTuple):
    """A client's message."""

    id: int
    op: Op
    args: tuple[Any, ...]


def message_limit(max_value_nbytes: int = 0, max_key_nbytes: int = 0) -> int:
    """Return the longest message for values and keys of at most these lengths."""
    return max_value_nbytes + max_key_nbytes + OVERHEAD_NBYTES


class FrameParser:
    """Cuts a stream of bytes into frames.

    Buffers at most one frame of ``limit`` bytes and the rest of the same read. A longer frame raises ProtocolError as soon
    as its length has arrived; after an error the stream cannot be read further.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()
        self._wanted = LENGTH.size  # the buffer is parsed again when it has this length

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame."""
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
    """Encodes messages. Not thread-safe."""

    def __init__(self) -> None:
        self.pack: Callable[[tuple[Any, ...]], bytes] = msgpack.Packer(use_bin_type=True, autoreset=True).pack
        """Return the message of these fields. Raises ValueError or OverflowError for fields that msgpack cannot encode."""

    def frame(self, *fields: Any) -> bytes:
        """Return the frame of one message."""
        return framed([self.pack(fields)])


def framed(messages: Iterable[bytes]) -> bytes:
    """Return frames of these messages, as many in each as fit in `TOGETHER_NBYTES`."""
    frames: list[bytes] = []
    together: list[bytes] = []
    nbytes = 0
    for message in messages:
        if together and nbytes + len(message) > TOGETHER_NBYTES:
            frames += LENGTH.pack(nbytes), *together
            together, nbytes = [], 0
        together.append(message)
        nbytes += len(message)
    return b"".join((*frames, LENGTH.pack(nbytes), *together))


def hello(limit: int) -> bytes:
    """Return the frame with which a server begins."""
    return Encoder().frame(0, HELLO, (VERSION, limit))


# -- decoding --------------------------------------------------------------------------------------


def messages_in(frame: bytes | bytearray, extension: Callable[[int, bytes], Any] = msgpack.ExtType) -> list[Any]:
    """Return the messages of a frame, at least one, without checking their fields.

    ``extension`` decodes msgpack's extension types (`chunking`). Raises ProtocolError.
    """
    try:
        return [msgpack.unpackb(frame, ext_hook=extension)]
    except msgpack.ExtraData:
        pass
    except ProtocolError:
        raise
    except Exception as error:  # the type depends on msgpack's version and build
        raise _no_msgpack(error) from None
    try:
        nbytes = len(frame) + len(_END)
        unpacker = msgpack.Unpacker(max_buffer_size=nbytes, read_size=nbytes, ext_hook=extension)
        unpacker.feed(frame)
        unpacker.feed(_END)
        *messages, end = unpacker
    except Exception as error:
        raise _no_msgpack(error) from None
    if end != _MARK or not messages:  # the mark has become part of the last message
        raise ProtocolError("a frame whose last message is cut short")
    return messages


def _no_msgpack(error: Exception) -> ProtocolError:
    return ProtocolError(f"a frame that is not msgpack ({type(error).__name__}: {error})")


def decode_request(fields: Any) -> Request:
    """Return the request in a message; raises ProtocolError."""
    if type(fields) is not list:
        raise ProtocolError(f"a message that is not an array: {_brief(fields)}")
    try:
        op = Op(fields[1])
        kinds = ARGUMENTS[op]
    except (IndexError, TypeError, ValueError):
        raise ProtocolError(f"a request for an unknown operation: {_brief(fields)}") from None
    args = tuple(fields[2:])
    if type(fields[0]) is not int or len(args) != len(kinds) or not all(map(_fits, kinds, args)):
        raise ProtocolError(f"a request with wrong arguments: {op.name} {_brief(fields)}")
    return Request(fields[0], op, args)


def decode_answer(fields: Any) -> tuple[int, int, Any]:
    """Return an answer's request, its kind (`OperationKind` or HELLO), and its value. Raises ProtocolError."""
    if type(fields) is list and len(fields) == 3:
        request, kind, value = fields
        if type(request) is int and type(kind) is int and (kind == OperationKind.RESULT or _sound(kind, value)):
            return request, kind, value
    raise ProtocolError(f"a malformed reply: {_brief(fields)}")


_TYPES = {KEY: str, VALUE: bytes, NUMBER: int, FLAG: bool}
_ITEM_TYPES = {KEYS: str, VALUES: bytes}


def _fits(kind: str, argument: Any) -> bool:
    if kind in _TYPES:
        return type(argument) is _TYPES[kind]
    item = _ITEM_TYPES[kind]
    return type(argument) is list and all(type(each) is item for each in argument)


def _sound(kind: int, value: Any) -> bool:
    """Whether a reply's value has the shape of its kind."""
    if kind == OperationKind.PIECE:
        return type(value) is list and [type(each) for each in value] == [int, bytes]
    if kind in (OperationKind.REFUSED, HELLO):
        second = str if kind == OperationKind.REFUSED else int
        return type(value) is list and len(value) == 2 and type(value[0]) is int and type(value[1]) is second
    return kind == OperationKind.PUBLISHED and type(value) is bytes


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
