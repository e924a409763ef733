"""Channels: a published message goes to the present subscriptions and is not stored. Part of `machine`. No I/O."""

from __future__ import annotations

from asyncdist.store.state.limits import SizeLimits
from asyncdist.store.state.model import Place, drop_from
from asyncdist.store.state.requests import OpenRequests


class Channels:
    """The subscriptions by channel."""

    def __init__(self, limits: SizeLimits, requests: OpenRequests) -> None:
        self._limits = limits
        self._requests = requests
        self._subscriptions: dict[str, dict[Place, None]] = {}

    def publish(self, channel: str, message: bytes) -> int:
        """Send a message to all subscriptions; return their number."""
        self._limits.check(channel, len(message))
        places = self._subscriptions.get(channel, {})
        self._requests.publish(places, message)
        return len(places)

    def subscribe(self, place: Place, channel: str) -> None:
        """Open a subscription."""
        self._requests.open(place, self._unsubscribe, channel)
        self._subscriptions.setdefault(channel, {})[place] = None

    def _unsubscribe(self, place: Place, channel: str) -> None:
        drop_from(self._subscriptions, channel, place)
