"""Fuzz targets: each function accepts any bytes and may raise only its documented errors.

``SEEDS`` are the initial inputs of each target. Further inputs that a fuzzer found are in tests/fuzz/seeds.
"""

import contextlib
import io
from collections.abc import Callable, Iterator

import numpy as np
from msgpack import ExtType, packb

from asyncdist.errors import AuthenticationError, ProtocolError
from asyncdist.net.connection.frames import CHUNK, WITHDRAWN, frame, pack_opening
from asyncdist.net.security.auth import MAGIC, HandshakeDriver, accept, dial
from asyncdist.store.persistence import log_format
from asyncdist.store.protocol import c10d as c10d_wire
from asyncdist.store.protocol.codec import (
    decode_answer,
    decode_request,
    hello,
    messages_in,
    packer,
)
from asyncdist.store.protocol.operations import SERVERS, Op, OperationKind
from asyncdist.store.server.c10d_session import cached_answers, handlers_of
from asyncdist.store.state.change_log import Change, ChangeLog, replay
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.model import Contents, SizeLimits
from asyncdist.weights.content.difference import difference, restore
from tests.support.received_messages import ReceivedMessages, frame_of

LIMIT = 1 << 16
NONCE = bytes(32)
SALT = bytes(8)


def requests(data: bytes) -> None:
    """Requests of an asyncdist client at the server, split at the position that the first byte gives."""
    found, state = ReceivedMessages(LIMIT), StoreState(SizeLimits(LIMIT, 100))
    with contextlib.suppress(ProtocolError):
        for message in _messages(found, data):
            request, op, args = decode_request(message)
            if op not in SERVERS:
                state.execute("client", request, op, args)
    state.leave("client")
    assert state.num_open == 0


def answers(data: bytes) -> None:
    """Replies of an asyncdist server at the client."""
    with contextlib.suppress(ProtocolError):
        for message in _messages(ReceivedMessages(LIMIT), data):
            decode_answer(message)


def _messages(found: ReceivedMessages, data: bytes) -> Iterator[object]:
    for piece in _pieces(data):
        found.inbox.feed(piece)
        while found.messages:
            yield found.messages.pop(0)


def c10d(data: bytes) -> None:
    """Requests of a torch TCPStore client at the server."""
    decoder, found = c10d_wire.Decoder(LIMIT, LIMIT), []
    with contextlib.suppress(ProtocolError):
        for piece in _pieces(data):
            decoder.decode(piece, found)


def cached_c10d(data: bytes) -> None:
    """Requests of a torch client on the fast path: its replies equal those of the decoder."""
    found: list[c10d_wire.Request] = []

    def note(code: int) -> Callable[..., c10d_wire.Answer]:
        return lambda *arguments: lambda: found.append((code, *arguments))

    state = StoreState()
    cache = c10d_wire.RequestCache({code: note(code) for code in cached_answers(state, handlers_of(state))})
    # The second request is answered from the cache.
    for _ in range(2):
        cache[data]()
    decoder, whole = c10d_wire.Decoder(LIMIT, LIMIT), []
    with contextlib.suppress(ProtocolError):
        decoder.decode(data, whole)
    assert found in ([], 2 * whole)
    assert not (found and decoder.pending)


def greeting(data: bytes) -> None:
    """The messages of the handshake, at both sides."""
    for handshake in (accept("token", "store", NONCE), dial("token", "store", NONCE)):
        with contextlib.suppress(ProtocolError, AuthenticationError, ConnectionRefusedError):
            pushed = HandshakeDriver(handshake, lambda written: None)
            for piece in _pieces(data):
                pushed.feed(piece)


def frames(data: bytes) -> None:
    """The bytes of a log file."""
    start = number = 0
    with contextlib.suppress(ProtocolError):
        log_format.read_header(data)
    with contextlib.suppress(ProtocolError):
        file = io.BytesIO(data)
        while log_format.read_frame(file, len(data) - start, start, SALT, number) is not None:
            assert start < file.tell() <= len(data)
            start = file.tell()
            number += 1
    log_format.has_frame_after(data, start, SALT)


def changes(data: bytes) -> None:
    """The body of a log frame."""
    contents = Contents()
    with contextlib.suppress(ProtocolError):
        replay(data, contents)
    with contextlib.suppress(ProtocolError):
        for message in messages_in(data):
            decode_request(message)


def differences(data: bytes) -> None:
    """The difference of a block of weights; the first byte says how large an element is."""
    itemsize = 1 << (data[0] % 4) if data else 1
    old, new = _BLOCK.copy(), np.empty_like(_BLOCK)
    with contextlib.suppress(ProtocolError):
        restore(old, data[1:], itemsize, new)
    assert np.array_equal(old, _BLOCK)


def _pieces(data: bytes) -> list[bytes]:
    size = data[0] + 1 if data else 1
    return [data[start : start + size] for start in range(1, len(data), size)]


def _kept(*requests: tuple[Op, tuple[object, ...]]) -> bytes:
    log = ChangeLog()
    log.start(lambda: None)
    state = StoreState(log=log)
    for number, (op, args) in enumerate(requests, 1):
        state.execute("client", number, op, args)
    return b"".join(log.take())


def _of_a_client() -> bytes:
    log, identity = ChangeLog(), bytes(range(16))
    log.start(lambda: None)
    log.record(Change.ARRIVED, identity, 10.0)
    for request in (1, 2, 3):
        log.record(Change.ANSWERED, identity, request, OperationKind.RESULT, request)
    log.record(Change.DROPPED, identity, 1)
    log.record(Change.RECEIVED, identity, 3)
    log.record(Change.SET, "k", b"v")
    log.record(Change.ATTACHED, "k", identity)
    log.record(Change.SHARED, "prefix", identity)
    log.record(Change.DELETE, "k")
    log.record(Change.FORGOTTEN, identity)
    return b"".join(log.take())


def _long(message: object, *values: bytes) -> bytes:
    head = packb(1) + (packb(message) if message is not None else b"")
    parts = b"".join(frame(CHUNK, bytes(4) + value) for value in values)
    return pack_opening(0, head, list(map(len, values))) + parts


def _difference(itemsize: int, every: int) -> bytes:
    new = _BLOCK.copy()
    new[:: every * itemsize] += 1
    changes = difference(_BLOCK, new, itemsize)
    assert changes is not None
    return bytes([itemsize.bit_length() - 1]) + changes


_BLOCK = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
_VALUE = ExtType(1, bytes(4))
_CHANGES = _kept((Op.SET, ("k", b"v")), (Op.APPEND, ("k", b"w")), (Op.QUEUE_PUSH, ("q", b"i")), (Op.DELETE_KEY, ("k",)))
_RECORD = packer()((0, Op.SET, "k", b"v"))

TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each for each in (requests, answers, c10d, cached_c10d, greeting, frames, changes, differences)
}
SEEDS: dict[str, list[bytes]] = {
    "requests": [
        b"\xff" + frame_of(1, Op.SET, "k", b"v") + frame_of(2, Op.MULTI_GET, ["k", "l"]) + frame_of(3, Op.ADD, "n", 1),
        b"\3"
        + frame_of(1, Op.QUEUE_POP, "q", True)
        + frame_of(2, Op.QUEUE_PUSH, "q", b"i")
        + frame_of(0, Op.CONFIRM, 1),
        b"\x20" + _long([1, Op.SET, "k", _VALUE], b"value") + frame_of(2, Op.WATCH_KEYS, "k"),
        b"\xff" + _long(None, packb([1, Op.LIST_KEYS, ""])) + _long(None, b"")[:-5] + frame(WITHDRAWN, bytes(4)),
        b"\x10" + frame_of(1, Op.BARRIER, "b", 2) + frame_of(2, Op.BARRIER, "b", 2) + frame_of(3, Op.SUBSCRIBE, "c"),
    ],
    "answers": [
        b"\xff" + hello(LIMIT) + frame_of(1, 0, b"v") + frame_of(2, 1, [1, "no"]) + frame_of(3, 2, b"m"),
        b"\xff" + hello(LIMIT) + _long([1, 0, _VALUE], b"value"),
    ],
    "c10d": [
        b"\xff\x00\xce\xf7\x85\x3c\x01\x01\0\0\0\0\0\0\0k\x01\0\0\0\0\0\0\0v\x04\x01\0\0\0\0\0\0\0n\x01\0\0\0\0\0\0\0",
        b"\2\x00\xce\xf7\x85\x3c\x0a\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0k\x01\0\0\0\0\0\0\0l\x0d\1\2\3\4",
    ],
    "cached_c10d": [
        b"\x03\x01\0\0\0\0\0\0\0k",
        b"\x04\x01\0\0\0\0\0\0\0n\x01\0\0\0\0\0\0\0",
        b"\x06\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0k",
    ],
    "greeting": [b"\x05" + MAGIC + NONCE + bytes(33)],
    "frames": [
        log_format.frame_head(SALT, 0, _RECORD) + _RECORD + log_format.frame_head(SALT, 1, _CHANGES) + _CHANGES,
        log_format.header(SALT, 7),
    ],
    "changes": [_CHANGES, _RECORD, _of_a_client()],
    "differences": [_difference(1, 20), _difference(2, 300), _difference(8, 50), b"\2"],
}
