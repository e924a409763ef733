"""Data model of the store's state: refusals, limits, costs in memory, and the contents that outlive a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from io import SEEK_END, BytesIO
from itertools import chain
from typing import Any, Final

from asyncdist.store.protocol.operations import Client, OperationKind, Reason, Reply

Place = tuple[Client, int]
"""A client and its request."""
Item = tuple[int, bytes]
"""The serial number of a queue item, and the item."""


_NAMED = 256
"""Characters of the longest key that an error names in full."""


def named(key: str) -> str:
    """Return a key as error messages show it, short enough for one frame."""
    return repr(key) if len(key) <= _NAMED else f"{key[:32]!r}…"


class RequestRefused(Exception):
    """The store refuses a request; `reply` makes the reply to it."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason
        self.text = text

    def reply(self, client: Client, request: int) -> Reply:
        return Reply(client, request, OperationKind.REFUSED, (int(self.reason), self.text))


# -- limits ----------------------------------------------------------------------------------------


class SizeLimits:
    """The longest value and key in bytes that the store accepts."""

    def __init__(self, max_value_nbytes: int = 1 << 62, max_key_nbytes: int = 1 << 62) -> None:
        self.max_value_nbytes = max_value_nbytes
        self._max_key_nbytes = max_key_nbytes
        self.short_key_length = max_key_nbytes // 4
        """A key of at most this number of characters is not too long: a character has at most 4 bytes."""

    def check(self, key: str, nbytes: int) -> None:
        """Raise RequestRefused if the key, or a value of ``nbytes`` under it, is too long."""
        if nbytes > self.max_value_nbytes:
            raise RequestRefused(
                Reason.TOO_LARGE,
                f"a value of {nbytes} bytes for {named(key)}, and the store takes {self.max_value_nbytes}: raise "
                "ASYNCDIST_STORE_MAX_VALUE_NBYTES where the store runs, or send bulk data through a collective",
            )
        if len(key) > self.short_key_length and (key_nbytes := len(key.encode())) > self._max_key_nbytes:
            raise RequestRefused(
                Reason.TOO_LARGE,
                f"a key of {key_nbytes} bytes, {named(key)}, and the store takes {self._max_key_nbytes}: choose a "
                "shorter one, or raise ASYNCDIST_STORE_MAX_KEY_NBYTES where the store runs",
            )


class MemoryQuota:
    """Counts the bytes that a store holds, and refuses more than ``max_nbytes`` (0: no limit).

    ``nbytes`` counts keys, values, queue items and kept replies. ``arriving_nbytes`` counts the parts of long values
    that have arrived but are not stored yet.
    """

    def __init__(self, max_nbytes: int = 0) -> None:
        self.nbytes = 0
        self.arriving_nbytes = 0
        self.max_nbytes = max_nbytes

    def check(self, nbytes: int) -> None:
        """Raise RequestRefused if the store cannot hold ``nbytes`` more."""
        held = self.nbytes + self.arriving_nbytes
        if self.max_nbytes and nbytes > 0 and held + nbytes > self.max_nbytes:
            raise RequestRefused(
                Reason.FULL,
                f"the store holds {held} bytes and takes {self.max_nbytes}, too few for {nbytes} more: delete unused "
                "keys, or raise --max-memory (ASYNCDIST_STORE_MAX_NBYTES) where the store runs",
            )

    def take(self, nbytes: int) -> None:
        """Count ``nbytes`` more, or fewer if negative. Raises RequestRefused if they do not fit."""
        if self.max_nbytes:
            self.check(nbytes)
        self.nbytes += nbytes

    def reserve(self, nbytes: int) -> None:
        """Count a part of a long value that has arrived. Raises RequestRefused if it does not fit."""
        self.check(nbytes)
        self.arriving_nbytes += nbytes


# -- requests --------------------------------------------------------------------------------------

NO_REPLY: Final = object()
"""The result of a request that gets its reply later, or never."""


def drop_from(waiting: dict[str, dict[Any, None]], key: str, entry: object) -> None:
    """Remove an entry from those that wait under a key."""
    entries = waiting.get(key)
    if entries is not None:
        entries.pop(entry, None)
        if not entries:
            del waiting[key]


# -- contents that outlive a server ----------------------------------------------------------------

KEPT_ANSWERS = 1 << 16
KEPT_NBYTES = 128 << 20
"""Limits of one client's kept replies: more than a client has in flight. They apply to clients that never send RECEIVED."""
ENTRY_NBYTES = 100
"""Approximate overhead in bytes of a value or an item, without the bytes of the value and of the key."""
_ANSWER_NBYTES = 200
"""Approximate overhead in bytes of a kept reply, without the bytes of its value or error text."""


def cost_of(value: Any) -> int:
    """Return the memory of a kept reply in bytes."""
    match value:
        case bytes():
            return len(value) + _ANSWER_NBYTES
        case (_, str(why)):  # a refusal
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
"""A client's lease in seconds, the kind and value of its kept replies by request, and the last request whose reply was
dropped before it had arrived."""


@dataclass(slots=True)
class Contents:
    """The contents of a store, as a later server of the same store restores them."""

    values: dict[str, bytes] = field(default_factory=dict)
    queues: dict[str, dict[int, bytes]] = field(default_factory=dict)  # by key and serial number
    pushed: int = 0  # the last serial number
    members: dict[bytes, MemberContents] = field(default_factory=dict)  # client sessions by identity
    attached: dict[str, bytes] = field(default_factory=dict)  # identities by ephemeral key
    shared: dict[str, set[bytes]] = field(default_factory=dict)  # identities that keep the lease on a prefix

    @property
    def longest_nbytes(self) -> tuple[int, int]:
        """The length of the longest value or item, and of the longest key."""
        items = (item for queue in self.queues.values() for item in queue.values())
        values = map(len, chain(self.values.values(), items))
        keys = map(len, map(str.encode, chain(self.values, self.queues)))
        return max(values, default=0), max(keys, default=0)
