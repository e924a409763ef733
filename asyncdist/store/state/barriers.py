"""Barriers. No I/O.

A barrier opens when enough requests wait in it *at one time*. It stays open, and its key holds the count, until the key
is deleted.
"""

from __future__ import annotations

from typing import Any

from asyncdist.store.protocol.operations import Reason
from asyncdist.store.state.key_space import KeySpace
from asyncdist.store.state.model import NO_REPLY, Place, RequestRefused, SizeLimits, named
from asyncdist.store.state.requests import OpenRequests


class Barriers:
    """The barriers that have not opened."""

    def __init__(self, limits: SizeLimits, requests: OpenRequests, keys: KeySpace) -> None:
        self._limits = limits
        self._requests = requests
        self._keys = keys
        self._closed: dict[str, tuple[int, dict[Place, None]]] = {}

    def join(self, place: Place, key: str, world_size: int) -> Any:
        """Block until ``world_size`` requests wait in this barrier."""
        if key in self._keys:
            if self._keys.integer(key) >= world_size:
                return None
            raise RequestRefused(
                Reason.INVALID, f"{named(key)} holds a value that is not that of a barrier of {world_size}"
            )
        if world_size <= 0:
            raise RequestRefused(Reason.INVALID, f"a barrier of {world_size}")
        self._limits.check(key, 0)
        expected, waiting = self._closed.get(key, (world_size, {}))
        if expected != world_size:
            raise RequestRefused(
                Reason.INVALID,
                f"barrier {named(key)} is one of {expected}, not of {world_size}: all clients must pass the same number",
            )
        self._requests.open(place, self._withdraw, key)
        waiting[place] = None
        self._closed[key] = world_size, waiting
        if len(waiting) == world_size:
            del self._closed[key]
            for each in waiting:
                self._requests.resolve(each, None)
            # A full store does not refuse the short count, because all participants have been released.
            self._keys.set_within_limits(key, b"%d" % world_size)
        return NO_REPLY

    def _withdraw(self, place: Place, key: str) -> None:
        waiting = self._closed[key][1]
        del waiting[place]
        if not waiting:
            del self._closed[key]
