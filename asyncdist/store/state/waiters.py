"""Requests that wait for keys: GET, MULTI_GET and WAIT. Part of `machine`. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from asyncdist.store.protocol.operations import Client, Op
from asyncdist.store.state.model import NO_REPLY, Place, drop_from
from asyncdist.store.state.requests import OpenRequests


class Waiter:
    """A request that waits until each key of ``missing`` has been set. A key that was deleted since counts as set."""

    __slots__ = ("keys", "missing", "op", "place")

    def __init__(self, place: Place, op: Op, keys: list[str], missing: set[str]) -> None:
        self.place, self.op, self.keys, self.missing = place, op, keys, missing


class Waiters:
    """The requests that wait for values. WAIT also waits for queues: an item under the key releases it."""

    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests
        self.awaited: dict[str, dict[Waiter, None]] = {}
        """Waiting requests by the key whose value they wait for."""
        self._for_item: dict[str, dict[Waiter, None]] = {}

    def add(self, place: Place, op: Op, keys: list[str], missing: set[str]) -> object:
        """Block a request until each key of ``missing`` has been set."""
        waiter = Waiter(place, op, keys, missing)
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
                self._requests.resolve(waiter.place, [values[each] for each in waiter.keys])
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
