"""The key-value machine: what a store does, without who speaks to it, over what, or when.

A request is an operation of a *client* (any hashable; a server passes the connection itself) under a *request id* that
is the client's own. It is answered at once or blocks, and what comes due, for whoever it may be, is returned as a list
of `Reply`. The laws of this file:

* An operation that blocks is an entry of the table ``_open[client][request]``, and of the lines in which it stands.
  `cancel` and `leave` take it out of all of them, so that no wake-up is ever spent on somebody who has gone.
* A queue item is handed to exactly one client and is kept aside until that client confirms; one who cancels, leaves or
  dies before that gives it back to the head of the queue, and the next in line gets it.
* A barrier opens when enough requests stand in it *at one time*: who gave up or died does not count. Once open, it
  stays open and its key holds the count, until the key is deleted.
* Nothing here depends on time: a timeout is a `cancel` by the one who waits. The same requests in the same order give
  the same replies and the same state, which is what a file store's log relies on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from asyncdist.store.entries import Holding, Listening, Open, Place, Standing, Taking, Waiting
from asyncdist.store.operations import DOORS, Client, Kind, Op, Reason, Reply


class Refused(Exception):
    """The store will not do this; becomes a reply."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason
        self.text = text


BLOCKED: Final = object()
"""What a request leaves that is answered later."""
_SILENT: Final = object()


class StoreState:
    """The state machine. ``max_value_nbytes`` bounds what a single value may grow to."""

    def __init__(self, max_value_nbytes: int = 1 << 62) -> None:
        self.max_value_nbytes = max_value_nbytes
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._open: dict[Client, dict[int, Open]] = {}
        # Lines are dicts used as ordered sets: first come, first served, and leaving from the middle is cheap.
        self._waiting: dict[str, dict[Waiting, None]] = {}  # key -> for a value; `wait` stands in the next one too
        self._watching: dict[str, dict[Waiting, None]] = {}  # queue -> `wait`
        self._taking: dict[str, dict[Place, None]] = {}  # queue -> pops
        self._standing: dict[str, tuple[int, dict[Place, None]]] = {}  # barrier -> world size, who is in
        self._listening: dict[str, dict[Place, None]] = {}  # channel -> subscribers
        self._told: dict[Client, dict[str, None]] = {}  # client -> queues it was woken for and has not popped from
        self.due: list[Reply] = []  # what has come due for others in the request that is being done

    # -- the whole interface ----------------------------------------------------------------------

    def execute(self, client: Client, request: int, op: Op, args: tuple[Any, ...]) -> list[Reply]:
        """Do one request and return what came due, its own reply included unless it blocks."""
        due = self.due
        try:
            result = HANDLERS[op](self, (client, request), *args)
            if result is not BLOCKED and result is not _SILENT:
                due.append(Reply(client, request, Kind.RESULT, result))
        except Refused as refused:
            due.append(Reply(client, request, Kind.REFUSED, (int(refused.reason), refused.text)))
        self.due = []
        return due

    def collect(self) -> list[Reply]:
        """Return what handlers that were called directly have made due for others, once."""
        due, self.due = self.due, []
        return due

    def leave(self, client: Client) -> list[Reply]:
        """Forget a client that has gone and everything it had open; return what others get from that."""
        return self.execute(client, 0, Op.LEAVE, ())

    @property
    def clients(self) -> list[Client]:
        """Who has something open."""
        return list(self._open)

    @property
    def num_open(self) -> int:
        """How many requests are open, over all clients."""
        return sum(map(len, self._open.values()))

    # -- values -----------------------------------------------------------------------------------

    def _set(self, place: Place, key: str, value: bytes) -> None:
        self._put(key, value)

    def _put(self, key: str, value: bytes) -> None:
        self._check_size(key, value)
        self._values[key] = value
        if key in self._waiting:
            for waiting in self._waiting.pop(key):
                self._arrived(waiting, key)

    def _check_size(self, key: str, value: bytes) -> None:
        if len(value) > self.max_value_nbytes:
            raise Refused(
                Reason.TOO_LARGE,
                f"a value of {len(value)} bytes for {key!r}, and the store takes {self.max_value_nbytes}: raise "
                "ASYNCDIST_STORE_MAX_VALUE_NBYTES where the store runs, or send bulk data through a collective",
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
        return all(map(self._present, keys))

    def _present(self, key: str) -> bool:
        return key in self._values or key in self._queues

    def _add(self, place: Place, key: str, amount: int) -> int:
        total = self._integer(key, "0") + amount
        if not -(1 << 63) <= total < 1 << 63:
            raise Refused(Reason.INVALID, f"add would take {key!r} to {total}, which does not fit in 64 bits")
        self._put(key, b"%d" % total)
        return total

    def _integer(self, key: str, default: str) -> int:
        value = self._values.get(key, default)
        try:
            return int(value)
        except ValueError:
            raise Refused(Reason.INVALID, f"the value of {key!r} is no whole number: {value[:32]!r}") from None

    def _compare_set(self, place: Place, key: str, expected: bytes, desired: bytes) -> bytes:
        current = self._values.get(key)
        if current is None and expected:
            return expected  # as torch does: what was expected, and nothing is stored
        if current is None or current == expected:
            self._put(key, desired)
            return desired
        return current

    def _delete_key(self, place: Place, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _num_keys(self, place: Place) -> int:
        return len(self._values)

    def _append(self, place: Place, key: str, value: bytes) -> None:
        self._put(key, self._values.get(key, b"") + value)

    def _multi_set(self, place: Place, keys: list[str], values: list[bytes]) -> None:
        if len(keys) != len(values):
            raise Refused(Reason.INVALID, f"multi_set with {len(values)} values for {len(keys)} keys")
        for key, value in zip(keys, values, strict=True):
            self._check_size(key, value)  # all of them or none
        for key, value in zip(keys, values, strict=True):
            self._put(key, value)

    def _list_keys(self, place: Place, prefix: str) -> list[str]:
        return [key for key in self._values if key.startswith(prefix)]

    # -- waiting for keys -------------------------------------------------------------------------

    def _wait_for(self, place: Place, op: Op, keys: list[str], missing: set[str]) -> Any:
        waiting = Waiting(place, op, keys, missing)
        self._keep(place, waiting)
        for key in missing:
            self._waiting.setdefault(key, {})[waiting] = None
            if op is Op.WAIT:
                self._watching.setdefault(key, {})[waiting] = None
        return BLOCKED

    def _arrived(self, waiting: Waiting, key: str) -> None:
        """One of the keys has come (and stays counted if it is deleted again)."""
        waiting.missing.discard(key)
        if waiting.op is Op.WAIT:
            _drop_from(self._watching, key, waiting)
            _drop_from(self._waiting, key, waiting)
        if waiting.missing:
            return
        client, request = self._forget(waiting.place)
        if waiting.op is Op.MULTI_GET:
            # Not so for values that were deleted while others were still to come: those are waited for again.
            result = self._multi_get(waiting.place, waiting.keys)
        else:
            result = None if waiting.op is Op.WAIT else self._values[key]
        if result is not BLOCKED:
            self.due.append(Reply(client, request, Kind.RESULT, result))

    # -- queues -----------------------------------------------------------------------------------

    def _queue_push(self, place: Place, key: str, item: bytes) -> None:
        self._check_size(key, item)
        self._queues.setdefault(key, deque()).append(item)
        self._serve(key)

    def _queue_pop(self, place: Place, key: str, block: bool) -> Any:
        self._heed(place[0], key)
        if key in self._queues:
            return self._hold(place, key)
        if not block:
            raise Refused(Reason.EMPTY, f"queue {key!r} is empty")
        self._keep(place, Taking(key))
        self._taking.setdefault(key, {})[place] = None
        return BLOCKED

    def take(self, client: Client, key: str) -> tuple[int, bytes]:
        """Pop for one whose protocol has no confirmation; return the length before and the item (b"" from none)."""
        self._heed(client, key)
        queue = self._queues.get(key)
        if queue is None:
            return 0, b""
        length = len(queue)
        return length, self._shift(key, queue)

    def forgo(self, client: Client) -> None:
        """Wake others for the items that a client was woken for and is not going to pop."""
        for key in self._told.pop(client, ()):
            if key in self._queues:
                self._serve(key)

    def _heed(self, client: Client, key: str) -> None:
        told = self._told.get(client)
        if told is not None:
            told.pop(key, None)
            if not told:
                del self._told[client]

    def _queue_len(self, place: Place, key: str) -> int:
        return len(self._queues.get(key, ()))

    def _serve(self, key: str) -> None:
        """A queue has gained an item: hand the head to the first who wants it, or else tell the first who watches."""
        if key in self._taking:
            client, request = place = next(iter(self._taking[key]))
            _drop_from(self._taking, key, place)
            self._forget(place)
            self.due.append(Reply(client, request, Kind.RESULT, self._hold(place, key)))
        elif key in self._watching:
            waiting = next(iter(self._watching[key]))
            self._told.setdefault(waiting.place[0], {})[key] = None
            self._arrived(waiting, key)

    def _hold(self, place: Place, key: str) -> bytes:
        queue = self._queues[key]
        self._keep(place, Holding(key, queue[0]))
        return self._shift(key, queue)

    def _shift(self, key: str, queue: deque[bytes]) -> bytes:
        item = queue.popleft()
        if not queue:
            del self._queues[key]
        return item

    # -- barriers, channels -----------------------------------------------------------------------

    def _barrier(self, place: Place, key: str, world_size: int) -> Any:
        if key in self._values:
            if self._integer(key, "0") >= world_size:
                return None
            raise Refused(Reason.INVALID, f"{key!r} holds a value that is not that of a barrier of {world_size}")
        if world_size <= 0:
            raise Refused(Reason.INVALID, f"a barrier of {world_size}")
        expected, standing = self._standing.setdefault(key, (world_size, {}))
        if expected != world_size:
            raise Refused(
                Reason.INVALID,
                f"barrier {key!r} is one of {expected}, not of {world_size}: all must say the same number",
            )
        self._keep(place, Standing(key))
        standing[place] = None
        if len(standing) == world_size:
            del self._standing[key]
            for there in standing:
                self.due.append(Reply(*self._forget(there), Kind.RESULT, None))
            self._put(key, b"%d" % world_size)
        return BLOCKED

    def _publish(self, place: Place, channel: str, message: bytes) -> int:
        listening = self._listening.get(channel, {})
        self.due.extend(Reply(client, request, Kind.PUBLISHED, message) for client, request in listening)
        return len(listening)

    def _subscribe(self, place: Place, channel: str) -> None:
        self._keep(place, Listening(channel))
        self._listening.setdefault(channel, {})[place] = None

    # -- giving up --------------------------------------------------------------------------------

    def _cancel(self, place: Place, request: int) -> object:
        mine = self._open.get(place[0], {})
        if request in mine:
            there = place[0], request
            self._give_up(there, mine[request])
        return _SILENT

    def _confirm(self, place: Place, request: int) -> object:
        there = place[0], request
        if isinstance(self._open.get(place[0], {}).get(request), Holding):
            self._forget(there)
        return _SILENT

    def _leave(self, place: Place) -> object:
        client = place[0]
        # All of it goes before anything is handed on, or an item given back could go to the client that leaves.
        given_back = []
        for request, entry in list(self._open.get(client, {}).items()):
            if isinstance(entry, Holding):
                given_back.append(entry)
                self._forget((client, request))
            else:
                self._give_up((client, request), entry)
        for entry in reversed(given_back):
            self._queues.setdefault(entry.key, deque()).appendleft(entry.item)
        for entry in given_back:
            self._serve(entry.key)
        self.forgo(client)
        return _SILENT

    def _give_up(self, place: Place, entry: Open) -> None:
        self._forget(place)
        match entry:
            case Waiting():
                for key in entry.missing:
                    _drop_from(self._waiting, key, entry)
                    _drop_from(self._watching, key, entry)
            case Taking():
                _drop_from(self._taking, entry.key, place)
            case Holding():
                self._queues.setdefault(entry.key, deque()).appendleft(entry.item)
                self._serve(entry.key)
            case Listening():
                _drop_from(self._listening, entry.channel, place)
            case Standing():
                standing = self._standing[entry.key][1]
                del standing[place]
                if not standing:
                    del self._standing[entry.key]

    def _keep(self, place: Place, entry: Open) -> None:
        mine = self._open.setdefault(place[0], {})
        if place[1] in mine:
            raise Refused(Reason.INVALID, f"request id {place[1]} is in use")
        mine[place[1]] = entry

    def _forget(self, place: Place) -> Place:
        mine = self._open[place[0]]
        del mine[place[1]]
        if not mine:
            del self._open[place[0]]
        return place


def _drop_from(lines: dict[str, dict[Any, None]], key: str, who: object) -> None:
    line = lines.get(key)
    if line is not None:
        line.pop(who, None)
        if not line:
            del lines[key]


HANDLERS: dict[Op, Callable[..., Any]] = {
    op: getattr(StoreState, "_" + op.name.lower()) for op in Op if op not in DOORS
}
"""By operation: what does it, called with the state, the place, and the arguments.

It returns a result or `BLOCKED`, or raises `Refused`. Who calls one without `StoreState.execute` takes what has come due
for others from `StoreState.collect`.
"""
