"""Open requests of all clients, the replies that are due, and the requests that wait for keys.

Every part of `machine` keeps its blocked requests and streams here, so that neither a cancelled request nor a client that
has left leaves an entry behind. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncdist.store.protocol.operations import Client, Op, OperationKind, Reason, Reply
from asyncdist.store.state.model import NO_REPLY, Place, RequestRefused, drop_from

Withdraw = Callable[[Place, Any], None]
"""Removes a cancelled request from its queue, barrier or channel. The second argument is the request's subject."""


class OpenRequests:
    """The requests that have no reply yet, or further replies to come."""

    def __init__(self) -> None:
        self.due: list[Reply] = []
        self._open: dict[Client, dict[int, tuple[Withdraw, Any]]] = {}

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open.values()))

    def places_of(self, client: Client) -> list[Place]:
        return [(client, request) for request in self._open.get(client, ())]

    def open(self, place: Place, withdraw: Withdraw, subject: Any) -> None:
        """Add a request. Raises RequestRefused if the client has an open request with that id."""
        requests = self._open.setdefault(place[0], {})
        if place[1] in requests:
            raise RequestRefused(Reason.INVALID, f"request id {place[1]} is in use")
        requests[place[1]] = withdraw, subject

    def open_in(self, waiting: dict[str, dict[Place, None]], place: Place, key: str) -> None:
        """Add a request, and its place under ``key`` in ``waiting``; a cancelled request leaves both."""
        self.open(place, lambda place, key: drop_from(waiting, key, place), key)
        waiting.setdefault(key, {})[place] = None

    def close(self, place: Place) -> tuple[Withdraw, Any]:
        client, request = place
        requests = self._open[client]
        entry = requests.pop(request)
        if not requests:
            del self._open[client]
        return entry

    def withdraw(self, place: Place) -> None:
        if place[1] in self._open.get(place[0], ()):
            withdraw, subject = self.close(place)
            withdraw(place, subject)

    def resolve(self, place: Place, result: Any) -> None:
        self.close(place)
        self.reply(place, result)

    def reply(self, place: Place, result: Any) -> None:
        self.due.append(Reply(*place, OperationKind.RESULT, result))

    def publish(self, places: Iterable[Place], message: bytes) -> None:
        """Send one message to all of ``places``, which share its bytes."""
        self.due.extend(Reply(client, request, OperationKind.PUBLISHED, message) for client, request in places)

    def collect(self) -> list[Reply]:
        """Return the replies that are due, once."""
        due, self.due = self.due, []
        return due


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits until each key of ``missing`` has been set. A key that was deleted since counts as set.

    A MULTI_GET also returns the values of ``optional`` keys that exist then.
    """

    place: Place
    op: Op
    keys: list[str]
    missing: set[str]
    optional: Sequence[str] = ()


def several(values: Mapping[str, bytes], keys: Sequence[str], optional: Sequence[str]) -> list[bytes]:
    """Return the values of keys, which exist, and of optional ones, empty for a missing one."""
    return [values[key] for key in keys] + [values.get(key, b"") for key in optional]


class Waiters:
    """The requests that wait for values. WAIT also waits for queues: an item under the key releases it."""

    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests
        self.awaited: dict[str, dict[Waiter, None]] = {}
        """Waiting requests by the key whose value they wait for."""
        self._for_item: dict[str, dict[Waiter, None]] = {}

    def add(self, place: Place, op: Op, keys: list[str], missing: set[str], optional: Sequence[str] = ()) -> object:
        waiter = Waiter(place, op, keys, missing, optional)
        self._requests.open(place, self._withdraw, waiter)
        self._wait_for_missing(waiter)
        return NO_REPLY

    def value_set(self, key: str, values: Mapping[str, bytes]) -> None:
        """Resolve the requests that wait only for ``key``, which is in ``values`` now."""
        for waiter in self.awaited.pop(key, ()):
            waiter.missing.discard(key)
            if waiter.op is Op.WAIT:
                drop_from(self._for_item, key, waiter)
            if waiter.missing:
                continue
            if waiter.op is Op.MULTI_GET:
                # The request waits again for values that were deleted in the meantime.
                waiter.missing.update(each for each in waiter.keys if each not in values)
            if waiter.missing:
                self._wait_for_missing(waiter)
            elif waiter.op is Op.MULTI_GET:
                self._requests.resolve(waiter.place, several(values, waiter.keys, waiter.optional))
            else:
                self._requests.resolve(waiter.place, values[key] if waiter.op is Op.GET else None)

    def item_pushed(self, key: str) -> Client | None:
        """Wake the first request that waits for a queue; return its client, None if no request waits."""
        if key not in self._for_item:
            return None
        waiter = next(iter(self._for_item[key]))
        drop_from(self._for_item, key, waiter)
        drop_from(self.awaited, key, waiter)
        waiter.missing.discard(key)
        if not waiter.missing:
            self._requests.resolve(waiter.place, None)
        return waiter.place[0]

    def _wait_for_missing(self, waiter: Waiter) -> None:
        for key in waiter.missing:
            self.awaited.setdefault(key, {})[waiter] = None
            if waiter.op is Op.WAIT:
                self._for_item.setdefault(key, {})[waiter] = None

    def _withdraw(self, place: Place, waiter: Waiter) -> None:
        for key in waiter.missing:
            drop_from(self.awaited, key, waiter)
            drop_from(self._for_item, key, waiter)
