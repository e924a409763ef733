"""The store's own wire format: messages in msgpack, in the frames of `asyncdist.net.connection.frames`. No I/O.

    frame      SHORT: messages one after the other; HELLO: the hello
    request    [id, op, argument…]                    client → server; ids are the client's own, from 1 up
    result     [id, 0, value]                         server → client, in any order
    refusal    [id, 1, [reason, text]]
    published  [id, 2, message]                       id is that of the subscription
    hello      [0, 3, [version, limit]]               server → client, once, first: the longest message it accepts

Messages that are too long for a frame are in `long_messages`. Versions up to 3 had frames with a length of 8 bytes, which
the header of a HELLO also is: each side can tell the other version.

Input from a peer is checked. A length beyond the limit, bytes that are not msgpack, an unknown operation and an argument
of a wrong type raise ProtocolError; no other error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgpack

from asyncdist.errors import ProtocolError
from asyncdist.net.connection.frames import HEADER, HELLO, SHORT, frame
from asyncdist.store.protocol.operations import FLAG, KEY, KEYS, NUMBER, VALUE, VALUES, Op, OperationKind

VERSION = 4
_HELLO = 3
OVERHEAD_NBYTES = 64 << 10
"""The largest size of a message without its value and key."""
TOGETHER_NBYTES = 64 << 10
"""The longest frame of several messages in bytes. Every store accepts it."""
_MARK = bytes(range(0xF0, 0x100))
_END = msgpack.packb(_MARK)
"""Appended to a frame while it is decoded, to detect a last message that is cut short."""


class Request(NamedTuple):
    id: int
    op: Op
    args: tuple[Any, ...]


def message_limit(max_value_nbytes: int = 0, max_key_nbytes: int = 0) -> int:
    """Return the longest message for values and keys of at most these lengths."""
    return max_value_nbytes + max_key_nbytes + OVERHEAD_NBYTES


def packer() -> Callable[[tuple[Any, ...]], bytes]:
    """Return a function that encodes messages, for one thread at a time. It raises ValueError and OverflowError."""
    return msgpack.Packer(use_bin_type=True, autoreset=True).pack


def framed(messages: Iterable[bytes]) -> bytes:
    """Return frames of these messages, as many in each as fit in `TOGETHER_NBYTES`."""
    frames: list[bytes] = []
    together: list[bytes] = []
    nbytes = 0
    for message in messages:
        if together and nbytes + len(message) > TOGETHER_NBYTES:
            frames += HEADER.pack(nbytes, SHORT, 0, 0), *together
            together, nbytes = [], 0
        together.append(message)
        nbytes += len(message)
    return b"".join((*frames, HEADER.pack(nbytes, SHORT, 0, 0), *together))


def hello(limit: int) -> bytes:
    """Return the frame with which a server begins."""
    return frame(HELLO, packer()((0, _HELLO, (VERSION, limit))))


def decode_hello(body: bytes, where: str) -> int:
    """Return the longest message that a server accepts. Raises ProtocolError, also for one of another version."""
    request, kind, value = decode_answer(messages_in(body)[0])
    if (request, kind) != (0, _HELLO):
        raise ProtocolError(f"the store at {where} did not begin with a hello")
    version, limit = value
    if version != VERSION:
        raise ProtocolError(
            f"the store speaks version {version} of the protocol, and this client version {VERSION}: "
            "run the same asyncdist on both sides"
        )
    return int(limit)


# -- decoding --------------------------------------------------------------------------------------


def messages_in(frame: bytes | bytearray, extension: Callable[[int, bytes], Any] = msgpack.ExtType) -> list[Any]:
    """Return the messages of a frame, at least one, without checking their fields.

    ``extension`` decodes msgpack's extension types (`long_messages`). Raises ProtocolError.
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
    if type(fields) is not list:
        raise ProtocolError(f"a message that is not an array: {_brief(fields)}")
    try:
        op = Op(fields[1])
    except (IndexError, TypeError, ValueError):
        raise ProtocolError(f"a request for an unknown operation: {_brief(fields)}") from None
    args = tuple(fields[2:])
    if type(fields[0]) is not int or len(args) != len(op.kinds) or not all(map(_fits, op.kinds, args)):
        raise ProtocolError(f"a request with wrong arguments: {op.name} {_brief(fields)}")
    return Request(fields[0], op, args)


def decode_answer(fields: Any) -> tuple[int, int, Any]:
    """Return an answer's request, its kind, and its value. Raises ProtocolError."""
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
    if kind in (OperationKind.REFUSED, _HELLO):
        second = str if kind == OperationKind.REFUSED else int
        return type(value) is list and len(value) == 2 and type(value[0]) is int and type(value[1]) is second
    return kind == OperationKind.PUBLISHED and type(value) is bytes


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
