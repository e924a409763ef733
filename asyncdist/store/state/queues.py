"""Queues of the store's state machine, and the requests that wait for their items.

The invariants are those of `asyncdist.store.state.machine`. No I/O.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Any

from asyncdist.store.protocol.operations import Client, OperationKind, Reason, Reply
from asyncdist.store.state.model import (
    BLOCKED,
    ENTRY_NBYTES,
    Item,
    Place,
    PopWaiter,
    RequestRefused,
    Table,
    UnackedItem,
    Waiter,
    named,
)


class Queues(Table):
    """The part of the state machine that has to do with queues."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, deque[Item]] = {}
        self._pushed = 0  # the serial number of the item that came last
        # Lines are dicts used as ordered sets: first come, first served, and leaving from the middle is cheap.
        self._presence_waiters: dict[str, dict[Waiter, None]] = {}  # queue -> `wait`
        self._pop_waiters: dict[str, dict[Place, None]] = {}  # queue -> pops
        self._woken: dict[Client, dict[str, None]] = {}  # client -> queues it was woken for and has not popped from

    @property
    def num_items(self) -> int:
        """How many items nobody has taken, over all queues."""
        return sum(map(len, self._queues.values()))

    @abstractmethod
    def _check_size(self, key: str, nbytes: int) -> None:
        """Refuse a value that is too large."""

    @abstractmethod
    def _arrived(self, waiting: Waiter, key: str) -> None:
        """Answer who has waited for a key, if it was the last that was missing."""

    def _queue_push(self, place: Place, key: str, item: bytes) -> None:
        self._check_size(key, len(item))
        if self.ledger is not None:
            self.ledger.check_room(len(item) + ENTRY_NBYTES)
        self._pushed += 1
        if self.ledger is not None:
            self.ledger.pushed(key, self._pushed, item)
        self._queues.setdefault(key, deque()).append((self._pushed, item))
        self._serve(key)

    def _queue_pop(self, place: Place, key: str, block: bool) -> Any:
        self._clear_wakeup(place[0], key)
        if key in self._queues:
            return self._hold(place, key)
        if not block:
            raise RequestRefused(Reason.EMPTY, f"queue {named(key)} is empty")
        self._keep(place, PopWaiter(key))
        self._pop_waiters.setdefault(key, {})[place] = None
        return BLOCKED

    def take(self, client: Client, key: str) -> tuple[int, bytes]:
        """Pop for one whose protocol has no confirmation; return the length before and the item (b"" from none)."""
        self._clear_wakeup(client, key)
        queue = self._queues.get(key)
        if queue is None:
            return 0, b""
        length = len(queue)
        serial, item = self._shift(key, queue)
        if self.ledger is not None:
            self.ledger.gone(key, serial, item)
        return length, item

    def release_wakeups(self, client: Client) -> None:
        """Wake others for the items that a client was woken for and is not going to pop."""
        for key in self._woken.pop(client, ()):
            if key in self._queues:
                self._serve(key)

    def _clear_wakeup(self, client: Client, key: str) -> None:
        told = self._woken.get(client)
        if told is not None:
            told.pop(key, None)
            if not told:
                del self._woken[client]

    def _queue_len(self, place: Place, key: str) -> int:
        return len(self._queues.get(key, ()))

    def _serve(self, key: str) -> None:
        """A queue has gained an item: hand the head to the first who wants it, or else tell the first who watches."""
        if key in self._pop_waiters:
            client, request = place = next(iter(self._pop_waiters[key]))
            drop_from(self._pop_waiters, key, place)
            self._forget(place)
            self.due.append(Reply(client, request, OperationKind.RESULT, self._hold(place, key)))
        elif key in self._presence_waiters:
            waiting = next(iter(self._presence_waiters[key]))
            self._woken.setdefault(waiting.place[0], {})[key] = None
            self._arrived(waiting, key)

    def _hold(self, place: Place, key: str) -> bytes:
        queue = self._queues[key]
        self._keep(place, UnackedItem(key, queue[0]))
        return self._shift(key, queue)[1]

    def _shift(self, key: str, queue: deque[Item]) -> Item:
        item = queue.popleft()
        if not queue:
            del self._queues[key]
        return item


def drop_from(lines: dict[str, dict[Any, None]], key: str, who: object) -> None:
    """Take someone out of a line."""
    line = lines.get(key)
    if line is not None:
        line.pop(who, None)
        if not line:
            del lines[key]
