"""Queues, and the requests that wait for their items. Part of `machine`. No I/O.

An item goes to exactly one client and is kept until that client confirms it. A client that cancels, leaves or dies first
returns the item to the head of the queue. Items have serial numbers, because they may be confirmed out of order.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from asyncdist.store.protocol.operations import Client, Reason
from asyncdist.store.state.change_log import Change, ChangeLog
from asyncdist.store.state.limits import MemoryQuota, SizeLimits
from asyncdist.store.state.model import ENTRY_NBYTES, NO_REPLY, Item, Place, RequestRefused, drop_from, named
from asyncdist.store.state.requests import OpenRequests
from asyncdist.store.state.waiters import Waiters


class Queues:
    """The queues by key; a queue without items does not exist."""

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
        self._unconfirmed: dict[Place, tuple[str, Item]] = {}
        # A dict is used as an ordered set: first come, first served, and leaving from the middle is cheap.
        self._pops: dict[str, dict[Place, None]] = {}
        self._woken: dict[Client, dict[str, None]] = {}  # client -> queues it was woken for and has not popped from

    def __contains__(self, key: str) -> bool:
        return key in self._queues

    @property
    def num_items(self) -> int:
        """How many items are in all queues."""
        return sum(map(len, self._queues.values()))

    def length(self, key: str) -> int:
        """Return the number of items in a queue."""
        return len(self._queues.get(key, ()))

    # -- pushes and pops --------------------------------------------------------------------------

    def push(self, key: str, item: bytes) -> None:
        """Add an item. It goes to the first blocked pop, or else wakes the first request that waits for the queue."""
        limits = self._limits
        if len(item) > limits.max_value_nbytes or len(key) > limits.short_key_length:
            limits.check(key, len(item))
        self._quota.take(len(item) + ENTRY_NBYTES)
        self.last_serial += 1
        if self._log.recording:
            self._log.record(Change.PUSH, key, self.last_serial, item)
        self._queues.setdefault(key, deque()).append((self.last_serial, item))
        self._serve(key)

    def pop(self, place: Place, key: str, block: bool) -> Any:
        """Return the first item, which the client confirms later; if the queue is empty, block or refuse the request."""
        if place[0] in self._woken:
            self._clear_wakeup(place[0], key)
        if key in self._queues:
            return self._hand_over(place, key)
        if not block:
            raise RequestRefused(Reason.EMPTY, f"queue {named(key)} is empty")
        self._requests.open(place, self._withdraw_pop, key)
        self._pops.setdefault(key, {})[place] = None
        return NO_REPLY

    def take(self, client: Client, key: str) -> tuple[int, bytes]:
        """Pop for a protocol without confirmation; return the length before, and the item (b"" from an empty queue)."""
        self._clear_wakeup(client, key)
        length = self.length(key)
        if not length:
            return 0, b""
        serial, item = self._shift(key)
        self._gone(key, serial, item)
        return length, item

    def confirm(self, place: Place) -> None:
        """The item of a pop has arrived: forget it."""
        if place in self._unconfirmed:
            self._requests.close(place)
            key, (serial, item) = self._unconfirmed.pop(place)
            self._gone(key, serial, item)

    def is_unconfirmed(self, place: Place) -> bool:
        """Whether a request is a pop whose item is not confirmed."""
        return place in self._unconfirmed

    def give_back(self, places: list[Place]) -> None:
        """Return the items of pops, oldest first, to the heads of their queues, then hand them to other requests."""
        keys = []
        for place in reversed(places):
            key, item = self._unconfirmed.pop(place)
            self._queues.setdefault(key, deque()).appendleft(item)
            keys.append(key)
        for key in reversed(keys):
            self._serve(key)

    def clear(self, prefix: str) -> None:
        """Delete all queues under a prefix; an item that a client has popped stays with that client."""
        for key in [key for key in self._queues if key.startswith(prefix)]:
            while key in self._queues:
                self.take(None, key)

    # -- wake-ups ---------------------------------------------------------------------------------

    def release_wakeups(self, client: Client) -> None:
        """Wake other requests for the items that a client was woken for and does not pop."""
        for key in self._woken.pop(client, ()):
            if key in self._queues:
                self._serve(key)

    def _clear_wakeup(self, client: Client, key: str) -> None:
        woken = self._woken.get(client, {})
        woken.pop(key, None)
        if not woken:
            self._woken.pop(client, None)

    def _serve(self, key: str) -> None:
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
        self._requests.open(place, self._withdraw_item, key)
        item = self._shift(key)
        self._unconfirmed[place] = key, item
        return item[1]

    def _shift(self, key: str) -> Item:
        queue = self._queues[key]
        item = queue.popleft()
        if not queue:
            del self._queues[key]
        return item

    def _gone(self, key: str, serial: int, item: bytes) -> None:
        self._quota.nbytes -= len(item) + ENTRY_NBYTES
        if self._log.recording:
            self._log.record(Change.GONE, key, serial)

    def _withdraw_pop(self, place: Place, key: str) -> None:
        drop_from(self._pops, key, place)

    def _withdraw_item(self, place: Place, key: str) -> None:
        self.give_back([place])

    # -- ends of a server -------------------------------------------------------------------------

    def contents(self) -> dict[str, dict[int, bytes]]:
        """Return a copy of all items by serial number; unconfirmed items are in their queues."""
        queues = {key: list(queue) for key, queue in self._queues.items()}
        for key, item in self._unconfirmed.values():
            queues.setdefault(key, []).append(item)
        return {key: dict(sorted(items)) for key, items in queues.items()}

    def restore(self, queues: dict[str, dict[int, bytes]], last_serial: int) -> None:
        """Take over the items that an earlier server left."""
        self._queues = {key: deque(items.items()) for key, items in queues.items() if items}
        self._quota.nbytes += sum(len(item) + ENTRY_NBYTES for items in queues.values() for item in items.values())
        self.last_serial = last_serial
