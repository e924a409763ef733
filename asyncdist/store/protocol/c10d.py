"""The wire format of torch's TCPStore, as of torch 2.13, so that its clients can use an asyncdist store.

    request    u8 code, then what `_SHAPES` says; answered in order, or not at all, as `Code` says
    integers   little-endian; STR and VEC are a u64 length and as many bytes; lists are a u64 count and as many items

There are no frames and no request ids: a request ends with its last field. The decoder therefore keeps its position
within a field, and parses no byte twice. Input from a peer is checked: an unknown code and a length beyond a limit raise
ProtocolError, and no other error is raised.

Torch's client prefixes keys with "/", except for its own counter "init/". The store's key has no prefix, so that both kinds
of clients see the same keys. A key that has no "/" or is not UTF-8 becomes a NUL followed by its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Mapping
from enum import IntEnum
from typing import Any

from asyncdist.errors import ProtocolError

MAGIC = 0x3C85F7CE
MAX_KEY_NBYTES = 8 << 10
MAX_KEYS = 128 << 10
"""Keys in one request."""

_SLASH = ord("/")
U32, U64, I64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<q")
STOP_WAITING, WAIT_CANCELED = b"\x00", b"\x01"
READY, NOT_READY = b"\x00", b"\x01"


class Code(IntEnum):
    """Requests by their first byte."""

    VALIDATE = 0x00
    SET = 0x01
    COMPARE_SET = 0x02
    GET = 0x03
    ADD = 0x04
    CHECK = 0x05
    WAIT = 0x06
    GETNUMKEYS = 0x07
    DELETE_KEY = 0x08
    APPEND = 0x09
    MULTI_GET = 0x0A
    MULTI_SET = 0x0B
    CANCEL_WAIT = 0x0C
    PING = 0x0D
    QUEUE_PUSH = 0x0E
    QUEUE_POP = 0x0F
    QUEUE_LEN = 0x10
    LIST_KEYS = 0x11
    BARRIER = 0x12


Request = tuple[Any, ...]
"""A `Code` as an int, and the arguments: keys as str, values as bytes, numbers as int, lists of keys as lists."""

_SHAPES: dict[int, str] = {
    Code.VALIDATE: "u",
    Code.SET: "kv",
    Code.COMPARE_SET: "kvv",
    Code.GET: "k",
    Code.ADD: "ki",
    Code.CHECK: "K",
    Code.WAIT: "K",
    Code.GETNUMKEYS: "",
    Code.DELETE_KEY: "k",
    Code.APPEND: "kv",
    Code.MULTI_GET: "K",
    Code.MULTI_SET: "P",
    Code.CANCEL_WAIT: "",
    Code.PING: "u",
    Code.QUEUE_PUSH: "kv",
    Code.QUEUE_POP: "k",
    Code.QUEUE_LEN: "k",
    Code.LIST_KEYS: "",
    Code.BARRIER: "ki",
}
"""Fields by code: k a key, v a value, u a u32, i an i64, K a list of keys, P a list of keys with their values."""


# -- keys and replies ------------------------------------------------------------------------------


def key_of(raw: bytes) -> str:
    """Return the store's key for torch's."""
    if raw and raw[0] == _SLASH and raw[1:2] != b"\x00":
        try:
            return raw[1:].decode()
        except UnicodeDecodeError:
            pass
    return "\x00" + raw.decode("latin-1")


def raw_key(key: str) -> bytes:
    """Return torch's key for the store's."""
    if key[:1] == "\x00":
        try:
            return key[1:].encode("latin-1")
        except UnicodeEncodeError:
            pass  # a key of this package's client
    return b"/" + key.encode()


def vector(value: bytes) -> bytes:
    """Encode a value or a raw key."""
    return U64.pack(len(value)) + value


def vectors(values: list[bytes]) -> bytes:
    """Encode values one after the other."""
    pieces = []
    for value in values:
        pieces.append(U64.pack(len(value)))
        pieces.append(value)
    return b"".join(pieces)


# -- requests --------------------------------------------------------------------------------------

_Field = Generator[int, bytes, Any]
"""A parser of one field: yields the number of bytes it needs next, is sent these, and returns the field's value."""


class Decoder:
    """Cuts a stream of bytes into requests.

    Buffers at most one request: ``max_value_nbytes`` bytes for each value, and ``limit`` in all. After an error the stream
    cannot be read further.
    """

    def __init__(self, max_value_nbytes: int, limit: int) -> None:
        self.max_value_nbytes = max_value_nbytes
        self.limit = limit
        self._partial: Generator[int, bytes, Request] | None = None
        self.pending = False
        """Whether there is an unfinished request."""
        self._wanted = 0
        self._piece = bytearray()
        self._nbytes = 0

    def decode(self, data: bytes, requests: list[Request]) -> None:
        """Add the requests that ``data`` completes to a list, also those before a malformed one. Raises ProtocolError."""
        place = self._continue(data, 0, requests) if self._partial is not None else 0
        end = len(data)
        while place < end:
            place = _whole_requests(data, place, requests, self.max_value_nbytes)
            if place < end:
                self._nbytes = 0
                self._partial, self.pending = self._request(), True
                self._wanted = next(self._partial)
                place = self._continue(data, place, requests)

    def _continue(self, data: bytes, place: int, requests: list[Request]) -> int:
        """Continue an unfinished request; return the position after its last byte, or the end of ``data``."""
        partial, end = self._partial, len(data)
        assert partial is not None
        try:
            while True:
                missing = self._wanted - len(self._piece)
                if end - place < missing:
                    self._piece += data[place:] if place else data
                    return end
                piece = data[place : place + missing]
                place += missing
                if self._piece:
                    self._piece += piece
                    piece = bytes(self._piece)
                    self._piece = bytearray()
                self._wanted = partial.send(piece)
        except StopIteration as over:
            self._partial, self.pending = None, False
            requests.append(over.value)
            return place

    # -- the fields of a request, one after the other ---------------------------------------------

    def _request(self) -> Generator[int, bytes, Request]:
        code = (yield 1)[0]
        shape = _SHAPES.get(code)
        if shape is None:
            raise ProtocolError(f"a request with an unknown code of torch's format: {code:#04x}")
        arguments = []
        for kind in shape:
            arguments.append((yield from _FIELDS[kind](self)))  # noqa: PERF401, which a comprehension cannot
        return (code, *arguments) if shape != "P" else (code, *arguments[0])

    def _u32(self) -> _Field:
        return U32.unpack((yield 4))[0]

    def _i64(self) -> _Field:
        return I64.unpack((yield 8))[0]

    def _count(self) -> Generator[int, bytes, int]:
        (count,) = U64.unpack((yield 8))
        if count > MAX_KEYS:
            raise ProtocolError(f"a request about {count} keys, when {MAX_KEYS} is the limit")
        return int(count)

    def _key(self) -> _Field:
        (nbytes,) = U64.unpack((yield 8))
        if nbytes > MAX_KEY_NBYTES:
            raise ProtocolError(f"a key that claims {nbytes} bytes, when {MAX_KEY_NBYTES} is the limit")
        self._spend(nbytes + 8)
        return key_of((yield nbytes))

    def _value(self) -> _Field:
        (nbytes,) = U64.unpack((yield 8))
        if nbytes > self.max_value_nbytes:
            raise ProtocolError(
                f"a value of {nbytes} bytes, when {self.max_value_nbytes} is the limit: raise "
                "ASYNCDIST_STORE_MAX_VALUE_NBYTES where the store runs, or send bulk data through a collective"
            )
        self._spend(nbytes + 8)
        return (yield nbytes)

    def _spend(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes > self.limit:
            raise ProtocolError(f"a request of more than {self.limit} bytes, which is the limit")

    def _keys(self) -> _Field:
        count = yield from self._count()
        keys = []
        for _ in range(count):
            keys.append((yield from self._key()))  # noqa: PERF401
        return keys

    def _pairs(self) -> _Field:
        count = yield from self._count()
        keys, values = [], []
        for _ in range(count):
            keys.append((yield from self._key()))
            values.append((yield from self._value()))
        return keys, values


_FIELDS: dict[str, Callable[[Decoder], _Field]] = {
    "u": Decoder._u32,
    "i": Decoder._i64,
    "k": Decoder._key,
    "v": Decoder._value,
    "K": Decoder._keys,
    "P": Decoder._pairs,
}


# -- complete requests in one read, the common case ------------------------------------------------

_WITH_KEY = frozenset((Code.GET, Code.DELETE_KEY, Code.QUEUE_POP, Code.QUEUE_LEN))
_WITH_NUMBER = frozenset((Code.ADD, Code.BARRIER))
_WITH_VALUE = frozenset((Code.SET, Code.APPEND, Code.QUEUE_PUSH))
_OF_KEYS = frozenset((Code.WAIT, Code.CHECK))

_u64_at, _i64_at = U64.unpack_from, I64.unpack_from


def _whole_requests(data: bytes, place: int, requests: list[Request], max_value_nbytes: int) -> int:
    """Add the requests from ``place`` on, up to the first that is incomplete, rare or malformed; return its position."""
    end = len(data)
    while end - place >= 9:
        code = data[place]
        start = place + 9
        if code in _OF_KEYS:
            if end - place < 17 or _u64_at(data, place + 1)[0] != 1:
                return place
            start += 8
        (nbytes,) = _u64_at(data, start - 8)
        after = start + nbytes
        if nbytes > MAX_KEY_NBYTES or after > end:
            return place
        if code in _OF_KEYS:
            requests.append((code, [key_of(data[start:after])]))
        elif code in _WITH_KEY:
            requests.append((code, key_of(data[start:after])))
        elif code in _WITH_NUMBER:
            if after + 8 > end:
                return place
            requests.append((code, key_of(data[start:after]), _i64_at(data, after)[0]))
            after += 8
        elif code in _WITH_VALUE:
            if after + 8 > end:
                return place
            (nbytes,) = _u64_at(data, after)
            value = after + 8
            if nbytes > max_value_nbytes or value + nbytes > end:
                return place
            requests.append((code, key_of(data[start:after]), data[value : value + nbytes]))
            after = value + nbytes
        else:
            return place
        place = after
    return place


# -- cached requests -------------------------------------------------------------------------------

_CACHED_NBYTES = 256
_NUM_CACHED = 1024

Answer = Callable[[], bytes | None]
"""Executes one request and returns the reply; or does nothing and returns None if it needs a session."""


def _no_answer() -> None:
    return None


class RequestCache(dict[bytes, Answer]):
    """Functions by the bytes of one short request: ``cache[data]()`` is the reply, None for any other bytes.

    Clients often repeat a request: during a rendezvous all of them use the same keys, and a polling client sends the same
    bytes again. The cache keeps the functions that ``answers`` makes, so that such a request is not parsed again.
    """

    def __init__(self, answers: Mapping[int, Callable[..., Answer]]) -> None:
        super().__init__()
        self._answers = answers

    def __missing__(self, data: bytes) -> Answer:
        if len(data) > _CACHED_NBYTES or not data or data[0] not in self._answers:
            return _no_answer
        requests: list[Request] = []
        if _whole_requests(data, 0, requests, _CACHED_NBYTES) != len(data) or len(requests) != 1:
            return _no_answer
        code, *arguments = requests[0]
        answer = self._answers[code](*arguments)
        if len(self) == _NUM_CACHED:
            self.clear()
        self[data] = answer
        return answer
