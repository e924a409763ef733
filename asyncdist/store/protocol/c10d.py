"""The wire format of torch's TCPStore, as of torch 2.13, so that its clients can use an asyncdist store.

    request    u8 code, then what its `Code.shape` says; answered in order, or not at all
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
_VALUE_ADVICE = ": raise ASYNCDIST_STORE_MAX_VALUE_NBYTES where the store runs, or send bulk data through a collective"
STOP_WAITING, WAIT_CANCELED = b"\x00", b"\x01"
READY, NOT_READY = b"\x00", b"\x01"


class Code(IntEnum):
    """Requests by their first byte, each with the shape of its fields.

    Shapes: k a key, v a value, u a u32, i an i64, K a list of keys, P a list of keys with their values.
    """

    shape: str

    def __new__(cls, code: int, shape: str) -> Code:
        self = int.__new__(cls, code)
        self._value_, self.shape = code, shape
        return self

    VALIDATE = 0x00, "u"
    SET = 0x01, "kv"
    COMPARE_SET = 0x02, "kvv"
    GET = 0x03, "k"
    ADD = 0x04, "ki"
    CHECK = 0x05, "K"
    WAIT = 0x06, "K"
    GETNUMKEYS = 0x07, ""
    DELETE_KEY = 0x08, "k"
    APPEND = 0x09, "kv"
    MULTI_GET = 0x0A, "K"
    MULTI_SET = 0x0B, "P"
    CANCEL_WAIT = 0x0C, ""
    PING = 0x0D, "u"
    QUEUE_PUSH = 0x0E, "kv"
    QUEUE_POP = 0x0F, "k"
    QUEUE_LEN = 0x10, "k"
    LIST_KEYS = 0x11, ""
    BARRIER = 0x12, "ki"


_SHAPES: dict[int, str] = {code: code.shape for code in Code}

Request = tuple[Any, ...]
"""A `Code` as an int, and the arguments: keys as str, values as bytes, numbers as int, lists of keys as lists."""


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
    return U64.pack(len(value)) + value


def vectors(values: list[bytes]) -> bytes:
    pieces: list[bytes] = []
    for value in values:
        pieces += U64.pack(len(value)), value
    return b"".join(pieces)


# -- requests --------------------------------------------------------------------------------------


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
            arguments.append((yield from self._field(kind)))  # noqa: PERF401, which a comprehension cannot
        return (code, *arguments) if shape != "P" else (code, *arguments[0])

    def _field(self, kind: str) -> Generator[int, bytes, Any]:
        """Parse one field: yield the number of bytes it needs next, and return its value."""
        match kind:
            case "u":
                return U32.unpack((yield 4))[0]
            case "i":
                return I64.unpack((yield 8))[0]
            case "k":
                return key_of((yield from self._vector(MAX_KEY_NBYTES, "a key that claims", "")))
            case "v":
                return (yield from self._vector(self.max_value_nbytes, "a value of", _VALUE_ADVICE))
        (count,) = U64.unpack((yield 8))
        if count > MAX_KEYS:
            raise ProtocolError(f"a request about {count} keys, when {MAX_KEYS} is the limit")
        keys, values = [], []
        for _ in range(count):
            keys.append((yield from self._field("k")))
            if kind == "P":
                values.append((yield from self._field("v")))
        return keys if kind == "K" else (keys, values)

    def _vector(self, most: int, what: str, advice: str) -> Generator[int, bytes, bytes]:
        (nbytes,) = U64.unpack((yield 8))
        if nbytes > most:
            raise ProtocolError(f"{what} {nbytes} bytes, when {most} is the limit{advice}")
        self._nbytes += nbytes + 8
        if self._nbytes > self.limit:
            raise ProtocolError(f"a request of more than {self.limit} bytes, which is the limit")
        return (yield nbytes)


# -- complete requests in one read, the common case ------------------------------------------------

_WHOLE = {int(code): code.shape for code in Code if code.shape in ("k", "ki", "kv") or code in (Code.WAIT, Code.CHECK)}

_u64_at, _i64_at = U64.unpack_from, I64.unpack_from


def _whole_requests(data: bytes, place: int, requests: list[Request], max_value_nbytes: int) -> int:
    """Add the requests from ``place`` on, up to the first that is incomplete, rare or malformed; return its position."""
    end = len(data)
    while end - place >= 9:
        code = data[place]
        shape = _WHOLE.get(code)
        start = place + 9
        if shape == "K":
            if end - place < 17 or _u64_at(data, place + 1)[0] != 1:
                return place
            start += 8
        (nbytes,) = _u64_at(data, start - 8)
        after = start + nbytes
        if shape is None or nbytes > MAX_KEY_NBYTES or after > end:
            return place
        key = key_of(data[start:after])
        request: Request
        if shape == "k":
            request = code, key
        elif shape == "K":
            request = code, [key]
        elif after + 8 > end:
            return place
        elif shape == "ki":
            request = code, key, _i64_at(data, after)[0]
            after += 8
        else:
            (nbytes,) = _u64_at(data, after)
            value = after + 8
            after = value + nbytes
            if nbytes > max_value_nbytes or after > end:
                return place
            request = code, key, data[value:after]
        requests.append(request)
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
