"""Queues, and the requests that wait for their items. No I/O.

`machine` executes requests on them. `server.c10d_session` calls `Queues` directly for torch's clients, whose protocol
has no confirmation: `take` removes their items at once. Any other client confirms the item of its pop, and no other
client gets the item until then. If the client first cancels the pop, leaves or dies, the item returns to the head of its
queue. The change log names items by serial number, because clients may confirm them out of order.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Any

from asyncdist.base.callables import Supplier
from asyncdist.store.protocol.operations import Client, Reason
from asyncdist.store.state.change_log import Change, ChangeLog
from asyncdist.store.state.key_index import KeyIndex
from asyncdist.store.state.model import (
    ENTRY_NBYTES,
    NO_REPLY,
    Item,
    MemoryQuota,
    Place,
    RequestRefused,
    SizeLimits,
    drop_from,
    named,
)
from asyncdist.store.state.requests import OpenRequests, Waiters

_MOST_EMPTIED = 64
"""Queues without items whose place in the index is kept."""


class Queues:
    """The queues by key; a queue without items does not exist.

    A push wakes one WAIT request, which does not take the item: its client is expected to pop it next. If the client
    leaves or cancels instead, `release_wakeups` serves another request.
    """

    def __init__(
        self, limits: SizeLimits, quota: MemoryQuota, log: ChangeLog, requests: OpenRequests, waiters: Waiters
    ) -> None:
        self._limits = limits
        self._quota = quota
        self._log = log
        self._requests = requests
        self._waiters = waiters
        self.last_serial = 0
        self._queues: dict[str, deque[Item]] = {}
        # Also of those that were emptied last: most are filled again.
        self._index = KeyIndex()
        self._emptied: dict[str, None] = {}
        self._unconfirmed: dict[Place, tuple[str, Item]] = {}
        # A dict serves as an ordered set, because a request in the middle may be cancelled.
        self._pops: dict[str, dict[Place, None]] = {}
        self._woken: dict[Client, dict[str, None]] = {}
        """By client, the queues for which it was woken and from which it has not popped since."""

    def __contains__(self, key: str) -> bool:
        return key in self._queues

    @property
    def num_items(self) -> int:
        return sum(map(len, self._queues.values()))

    def length(self, key: str) -> int:
        return len(self._queues.get(key, ()))

    # -- pushes and pops --------------------------------------------------------------------------

    def push(self, key: str, item: bytes) -> None:
        """Add an item. The first blocked pop gets it; without one, it wakes the first WAIT request for the queue."""
        limits = self._limits
        if len(item) > limits.max_value_nbytes or len(key) > limits.short_key_length:
            limits.check(key, len(item))
        self._quota.take(len(item) + ENTRY_NBYTES)
        self.last_serial += 1
        if self._log.recording:
            self._log.record(Change.PUSH, key, self.last_serial, item)
        (self._queues.get(key) or self._add_queue(key)).append((self.last_serial, item))
        self._serve(key)

    def pop(self, place: Place, key: str, block: bool) -> Any:
        """Return the first item, which the client confirms later; block or refuse the request if the queue is empty."""
        if place[0] in self._woken:
            self._clear_wakeup(place[0], key)
        if key in self._queues:
            return self._hand_over(place, key)
        if not block:
            raise RequestRefused(Reason.EMPTY, f"queue {named(key)} is empty")
        self._requests.open_in(self._pops, place, key)
        return NO_REPLY

    def take(self, client: Client, key: str) -> tuple[int, bytes]:
        """Remove the first item without confirmation; return the number of items before and the item, or 0 and b""."""
        self._clear_wakeup(client, key)
        length = self.length(key)
        if not length:
            return 0, b""
        serial, item = self._remove_first(key)
        self._account_removal(key, serial, item)
        return length, item

    def confirm(self, place: Place) -> None:
        if place in self._unconfirmed:
            self._requests.close(place)
            key, (serial, item) = self._unconfirmed.pop(place)
            self._account_removal(key, serial, item)

    def is_unconfirmed(self, place: Place) -> bool:
        return place in self._unconfirmed

    def give_back(self, places: list[Place]) -> None:
        """Return the items of withdrawn pops, oldest first, to the heads of their queues; then serve others with them."""
        keys = []
        for place in reversed(places):
            key, item = self._unconfirmed.pop(place)
            (self._queues.get(key) or self._add_queue(key)).appendleft(item)
            keys.append(key)
        for key in reversed(keys):
            self._serve(key)

    def clear(self, prefix: str) -> None:
        """Delete all queues under a prefix, but no item that a client has popped and not confirmed."""
        for key in self._index.under(prefix):
            while key in self._queues:
                self.take(None, key)
            if key in self._emptied:
                self._forget_emptied(key)

    # -- wake-ups ---------------------------------------------------------------------------------

    def release_wakeups(self, client: Client) -> None:
        """Serve other requests with the items for which a client was woken, because it will not pop them."""
        for key in self._woken.pop(client, ()):
            if key in self._queues:
                self._serve(key)

    def _clear_wakeup(self, client: Client, key: str) -> None:
        woken = self._woken.get(client, {})
        woken.pop(key, None)
        if not woken:
            self._woken.pop(client, None)

    def _serve(self, key: str) -> None:
        """Give the first item to the first blocked pop; without one, wake the first WAIT request for the queue."""
        if key in self._pops:
            place = next(iter(self._pops[key]))
            drop_from(self._pops, key, place)
            self._requests.close(place)
            self._requests.reply(place, self._hand_over(place, key))
        else:
            client = self._waiters.item_pushed(key)
            if client is not None:
                self._woken.setdefault(client, {})[key] = None

    def _hand_over(self, place: Place, key: str) -> bytes:
        self._requests.open(place, lambda place, _: self.give_back([place]), key)
        item = self._remove_first(key)
        self._unconfirmed[place] = key, item
        return item[1]

    def _add_queue(self, key: str) -> deque[Item]:
        if key in self._emptied:
            del self._emptied[key]
        else:
            self._index.add(key)
        queue = self._queues[key] = deque()
        return queue

    def _remove_first(self, key: str) -> Item:
        queue = self._queues[key]
        item = queue.popleft()
        if not queue:
            del self._queues[key]
            self._emptied[key] = None
            if len(self._emptied) > _MOST_EMPTIED:
                self._forget_emptied(next(iter(self._emptied)))
        return item

    def _forget_emptied(self, key: str) -> None:
        del self._emptied[key]
        self._index.remove(key)

    def _account_removal(self, key: str, serial: int, item: bytes) -> None:
        self._quota.nbytes -= len(item) + ENTRY_NBYTES
        if self._log.recording:
            self._log.record(Change.GONE, key, serial)

    # -- ends of a server -------------------------------------------------------------------------

    def gather(self) -> Supplier[dict[str, dict[int, bytes]]]:
        """Return a function that makes, in any thread, a copy of all present items by queue and serial number.

        Unconfirmed items are included.
        """
        queues = {key: list(queue) for key, queue in self._queues.items()}
        unconfirmed: dict[str, list[Item]] = {}
        for key, item in self._unconfirmed.values():
            unconfirmed.setdefault(key, []).append(item)

        def items(key: str) -> Iterable[Item]:
            return heapq.merge(sorted(unconfirmed.get(key, ())), queues.get(key, ()))

        # Not with dict(), which would hold the interpreter's lock for all items.
        return lambda: {
            key: {serial: item for serial, item in items(key)}  # noqa: C416
            for key in queues | unconfirmed
        }

    def restore(self, queues: dict[str, dict[int, bytes]], last_serial: int) -> None:
        self._queues = {key: deque(items.items()) for key, items in queues.items() if items}
        self._index, self._emptied = KeyIndex(self._queues), {}
        self._quota.nbytes += sum(len(item) + ENTRY_NBYTES for items in queues.values() for item in items.values())
        self.last_serial = last_serial
