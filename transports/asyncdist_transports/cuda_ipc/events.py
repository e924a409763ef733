"""Interprocess events, which are used again: making one takes longer than recording it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from asyncdist_transports.cuda_ipc.driver import Driver
from asyncdist_transports.cuda_ipc.handles import Peer

Event = tuple[Any, bytes]
"""An interprocess event of this process, and its handle."""


class EventPool:
    """Interprocess events: the free ones of this process, by the peer that uses them, and those opened from peers."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: dict[Peer, list[Event]] = defaultdict(list)
        self.made: list[Event] = []
        self._peer_events: dict[tuple[Peer, bytes], Any] = {}

    def acquire(self, peer: Peer) -> Event:
        """Return an event whose earlier records the peer needs no more."""
        free = self._free[peer]
        if free:
            return free.pop()
        self.made.append(made := self._driver.event())
        return made

    def release(self, peer: Peer, event: Event) -> None:
        """Return an event to the pool; the peer needs its last record no more, or its stream waits for it already."""
        self._free[peer].append(event)

    def of(self, peer: Peer, handle: bytes) -> Any:
        """Return a peer's event, opened on first use."""
        found = self._peer_events.get((peer, handle))
        if found is None:
            found = self._peer_events[peer, handle] = self._driver.event_of(handle)
        return found

    def forget(self, peer: Peer) -> None:
        """Close the events opened from a peer that has ended."""
        for key in [key for key in self._peer_events if key[0] == peer]:
            del self._peer_events[key]
