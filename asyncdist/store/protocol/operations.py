"""The operations of a store, their replies, and the checks of a user's arguments.

A `Command` is an operation with checked arguments. The awaited and the blocking stores both make their commands here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

from asyncdist.errors import StoreTimeoutError, UsageError

T = TypeVar("T")


KEY, KEYS, VALUE, VALUES, NUMBER, FLAG = "key", "keys", "value", "values", "number", "flag"


class Op(IntEnum):
    """Operations by their number on the wire, each with the kinds of its arguments."""

    kinds: tuple[str, ...]

    def __new__(cls, number: int, *kinds: str) -> Op:
        op = int.__new__(cls, number)
        op._value_, op.kinds = number, kinds
        return op

    SET = 1, KEY, VALUE
    GET = 2, KEY
    ADD = 3, KEY, NUMBER
    WAIT = 4, KEYS
    CHECK = 5, KEYS
    COMPARE_SET = 6, KEY, VALUE, VALUE
    DELETE_KEY = 7, KEY
    NUM_KEYS = 8
    APPEND = 9, KEY, VALUE
    MULTI_GET = 10, KEYS
    MULTI_SET = 11, KEYS, VALUES
    LIST_KEYS = 12, KEY
    QUEUE_PUSH = 13, KEY, VALUE
    QUEUE_POP = 14, KEY, FLAG
    QUEUE_LEN = 15, KEY
    BARRIER = 16, KEY, NUMBER
    PUBLISH = 17, KEY, VALUE
    SUBSCRIBE = 18, KEY
    CANCEL = 19, NUMBER
    """Withdraw an earlier request; its unconfirmed queue item goes back. Has no reply."""
    CONFIRM = 20, NUMBER
    """Acknowledge the item of an earlier QUEUE_POP. Has no reply."""
    LEAVE = 21
    """Withdraw all earlier requests. Has no reply. In a file store's log: a process has closed the file."""
    OPEN_SCOPED_STORE = 22, KEY
    """Open a port that serves an empty store until the lease on a prefix ends. Servers only."""
    ACQUIRE_LEASE = 23, KEY
    """Acquire the lease on a prefix. Its keys are deleted when the last client that keeps the lease has ended."""
    RESUME = 24, VALUE, NUMBER
    """Identify the client on a new connection, and state its lease in milliseconds. Servers only.

    In a file store's log: a process on the host of that name has opened the file.
    """
    RECEIVED = 25, NUMBER
    """Acknowledge the replies to all changes with a smaller number. Has no reply. Servers only."""
    SET_EPHEMERAL = 26, KEY, VALUE
    """Store a value under a key that is attached to the client's lease."""
    STATUS = 27
    """Return the server's status, figures and texts by name. Servers only."""
    WATCH = 28, KEY
    """Return a key's value, and from then on publish every change."""
    WATCH_KEYS = 30, KEY
    """Return all keys that begin with a prefix, each followed by its value, and from then on publish every change."""
    RESTORE_EPHEMERAL = 31, KEY, VALUE
    """Store an ephemeral key again that expired while the client was disconnected; return whether the key was free."""
    RELEASE_LEASE = 32, KEY
    """Release the lease on a prefix."""
    OFFER = 33, KEY, VALUE, KEYS, KEYS
    """Store a value under a key unless it has one, wait until all keys of the first list exist, and return their values,
    and those of the second list: an empty one for each of these that is missing. It may be repeated."""


STREAMS = frozenset((Op.SUBSCRIBE, Op.WATCH, Op.WATCH_KEYS))
"""Operations with one result, and then any number of published messages."""

BLOCKING = frozenset((Op.GET, Op.WAIT, Op.MULTI_GET, Op.OFFER, Op.QUEUE_POP, Op.BARRIER, Op.ACQUIRE_LEASE)) | STREAMS
"""Operations that may stay open at the store until they are answered, cancelled or confirmed."""

_AWAITED = {Op.QUEUE_POP: "the queue stayed empty", Op.BARRIER: "not all have come"}
"""What a request has waited for in vain, unless that is a key."""

CHANGED, GONE = b"\1", b"\0"
"""The first byte of a message to a watch. The value follows, if there is one.

To a watch of a prefix, the key's length in 4 bytes and the key come between them.
"""

KEY_CHANGES = frozenset((Op.SET, Op.ADD, Op.COMPARE_SET, Op.DELETE_KEY, Op.APPEND, Op.MULTI_SET))
"""Operations that change keys. A key that they change is not ephemeral afterwards."""

CHANGING = KEY_CHANGES | {Op.SET_EPHEMERAL, Op.RESTORE_EPHEMERAL, Op.QUEUE_PUSH, Op.PUBLISH}
"""Operations that are applied once: a client that repeats one after a broken connection gets the first reply."""

REPEATABLE = frozenset((Op.SET, Op.SET_EPHEMERAL, Op.MULTI_SET))
"""The operations of `CHANGING` that may be applied twice without a difference."""

LEASED = frozenset((Op.SET_EPHEMERAL, Op.RESTORE_EPHEMERAL, Op.ACQUIRE_LEASE, Op.RELEASE_LEASE, Op.OPEN_SCOPED_STORE))
"""Operations on a lease. Only clients with a session have leases."""

SWEEPING = frozenset((Op.LIST_KEYS, Op.WATCH_KEYS, Op.STATUS))
"""Operations that visit all keys and may take long: after each, the server serves other connections."""

SERVERS = frozenset((Op.OPEN_SCOPED_STORE, Op.RESUME, Op.RECEIVED, Op.STATUS))
"""Operations that the server executes, and not the state machine."""


# -- answers ---------------------------------------------------------------------------------------

Client = Hashable


class OperationKind(IntEnum):
    """Kinds of replies."""

    RESULT = 0
    REFUSED = 1
    PUBLISHED = 2
    """3 is the server's hello."""


class Reason(IntEnum):
    """Why the store refused a request."""

    INVALID = 1
    """The operation does not fit the stored value, such as ``add`` to a text."""
    EMPTY = 2
    """The queue is empty, and the pop does not wait."""
    TOO_LARGE = 3
    """The value, or the reply, is larger than the store accepts."""
    FULL = 4
    """The store has reached its memory limit."""
    UNSURE = 5
    """The request may have been executed for an earlier connection, whose reply the store has dropped."""


class Reply(NamedTuple):
    """A reply to a client: ``value`` is a result, a (reason, text) pair, or a published message."""

    client: Any
    request: int
    kind: OperationKind
    value: Any


# -- commands --------------------------------------------------------------------------------------

Value = bytes | bytearray | memoryview | str


class Command(NamedTuple, Generic[T]):
    """One operation and its checked arguments; ``T`` is the type of its result."""

    op: Op
    args: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return self.op.name.lower()

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that an error names."""
        if not self.args or self.op.kinds[0] not in (KEY, KEYS):
            return ()
        first = self.args[0]
        return (first,) if isinstance(first, str) else tuple(first)

    def overdue(self, limit: float, store: str) -> StoreTimeoutError:
        """Return the error of a request to ``store``, a noun phrase, without a reply within ``limit`` seconds."""
        if self.op in BLOCKING and self.op not in STREAMS:
            missing = _AWAITED.get(self.op, "the keys were not set")
            why = f"{missing}, or {store} had not sent the whole answer"
        elif self.op in CHANGING:
            why = f"{store} did not answer; the change may have been made; read the value before you repeat it"
        else:
            why = f"{store} did not answer; check whether the store runs, and what keeps it busy"
        return StoreTimeoutError(self.name, self.keys, limit, why)

    def under(self, prefix: str) -> Command[T]:
        """Return the same command on keys under ``prefix``."""
        pairs = zip(self.op.kinds, self.args, strict=True)
        return Command(self.op, tuple(_under(prefix, kind, arg) for kind, arg in pairs))


def _under(prefix: str, kind: str, argument: Any) -> Any:
    if kind == KEY:
        return prefix + argument
    if kind == KEYS:
        return [prefix + key for key in argument]
    return argument


# -- checks ------------------------------------------------------------------------------------------


def key_part(name: object) -> str:
    """Return a name that a program gives as a part of a key, without a "/"; raise UsageError if it is not a text."""
    if not isinstance(name, str):
        raise UsageError(f"names are texts, and {name!r} is none")
    return quote(name, safe="")


def _key(key: object) -> str:
    if isinstance(key, bytes):  # torch's stores take them, too
        try:
            return key.decode()
        except UnicodeDecodeError:
            raise UsageError(f"a store key is text, and {key!r} is not UTF-8") from None
    if not isinstance(key, str):
        raise UsageError(f"a store key is a str, not {type(key).__name__}: {key!r}")
    if not key.isascii():
        _encoded(key)
    return key


def _keys(keys: Iterable[str]) -> list[str]:
    if isinstance(keys, (str, bytes)):
        raise UsageError(f"expected a list of keys, not the single {keys!r}: put it in brackets")
    if not isinstance(keys, Iterable):
        raise UsageError(f"expected a list of keys, not {keys!r}")
    return [_key(key) for key in keys]


def _value(value: object) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, str):
        return _encoded(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise UsageError(f"a store value is bytes or str, not {type(value).__name__}: encode it first")


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text!r} cannot be encoded as UTF-8: it holds a lone surrogate") from None


def _number(number: object, least: int = -(1 << 63)) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number < 1 << 63:
        raise UsageError(f"expected a whole number from {least} to 2**63 - 1, not {number!r}")
    return number


# -- the commands; each function raises UsageError for a wrong argument ------------------------------

_CHECKS: dict[str, Callable[[Any], Any]] = {KEY: _key, KEYS: _keys, VALUE: _value, NUMBER: _number, FLAG: bool}


def command(op: Op, *args: object) -> Command[Any]:
    """Return the command of an operation with these arguments, once they are checked by their kinds."""
    return Command(op, tuple([_CHECKS[kind](arg) for kind, arg in zip(op.kinds, args, strict=True)]))


# Those of the hot path, and those with checks of their own.
def set_(key: str, value: Value) -> Command[None]:
    return Command(Op.SET, (_key(key), _value(value)))


def get(key: str) -> Command[bytes]:
    if type(key) is not str or not key.isascii():  # checked here too: a call less on the hot path
        key = _key(key)
    return Command(Op.GET, (key,))


def add(key: str, amount: int) -> Command[int]:
    return Command(Op.ADD, (_key(key), _number(amount)))


def multi_set(keys: Iterable[str], values: Iterable[Value]) -> Command[None]:
    names, contents = _keys(keys), [_value(value) for value in values]
    if len(names) != len(contents):
        raise UsageError(f"multi_set takes one value per key, not {len(contents)} values for {len(names)} keys")
    return Command(Op.MULTI_SET, (names, contents))


def barrier(key: str, world_size: int) -> Command[None]:
    return Command(Op.BARRIER, (_key(key), _number(world_size, least=1)))


def acquire_lease(prefix: str) -> Command[None]:
    return Command(Op.ACQUIRE_LEASE, (_key(prefix),))


def release_lease(prefix: str) -> Command[None]:
    return Command(Op.RELEASE_LEASE, (_key(prefix),))


def watched_key(message: bytes) -> tuple[str, bytes | None]:
    """Return the key and the value in a message to a watch of a prefix; None if the key was deleted."""
    after = 5 + int.from_bytes(message[1:5], "little")
    return message[5:after].decode(errors="replace"), message[after:] if message[:1] == CHANGED else None


def watched(message: bytes) -> bytes | None:
    """Return the value in a message to a watch of a key; None if the key was deleted."""
    return message[1:] if message[:1] == CHANGED else None
