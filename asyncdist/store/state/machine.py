"""The store's state machine: executes requests on keys, queues, barriers, channels and watches, without I/O.

Called by `asyncdist.store.server` and by the file store, which replays its log. It imports only `store.protocol` and the
standard library: no asyncio, no sockets, no clock. A request is an operation of a *client* (any hashable; a server passes
the connection) under a *request id* that the client chooses. The invariants:

* A blocked request is an entry of ``_open[client][request]`` and of each wait queue that it is in. `cancel` and `leave`
  remove it from all of them, so that no wake-up is lost on a client that has gone.
* A queue item goes to exactly one client and is kept until that client acknowledges it. A client that cancels, leaves or
  dies first returns the item to the head of the queue.
* A barrier opens when enough requests wait in it *at one time*. It stays open, and its key holds the count, until the key
  is deleted.
* `MemoryAccounting`, if there is one, hears of every change of a value or a queue before the change is made. Queue items
  have serial numbers, because items may be acknowledged out of order.
* An ephemeral key belongs to its owner until another request sets or deletes it, and is deleted when the owner leaves.
* Nothing depends on time: a timeout is a `cancel` by the waiting client. The same requests in the same order give the
  same replies and the same state, on which the file store's log relies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from asyncdist.store.protocol.operations import SERVERS, Client, Op, OperationKind, Reason, Reply
from asyncdist.store.state.model import (
    BLOCKED,
    SILENT,
    BarrierWaiter,
    ChannelSubscription,
    Contents,
    KeyWatch,
    Open,
    Place,
    PopWaiter,
    PrefixWatch,
    RequestRefused,
    UnackedItem,
    Waiter,
    extend,
    growth,
    named,
)
from asyncdist.store.state.ownership import KeyOwnership
from asyncdist.store.state.queues import drop_from


class StoreState(KeyOwnership):
    """The state machine. ``max_value_nbytes`` bounds what a single value may grow to, ``max_key_nbytes`` its key."""

    def __init__(self, max_value_nbytes: int = 1 << 62, max_key_nbytes: int = 1 << 62) -> None:
        super().__init__()
        self.max_value_nbytes = max_value_nbytes
        self.max_key_nbytes = max_key_nbytes
        self._surely_short = max_key_nbytes // 4  # no character has more than 4 bytes
        self._value_waiters: dict[str, dict[Waiter, None]] = {}  # key -> for a value; `wait` stands in the next one too
        self._barriers: dict[str, tuple[int, dict[Place, None]]] = {}  # barrier -> world size, who is in
        self._subscriptions: dict[str, dict[Place, None]] = {}  # channel -> subscribers

    # -- the whole interface ----------------------------------------------------------------------

    def execute(self, client: Client, request: int, op: Op, args: tuple[Any, ...]) -> list[Reply]:
        """Do one request and return what came due, its own reply included unless it blocks."""
        due = self.due
        try:
            result = HANDLERS[op](self, (client, request), *args)
            if result is not BLOCKED and result is not SILENT:
                due.append(Reply(client, request, OperationKind.RESULT, result))
        except RequestRefused as refused:
            due.append(Reply(client, request, OperationKind.REFUSED, (int(refused.reason), refused.text)))
        self.due = []
        return due

    @property
    def num_keys(self) -> int:
        return len(self._values)

    def collect(self) -> list[Reply]:
        """Return what handlers that were called directly have made due for others, once."""
        due, self.due = self.due, []
        return due

    def leave(self, client: Client) -> list[Reply]:
        """Forget a client that has gone and everything it had open; return what others get from that."""
        return self.execute(client, 0, Op.LEAVE, ())

    # -- what outlives a server -------------------------------------------------------------------

    def contents(self) -> Contents:
        """Return all values and queue items as they are now; items that nobody has confirmed are in their queues."""
        queues = {key: list(queue) for key, queue in self._queues.items()}
        for mine in self._open.values():
            for entry in mine.values():
                if isinstance(entry, UnackedItem):
                    queues.setdefault(entry.key, []).append(entry.item)
        lasting = dict(self._values)
        for key in self._owners:
            del lasting[key]
        return Contents(lasting, {key: dict(sorted(items)) for key, items in queues.items()}, self._pushed)

    def restore(self, contents: Contents) -> None:
        """Restore what an earlier server left. Call it before the first request."""
        self._values = contents.values
        for key, (_, value) in contents.ephemeral.items():
            self._values[key] = value  # whoever restores the owners says whose it is
        self._queues = {key: deque(items.items()) for key, items in contents.queues.items() if items}
        self._pushed = contents.pushed

    # -- values -----------------------------------------------------------------------------------

    def _set(self, place: Place, key: str, value: bytes) -> None:
        self._put(key, value)

    def _put(self, key: str, value: bytes) -> None:
        if len(value) > self.max_value_nbytes or len(key) > self._surely_short:
            self._check_size(key, len(value))
        if self.ledger is not None:
            self.ledger.check_room(growth(key, value, self._values.get(key)))
            self.ledger.set(key, value, self._durable_value(key))
        self._store(key, value)

    def _durable_value(self, key: str) -> bytes | None:
        """Return what a ledger knows to be under a key."""
        return None if key in self._owners else self._values.get(key)

    def _store(self, key: str, value: bytes) -> None:
        if key in self._owners:
            self._detach(key)
        self._values[key] = value
        if key in self._key_watches or self._prefix_watches:
            self._notify_watchers(key)
        if key in self._value_waiters:
            for waiting in self._value_waiters.pop(key):
                self._arrived(waiting, key)

    def _check_size(self, key: str, nbytes: int) -> None:
        if nbytes > self.max_value_nbytes:
            raise RequestRefused(
                Reason.TOO_LARGE,
                f"a value of {nbytes} bytes for {named(key)}, and the store takes {self.max_value_nbytes}: raise "
                "ASYNCDIST_STORE_MAX_VALUE_NBYTES where the store runs, or send bulk data through a collective",
            )
        if len(key) > self._surely_short and (key_nbytes := len(key.encode())) > self.max_key_nbytes:
            raise RequestRefused(
                Reason.TOO_LARGE,
                f"a key of {key_nbytes} bytes, {named(key)}, and the store takes {self.max_key_nbytes}: choose a "
                "shorter one, or raise ASYNCDIST_STORE_MAX_KEY_NBYTES where the store runs",
            )

    def _get(self, place: Place, key: str) -> Any:
        value = self._values.get(key)
        return self._wait_for(place, Op.GET, [key], {key}) if value is None else value

    def peek(self, key: str) -> bytes | None:
        """Return a value without waiting for one."""
        return self._values.get(key)

    def _multi_get(self, place: Place, keys: list[str]) -> Any:
        missing = {key for key in keys if key not in self._values}
        return self._wait_for(place, Op.MULTI_GET, keys, missing) if missing else [self._values[key] for key in keys]

    def _wait(self, place: Place, keys: list[str]) -> Any:
        missing = {key for key in keys if not self._present(key)}
        return self._wait_for(place, Op.WAIT, keys, missing) if missing else None

    def _check(self, place: Place, keys: list[str]) -> bool:
        values, queues = self._values, self._queues
        for key in keys:
            if key not in values and key not in queues:
                return False
        return True

    def _present(self, key: str) -> bool:
        return key in self._values or key in self._queues

    def _add(self, place: Place, key: str, amount: int) -> int:
        return self.add(key, amount)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return what that comes to. Raises Refused. (Others may be due something by it.)"""
        total = self._integer(key) + amount
        if not -(1 << 63) <= total < 1 << 63:
            raise RequestRefused(
                Reason.INVALID, f"add would take {named(key)} to {total}, which does not fit in 64 bits"
            )
        self._put(key, b"%d" % total)
        return total

    def _integer(self, key: str) -> int:
        value = self._values.get(key, b"0")
        try:
            return int(value.replace(b"_", b"?"))  # which Python alone takes between digits
        except ValueError:
            raise RequestRefused(
                Reason.INVALID, f"the value of {named(key)} is no whole number: {value[:32]!r}"
            ) from None

    def _compare_set(self, place: Place, key: str, expected: bytes, desired: bytes) -> bytes:
        current = self._values.get(key)
        if current is None and expected:
            return expected  # as torch does: what was expected, and nothing is stored
        if current is None or current == expected:
            self._put(key, desired)
            return desired
        return current

    def _delete_key(self, place: Place, key: str) -> bool:
        value = self._values.get(key)
        if value is None:
            return False
        if key in self._owners:
            self._detach(key)
        elif self.ledger is not None:
            self.ledger.deleted(key, value)
        del self._values[key]
        if key in self._key_watches or self._prefix_watches:
            self._notify_watchers(key)
        return True

    def _num_keys(self, place: Place) -> int:
        return len(self._values)

    def _append(self, place: Place, key: str, value: bytes) -> None:
        if key not in self._values or key in self._owners:
            self._put(key, self._values.get(key, b"") + value)
            return
        self._check_size(key, len(self._values[key]) + len(value))
        if self.ledger is not None:
            self.ledger.check_room(len(value))
            self.ledger.append(key, value)
        extend(self._values, key, value)
        if key in self._key_watches or self._prefix_watches:
            self._notify_watchers(key)

    def _multi_set(self, place: Place, keys: list[str], values: list[bytes]) -> None:
        if len(keys) != len(values):
            raise RequestRefused(Reason.INVALID, f"multi_set with {len(values)} values for {len(keys)} keys")
        for key, value in zip(keys, values, strict=True):
            self._check_size(key, len(value))
        last = dict(zip(keys, values, strict=True))
        if self.ledger is not None:  # room for all of them or none: one may take what another gives up
            self.ledger.check_room(sum(growth(key, value, self._values.get(key)) for key, value in last.items()))
        for key, value in last.items():
            if self.ledger is not None:
                self.ledger.set(key, value, self._durable_value(key))
            self._store(key, value)

    def _list_keys(self, place: Place, prefix: str) -> list[str]:
        return [key for key in self._values if key.startswith(prefix)]

    # -- ephemeral keys ---------------------------------------------------------------------------

    def _set_ephemeral(self, place: Place, key: str, value: bytes) -> None:
        self._check_size(key, len(value))
        if self.ledger is not None:
            self.ledger.check_room(growth(key, value, self._values.get(key)))
            before = self._durable_value(key)
            if before is not None:
                self.ledger.deleted(key, before)
        self._store(key, value)
        self.own(place[0], key)

    def _restore_ephemeral(self, place: Place, key: str, value: bytes) -> bool:
        if key in self._values:
            return False
        self._set_ephemeral(place, key, value)
        return True

    # -- waiting for keys -------------------------------------------------------------------------

    def _wait_for(self, place: Place, op: Op, keys: list[str], missing: set[str]) -> Any:
        waiting = Waiter(place, op, keys, missing)
        self._keep(place, waiting)
        for key in missing:
            self._value_waiters.setdefault(key, {})[waiting] = None
            if op is Op.WAIT:
                self._presence_waiters.setdefault(key, {})[waiting] = None
        return BLOCKED

    def _arrived(self, waiting: Waiter, key: str) -> None:
        """One of the keys has come (and stays counted if it is deleted again)."""
        waiting.missing.discard(key)
        if waiting.op is Op.WAIT:
            drop_from(self._presence_waiters, key, waiting)
            drop_from(self._value_waiters, key, waiting)
        if waiting.missing:
            return
        client, request = self._forget(waiting.place)
        if waiting.op is Op.MULTI_GET:
            # Not so for values that were deleted while others were still to come: those are waited for again.
            result = self._multi_get(waiting.place, waiting.keys)
        else:
            result = None if waiting.op is Op.WAIT else self._values[key]
        if result is not BLOCKED:
            self.due.append(Reply(client, request, OperationKind.RESULT, result))

    # -- barriers, channels -----------------------------------------------------------------------

    def _barrier(self, place: Place, key: str, world_size: int) -> Any:
        if key in self._values:
            if self._integer(key) >= world_size:
                return None
            raise RequestRefused(
                Reason.INVALID, f"{named(key)} holds a value that is not that of a barrier of {world_size}"
            )
        if world_size <= 0:
            raise RequestRefused(Reason.INVALID, f"a barrier of {world_size}")
        self._check_size(key, 0)
        expected, standing = self._barriers.setdefault(key, (world_size, {}))
        if expected != world_size:
            raise RequestRefused(
                Reason.INVALID,
                f"barrier {named(key)} is one of {expected}, not of {world_size}: all must say the same number",
            )
        self._keep(place, BarrierWaiter(key))
        standing[place] = None
        if len(standing) == world_size:
            del self._barriers[key]
            for there in standing:
                self.due.append(Reply(*self._forget(there), OperationKind.RESULT, None))
            count = b"%d" % world_size
            if self.ledger is not None:  # no room is requested: the count is small and all participants have arrived
                self.ledger.set(key, count, None)
            self._store(key, count)
        return BLOCKED

    def _publish(self, place: Place, channel: str, message: bytes) -> int:
        self._check_size(channel, len(message))
        listening = self._subscriptions.get(channel, {})
        self.due.extend(Reply(client, request, OperationKind.PUBLISHED, message) for client, request in listening)
        return len(listening)

    def _subscribe(self, place: Place, channel: str) -> None:
        self._keep(place, ChannelSubscription(channel))
        self._subscriptions.setdefault(channel, {})[place] = None

    # -- giving up --------------------------------------------------------------------------------

    def _cancel(self, place: Place, request: int) -> object:
        mine = self._open.get(place[0], {})
        if request in mine:
            there = place[0], request
            self._give_up(there, mine[request])
        return SILENT

    def _confirm(self, place: Place, request: int) -> object:
        there = place[0], request
        entry = self._open.get(place[0], {}).get(request)
        if isinstance(entry, UnackedItem):
            self._forget(there)
            if self.ledger is not None:
                self.ledger.gone(entry.key, *entry.item)
        return SILENT

    def _leave(self, place: Place) -> object:
        client = place[0]
        # All of it goes before anything is handed on, or an item given back could go to the client that leaves.
        given_back = []
        for request, entry in list(self._open.get(client, {}).items()):
            if isinstance(entry, UnackedItem):
                given_back.append(entry)
                self._forget((client, request))
            else:
                self._give_up((client, request), entry)
        for entry in reversed(given_back):
            self._queues.setdefault(entry.key, deque()).appendleft(entry.item)
        for entry in given_back:
            self._serve(entry.key)
        self.release_wakeups(client)
        self.expire_owner(client)
        return SILENT

    def _give_up(self, place: Place, entry: Open) -> None:
        self._forget(place)
        match entry:
            case Waiter():
                for key in entry.missing:
                    drop_from(self._value_waiters, key, entry)
                    drop_from(self._presence_waiters, key, entry)
            case PopWaiter():
                drop_from(self._pop_waiters, entry.key, place)
            case UnackedItem():
                self._queues.setdefault(entry.key, deque()).appendleft(entry.item)
                self._serve(entry.key)
            case ChannelSubscription():
                drop_from(self._subscriptions, entry.channel, place)
            case KeyWatch():
                drop_from(self._key_watches, entry.key, place)
            case PrefixWatch():
                drop_from(self._prefix_watches, entry.prefix, place)
            case BarrierWaiter():
                standing = self._barriers[entry.key][1]
                del standing[place]
                if not standing:
                    del self._barriers[entry.key]


HANDLERS: dict[Op, Callable[..., Any]] = {
    op: getattr(StoreState, "_" + op.name.lower()) for op in Op if op not in SERVERS
}
"""By operation: what does it, called with the state, the place, and the arguments.

It returns a result or `BLOCKED`, or raises `RequestRefused`. A caller that bypasses `StoreState.execute` fetches the
replies
that are due to other clients from `StoreState.collect`.
"""
