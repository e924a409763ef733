"""Changes of a store's state as a daemon's log holds them: msgpack arrays, one frame per iteration of the event loop.

Written by `ChangeLog` and read by `replay`; `journal` puts the frames on disk. No I/O.

    [1, key, value]          a value was set
    [2, key, piece]          something was appended to one
    [3, key]                 a key was deleted
    [4, key, serial, item]   an item was pushed to a queue
    [5, key, serial]         an item has been handed over for good
    [6, serial]              the end of a snapshot: all is there, and this was the last serial number
    [7, identity, lease]     a client came, and its ephemeral keys stay so many seconds
    [8, identity, request, kind, value]   what a change that a client asked for came to
    [9, identity, before]    the answers to requests before this one have arrived
    [10, identity]           a client will not be back
    [11, key, identity, value]            an ephemeral key of a client was set
    [12, key]                an ephemeral key is nobody's any more, and gone unless it is set right after
    [13, identity, last]     the oldest answers, up to this request's, were thrown away before they had arrived

Changes say what came out, not what was asked: to make them again needs no state machine and depends on no version of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import msgpack

from asyncdist.errors import ProtocolError
from asyncdist.store.protocol.chunking import LONG_NBYTES
from asyncdist.store.protocol.operations import OperationKind, Reason, Reply
from asyncdist.store.state.model import ENTRY_NBYTES, Contents, RequestRefused, cost_of, extend, growth

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
    OWNED = 11
    DISOWNED = 12
    DROPPED = 13


class _Body:
    """The body of a frame that is being put together, in pieces: long values are pieces by themselves, and never copied."""

    def __init__(self) -> None:
        self._packer = msgpack.Packer(use_bin_type=True, autoreset=False)
        self._pieces: list[bytes] = []
        self._nbytes = 0  # of the pieces

    def add(self, change: tuple[Any, ...]) -> None:
        """Add a change, in which a long value can only come last."""
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
        """Return the pieces, and begin another body."""
        pieces, self._pieces, self._nbytes = [*self._pieces, self._packer.bytes()], [], 0
        self._packer.reset()
        return pieces


class ChangeLog:
    """A store's ledger: counts what is held, refuses more than ``max_nbytes`` (0: no limit), and writes down what changes.

    ``wake`` is called when there is something to `take` after there was nothing; without it nothing is written down.
    """

    def __init__(self, *, max_nbytes: int = 0, wake: Callable[[], None] | None = None) -> None:
        self.nbytes = 0
        self.pending = False
        self._max_nbytes = max_nbytes
        self._arriving_nbytes = 0
        self._wake = wake
        self._body = _Body()
        self._ephemeral: set[str] = set()

    def open(self, contents: Contents) -> None:
        """Begin with what the store holds."""
        values = sum(len(key) + len(value) + ENTRY_NBYTES for key, value in contents.values.items())
        items = (len(item) + ENTRY_NBYTES for queue in contents.queues.values() for item in queue.values())
        tied = sum(len(key) + len(value) + ENTRY_NBYTES for key, (_, value) in contents.ephemeral.items())
        answers = (cost_of(value) for _, kept, _ in contents.members.values() for _, value in kept.values())
        self.nbytes = values + sum(items) + tied + sum(answers)
        self._ephemeral = set(contents.ephemeral)

    @property
    def pending_nbytes(self) -> int:
        """How many bytes `take` would return."""
        return self._body.nbytes

    def take(self) -> list[bytes]:
        """Return the changes since the last time, for one frame, in pieces."""
        self.pending = False
        return self._body.take()

    # -- what the state machine calls ---------------------------------------------------------------

    def expect(self, nbytes: int) -> None:
        """So many bytes have come of a value that is not whole yet. Raises Refused where there is no room for them."""
        self.check_room(nbytes)
        self._arriving_nbytes += nbytes

    def expect_no_more(self, nbytes: int) -> None:
        """They are part of a value now, or will never be."""
        self._arriving_nbytes -= nbytes

    def check_room(self, nbytes: int) -> None:
        held = self.nbytes + self._arriving_nbytes
        if self._max_nbytes and nbytes > 0 and held + nbytes > self._max_nbytes:
            raise RequestRefused(
                Reason.FULL,
                f"the store holds {held} bytes and takes {self._max_nbytes}, too few for {nbytes} more: delete keys that "
                "nobody needs, or raise --max-memory (ASYNCDIST_STORE_MAX_NBYTES) where the store runs",
            )

    def set(self, key: str, value: bytes, before: bytes | None) -> None:
        self.nbytes += growth(key, value, before)
        self._note((Change.SET, key, value))

    def append(self, key: str, piece: bytes) -> None:
        self.nbytes += len(piece)
        self._note((Change.APPEND, key, piece))

    def deleted(self, key: str, value: bytes) -> None:
        self.nbytes -= len(key) + len(value) + ENTRY_NBYTES
        self._note((Change.DELETE, key))

    def pushed(self, key: str, serial: int, item: bytes) -> None:
        self.nbytes += len(item) + ENTRY_NBYTES
        self._note((Change.PUSH, key, serial, item))

    def gone(self, key: str, serial: int, item: bytes) -> None:
        self.nbytes -= len(item) + ENTRY_NBYTES
        self._note((Change.GONE, key, serial))

    # -- what concerns clients ------------------------------------------------------------------------

    def arrived(self, identity: bytes, lease: float) -> None:
        self._note((Change.ARRIVED, identity, lease))

    def answered(self, identity: bytes, reply: Reply) -> None:
        self._note((Change.ANSWERED, identity, reply.request, reply.kind, reply.value))

    def received(self, identity: bytes, before: int) -> None:
        self._note((Change.RECEIVED, identity, before))

    def dropped(self, identity: bytes, last: int) -> None:
        self._note((Change.DROPPED, identity, last))

    def kept(self, nbytes: int) -> None:
        self.nbytes += nbytes

    def forgotten(self, identity: bytes) -> None:
        self._note((Change.FORGOTTEN, identity))

    def owned(self, key: str, identity: bytes, value: bytes) -> None:
        """An ephemeral key was set by a client that may come back for it."""
        self._ephemeral.add(key)
        self._note((Change.OWNED, key, identity, value))

    def tied(self, key: str, value: bytes) -> None:
        self.nbytes += len(key) + len(value) + ENTRY_NBYTES

    def disowned(self, key: str, value: bytes) -> None:
        self.nbytes -= len(key) + len(value) + ENTRY_NBYTES
        if key in self._ephemeral:
            self._ephemeral.remove(key)
            self._note((Change.DISOWNED, key))

    def _note(self, change: tuple[Any, ...]) -> None:
        if self._wake is None:
            return
        self._body.add(change)
        if not self.pending:
            self.pending = True
            self._wake()


# -- making them again -------------------------------------------------------------------------------


def replay(body: bytes, contents: Contents) -> bool:
    """Make the changes of one frame; return whether they end a snapshot. Raises ProtocolError for malformed changes."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(body) + 1)
    unpacker.feed(body)
    values, ended = contents.values, False
    try:
        for change in unpacker:
            if change[0] == Change.SET:
                _, key, value = change
                values[_text(key)] = _bytes(value)
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
        case _:
            _replay_of_client(change, contents)
    return False


def _replay_of_client(change: list[Any], contents: Contents) -> None:
    match change:
        case [Change.ARRIVED, bytes(identity), float(lease)]:
            contents.members[identity] = (lease, {}, 0)
        case [Change.ANSWERED, bytes(identity), int(request), int(kind), value]:
            contents.members[identity][1][request] = (OperationKind(kind), value)
        case [Change.RECEIVED, bytes(identity), int(before)]:
            _let_go(contents.members[identity][1], before)
        case [Change.DROPPED, bytes(identity), int(last)]:
            lease, answers, unsure = contents.members[identity]
            contents.members[identity] = (lease, answers, max(unsure, last))
            _let_go(answers, last + 1)
        case [Change.FORGOTTEN, bytes(identity)]:
            del contents.members[identity]
        case [Change.OWNED, str(key), bytes(identity), bytes(value)]:
            contents.ephemeral[key] = (identity, value)
        case [Change.DISOWNED, str(key)]:
            del contents.ephemeral[key]
        case _:
            raise ValueError(f"unknown: {change!r:.80}")


def _let_go(answers: dict[int, tuple[int, Any]], before: int) -> None:
    while answers and (oldest := next(iter(answers))) < before:
        del answers[oldest]


def _text(key: object) -> str:
    if type(key) is not str:
        raise TypeError("a key that is no text")
    return key


def _bytes(value: object) -> bytes:
    if type(value) is not bytes:
        raise TypeError("a value that is no bytes")
    return value


def snapshot(contents: Contents) -> Iterator[list[bytes]]:
    """Yield the bodies of the frames that make ``contents`` out of nothing, in pieces, each packed in a moment."""
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
    for key, (owner, value) in contents.ephemeral.items():
        yield Change.OWNED, key, owner, value
