"""Data model of the store's state: open requests, costs in memory, and the contents that outlive a server.

Used by all of `store.state` and by `store.persistence`. It imports only `store.protocol.operations`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from io import SEEK_END, BytesIO
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol

from asyncdist.store.protocol.operations import Client, Op, Reason, Reply

Place = tuple[Client, int]
"""A client and its request."""
Item = tuple[int, bytes]
"""An item of a queue, with the serial number of its push."""


class Waiter:
    """A request that waits for keys: all those of ``missing`` must come."""

    __slots__ = ("keys", "missing", "op", "place")

    def __init__(self, place: Place, op: Op, keys: list[str], missing: set[str]) -> None:
        self.place, self.op, self.keys, self.missing = place, op, keys, missing


class PopWaiter(NamedTuple):
    """A pop that waits for an item."""

    key: str


class UnackedItem(NamedTuple):
    """A pop that was given an item and has not confirmed it."""

    key: str
    item: Item


class BarrierWaiter(NamedTuple):
    """A request that stands in a barrier."""

    key: str


class ChannelSubscription(NamedTuple):
    """A subscription."""

    channel: str


class KeyWatch(NamedTuple):
    """A watch."""

    key: str


class PrefixWatch(NamedTuple):
    """A watch of all keys with a prefix."""

    prefix: str


Open = Waiter | PopWaiter | UnackedItem | BarrierWaiter | ChannelSubscription | KeyWatch | PrefixWatch


# -- answers ----------------------------------------------------------------------------------------


_NAMED = 256
"""Characters of the longest key that an explanation names in full."""


def named(key: str) -> str:
    """Return a key as an explanation names it, which has to go in one frame."""
    return repr(key) if len(key) <= _NAMED else f"{key[:32]!r}…"


class RequestRefused(Exception):
    """The store will not do this; becomes a reply."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason
        self.text = text


BLOCKED: Final = object()
"""What a request leaves that is answered later."""
SILENT: Final = object()
"""What a request leaves that is never answered."""


class Table:
    """The open requests of all clients, and what has come due in the request that is being done."""

    def __init__(self) -> None:
        self._open: dict[Client, dict[int, Open]] = {}
        self.ledger: MemoryAccounting | None = None
        self.due: list[Reply] = []

    @property
    def clients(self) -> list[Client]:
        """The clients that have open requests."""
        return list(self._open)

    @property
    def num_open(self) -> int:
        """How many requests are open, over all clients."""
        return sum(map(len, self._open.values()))

    def _keep(self, place: Place, entry: Open) -> None:
        mine = self._open.setdefault(place[0], {})
        if place[1] in mine:
            raise RequestRefused(Reason.INVALID, f"request id {place[1]} is in use")
        mine[place[1]] = entry

    def _forget(self, place: Place) -> Place:
        mine = self._open[place[0]]
        del mine[place[1]]
        if not mine:
            del self._open[place[0]]
        return place


# -- beyond a server's end -------------------------------------------------------------------------


KEPT_ANSWERS = 1 << 16
KEPT_NBYTES = 128 << 20
"""Of one client: more than any has in flight, and bounds on what one costs that never says what has arrived."""
ENTRY_NBYTES = 100
"""Approximate overhead in bytes of a value or an item, without the bytes of the value and of the key."""
_ANSWER_NBYTES = 200
"""Approximate overhead in bytes of a kept reply, without the bytes of its value or explanation."""


def cost_of(value: Any) -> int:
    """Return bytes that it costs to keep an answer."""
    match value:
        case bytes():
            return len(value) + _ANSWER_NBYTES
        case (_, str(why)):  # it was refused
            return len(why) + _ANSWER_NBYTES
    return _ANSWER_NBYTES


def growth(key: str, value: bytes, before: bytes | None) -> int:
    """Return by how many bytes memory grows when ``value`` replaces ``before`` (None: the key is new)."""
    return len(key) + len(value) + ENTRY_NBYTES if before is None else len(value) - len(before)


def extend(values: dict[str, bytes], key: str, piece: bytes) -> None:
    """Append to a value. Its memory grows in place if nothing else refers to the value; otherwise the value is copied.

    CPython's BytesIO shares the memory of the bytes that it is made from, and copies it at the first write if another
    reference exists.
    """
    buffer = BytesIO(values[key])
    # Drop the reference, so that the write does not copy.
    values[key] = b""
    buffer.seek(0, SEEK_END)
    buffer.write(piece)
    values[key] = buffer.getvalue()


MemberContents = tuple[float, dict[int, tuple[int, Any]], int]
"""A client's lease in seconds, by request what its changes came to (kind and value of each reply), and up to which request
such answers were thrown away before it had heard them."""


@dataclass(slots=True)
class Contents:
    """What a store holds: values by key, queue items by key and serial number, and the last serial number given.

    ``members`` are its clients by identity, ``ephemeral`` their keys, each with its owner's identity and its value.
    """

    values: dict[str, bytes] = field(default_factory=dict)
    queues: dict[str, dict[int, bytes]] = field(default_factory=dict)
    pushed: int = 0
    members: dict[bytes, MemberContents] = field(default_factory=dict)
    ephemeral: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)

    @property
    def longest_nbytes(self) -> tuple[int, int]:
        """How long the longest value or item is, and the longest key."""
        ephemeral = (value for _, value in self.ephemeral.values())
        items = (item for queue in self.queues.values() for item in queue.values())
        values = map(len, chain(self.values.values(), ephemeral, items))
        keys = map(len, map(str.encode, chain(self.values, self.ephemeral, self.queues)))
        return max(values, default=0), max(keys, default=0)


class MemoryAccounting(Protocol):
    """Is told of every change before it is made."""

    def check_room(self, nbytes: int) -> None:
        """Raise Refused if the store cannot hold so many bytes more."""

    def set(self, key: str, value: bytes, before: bytes | None) -> None: ...

    def append(self, key: str, piece: bytes) -> None: ...

    def deleted(self, key: str, value: bytes) -> None: ...

    def tied(self, key: str, value: bytes) -> None:
        """An ephemeral key is somebody's, who may be said separately."""

    def disowned(self, key: str, value: bytes) -> None:
        """An ephemeral key is nobody's any more; what it holds from now on, if anything, is said separately."""

    def pushed(self, key: str, serial: int, item: bytes) -> None: ...

    def gone(self, key: str, serial: int, item: bytes) -> None:
        """An item has been handed over for good."""
