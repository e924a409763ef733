"""Streams: subscriptions to a channel, watches of a key, and watches of all keys under a prefix. No I/O.

Part of `machine`. A published message goes to the present subscriptions and is not stored.
"""

from __future__ import annotations

import itertools

from asyncdist.store.protocol.operations import CHANGED, GONE, Reason
from asyncdist.store.state.model import Place, RequestRefused, SizeLimits, drop_from, named
from asyncdist.store.state.requests import OpenRequests


class OpenStreams:
    """The open subscriptions and watches. A message to a watch begins with `CHANGED` or `GONE`."""

    def __init__(self, limits: SizeLimits, requests: OpenRequests) -> None:
        self._limits = limits
        self._requests = requests
        self._of_channels: dict[str, dict[Place, None]] = {}
        self.of_keys: dict[str, dict[Place, None]] = {}
        self.of_prefixes: dict[str, dict[Place, None]] = {}
        self._num_prefixes: dict[int, int] = {}
        """By length, how many prefixes are watched."""

    def publish(self, channel: str, message: bytes) -> int:
        self._limits.check(channel, len(message))
        places = self._of_channels.get(channel, {})
        self._requests.publish(places, message)
        return len(places)

    def subscribe(self, place: Place, channel: str) -> None:
        self._requests.open_in(self._of_channels, place, channel)

    def watch(self, place: Place, key: str) -> None:
        self._requests.open_in(self.of_keys, place, key)

    def watch_prefix(self, place: Place, prefix: str, values: dict[str, bytes]) -> list[str | bytes]:
        """Watch all keys under a prefix; return the present ``values``, each after its key.

        Raises RequestRefused if they do not fit in one reply.
        """
        if sum(map(len, values.values())) > self._limits.max_value_nbytes:
            text = (
                f"the values of all keys under {named(prefix)} are too much for one reply: watch a longer prefix, or raise "
                "ASYNCDIST_STORE_MAX_VALUE_NBYTES where the store runs"
            )
            raise RequestRefused(Reason.TOO_LARGE, text)
        self._requests.open(place, self._unwatch_prefix, prefix)
        if prefix not in self.of_prefixes:
            self.of_prefixes[prefix] = {}
            self._num_prefixes[len(prefix)] = self._num_prefixes.get(len(prefix), 0) + 1
        self.of_prefixes[prefix][place] = None
        return list(itertools.chain.from_iterable(values.items()))

    def changed(self, key: str, value: bytes | None) -> None:
        """Send the new value of a key, None if it was deleted, to the watches of the key."""
        kind, content = (GONE, b"") if value is None else (CHANGED, value)
        if places := self.of_keys.get(key):
            self._requests.publish(places, kind + content)
        # Not for each prefix that is watched, of which there may be one for each client.
        matching: list[Place] = []
        for length in self._num_prefixes:
            if length <= len(key) and (places := self.of_prefixes.get(key[:length])):
                matching += places
        if matching:
            name = key.encode()
            self._requests.publish(matching, b"".join((kind, len(name).to_bytes(4, "little"), name, content)))

    def _unwatch_prefix(self, place: Place, prefix: str) -> None:
        drop_from(self.of_prefixes, prefix, place)
        if prefix not in self.of_prefixes:
            self._num_prefixes[len(prefix)] -= 1
            if not self._num_prefixes[len(prefix)]:
                del self._num_prefixes[len(prefix)]
