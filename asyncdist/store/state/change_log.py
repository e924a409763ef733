"""Changes of a store's state as a daemon's log holds them: msgpack arrays, one frame per iteration of the event loop.

`ChangeLog` encodes them and `replay` applies them; `persistence.journal` puts the frames on disk. No I/O.

    [1, key, value]          a value was set; the key has no lease
    [2, key, piece]          a piece was appended to a value
    [3, key]                 a key was deleted
    [4, key, serial, item]   an item was pushed to a queue
    [5, key, serial]         an item was confirmed
    [6, serial]              the end of a snapshot, and the last serial number
    [7, identity, lease]     a client session was opened; its ephemeral keys outlive its connection by ``lease`` seconds
    [8, identity, request, kind, value]   the reply to a change that a session requested
    [9, identity, before]    the replies to requests before this one have arrived
    [10, identity]           a client session was closed, and keeps no lease
    [11, key, identity]      a key, which was set just before, is attached to the lease of a client session
    [12, prefix, identity]   a client session keeps the lease on a prefix
    [14, prefix, identity]   a client session keeps the lease on a prefix no longer
    [13, identity, last]     the replies up to this request's were dropped before they had arrived

A change is the result of a request, so that replay neither needs the state machine nor depends on its version.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import msgpack

from asyncdist.base.callables import Callback
from asyncdist.errors import ProtocolError
from asyncdist.store.protocol.long_messages import LONG_NBYTES
from asyncdist.store.protocol.operations import OperationKind
from asyncdist.store.state.model import Contents, extend

_CHUNK_COUNT, _CHUNK_NBYTES = 500, 1 << 20
_BIN32 = b"\xc6"
"""msgpack's marker of a long binary value; a length of 4 bytes follows."""


class Change(IntEnum):
    """Kinds of changes."""

    SET = 1
    APPEND = 2
    DELETE = 3
    PUSH = 4
    GONE = 5
    END = 6
    ARRIVED = 7
    ANSWERED = 8
    RECEIVED = 9
    FORGOTTEN = 10
    ATTACHED = 11
    SHARED = 12
    DROPPED = 13
    RELEASED = 14


class _Body:
    """The body of a frame, in pieces. A long value is a piece of its own, which is not copied."""

    def __init__(self) -> None:
        self._packer = msgpack.Packer(use_bin_type=True, autoreset=False)
        self._pieces: list[bytes] = []
        self._nbytes = 0  # length of the pieces

    def add(self, change: tuple[Any, ...]) -> None:
        """Add a change, of which only the last field may be long."""
        *before, last = change
        if type(last) is not bytes or len(last) <= LONG_NBYTES:
            self._packer.pack(change)
            return
        head = _BIN32 + len(last).to_bytes(4, "big")
        self._packer.pack_array_header(len(change))
        for field in before:
            self._packer.pack(field)
        self._pieces += self._packer.bytes() + head, last
        self._nbytes += sum(map(len, self._pieces[-2:]))
        self._packer.reset()

    @property
    def nbytes(self) -> int:
        return self._nbytes + len(self._packer.getbuffer())

    def take(self) -> list[bytes]:
        pieces, self._pieces, self._nbytes = [*self._pieces, self._packer.bytes()], [], 0
        self._packer.reset()
        return pieces


class ChangeLog:
    """Collects changes for the journal, from `start` on."""

    def __init__(self) -> None:
        self.pending = False
        self.recording = False
        self._wake: Callback = lambda: None
        self._body = _Body()

    def start(self, wake: Callback) -> None:
        """Record from now on. ``wake`` is called at the first change after each `take`."""
        self.recording, self._wake = True, wake

    @property
    def pending_nbytes(self) -> int:
        return self._body.nbytes

    def take(self) -> list[bytes]:
        self.pending = False
        return self._body.take()

    def record(self, *change: Any) -> None:
        """Record a change: its kind and its fields, of which only the last may be long."""
        if not self.recording:
            return
        self._body.add(change)
        if not self.pending:
            self.pending = True
            self._wake()


# -- replay ------------------------------------------------------------------------------------------


def replay(body: bytes, contents: Contents) -> bool:
    """Apply the changes of one frame; return whether they end a snapshot. Raises ProtocolError for malformed changes."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(body) + 1)
    unpacker.feed(body)
    values, attached, ended = contents.values, contents.attached, False
    try:
        for change in unpacker:
            if change[0] == Change.SET:
                _, key, value = change
                if type(key) is not str or type(value) is not bytes:
                    raise TypeError("the key is not text, or the value is not bytes")
                values[key] = value
                attached.pop(key, None)
            else:
                ended = _replay_other(change, contents)
    except (TypeError, ValueError, LookupError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(f"a malformed change ({type(error).__name__}: {error})") from None
    if unpacker.tell() != len(body):
        raise ProtocolError("the last change of a frame is cut short")
    return ended


def _replay_other(change: list[Any], contents: Contents) -> bool:
    match change:
        case [Change.APPEND, str(key), bytes(piece)]:
            contents.values.setdefault(key, b"")
            extend(contents.values, key, piece)
        case [Change.DELETE, str(key)]:
            del contents.values[key]
            contents.attached.pop(key, None)
        case [Change.PUSH, str(key), int(serial), bytes(item)]:
            contents.queues.setdefault(key, {})[serial] = item
            contents.pushed = max(contents.pushed, serial)
        case [Change.GONE, str(key), int(serial)]:
            del contents.queues[key][serial]
            if not contents.queues[key]:
                del contents.queues[key]
        case [Change.END, int(serial)]:
            contents.pushed = serial
            return True
        case [Change.ARRIVED, bytes(identity), float(lease)]:
            contents.members[identity] = (lease, {}, 0)
        case [Change.ANSWERED, bytes(identity), int(request), int(kind), value]:
            contents.members[identity][1][request] = (OperationKind(kind), value)
        case [Change.RECEIVED, bytes(identity), int(before)]:
            _discard(contents.members[identity][1], before)
        case [Change.DROPPED, bytes(identity), int(last)]:
            lease, answers, unsure = contents.members[identity]
            contents.members[identity] = (lease, answers, max(unsure, last))
            _discard(answers, last + 1)
        case [Change.FORGOTTEN, bytes(identity)]:
            del contents.members[identity]
            for prefix in [prefix for prefix, keepers in contents.shared.items() if identity in keepers]:
                _release(contents, prefix, identity)
        case [Change.ATTACHED, str(key), bytes(identity)]:
            contents.attached[key] = identity
        case [Change.SHARED, str(prefix), bytes(identity)]:
            contents.shared.setdefault(prefix, set()).add(identity)
        case [Change.RELEASED, str(prefix), bytes(identity)]:
            _release(contents, prefix, identity)
        case _:
            raise ValueError(f"unknown: {change!r:.80}")
    return False


def _release(contents: Contents, prefix: str, identity: bytes) -> None:
    contents.shared[prefix].remove(identity)
    if not contents.shared[prefix]:
        del contents.shared[prefix]


def _discard(answers: dict[int, tuple[int, Any]], before: int) -> None:
    while answers and (oldest := next(iter(answers))) < before:
        del answers[oldest]


def snapshot(contents: Contents) -> Iterator[list[bytes]]:
    """Yield the bodies of frames that restore ``contents``, in pieces; each is packed in a short time."""
    body = _Body()
    for count, change in enumerate(_changes(contents), 1):
        body.add(change)
        if count % _CHUNK_COUNT == 0 or body.nbytes >= _CHUNK_NBYTES:
            yield body.take()
    body.add((Change.END, contents.pushed))
    yield body.take()


def _changes(contents: Contents) -> Iterator[tuple[Any, ...]]:
    for key, value in contents.values.items():
        yield Change.SET, key, value
    for key, items in contents.queues.items():
        for serial, item in items.items():
            yield Change.PUSH, key, serial, item
    for identity, (lease, answers, unsure) in contents.members.items():
        yield Change.ARRIVED, identity, lease
        if unsure:
            yield Change.DROPPED, identity, unsure
        for request, (kind, value) in answers.items():
            yield Change.ANSWERED, identity, request, kind, value
    for key, identity in contents.attached.items():
        yield Change.ATTACHED, key, identity
    for prefix, keepers in contents.shared.items():
        for identity in keepers:
            yield Change.SHARED, prefix, identity
