"""What a store keeps of a request that it has not answered, or not answered for good."""

from __future__ import annotations

from typing import NamedTuple

from asyncdist.store.operations import Client, Op

Place = tuple[Client, int]
"""A client and its request."""


class Waiting:
    """A request that waits for keys: all those of ``missing`` must come."""

    __slots__ = ("keys", "missing", "op", "place")

    def __init__(self, place: Place, op: Op, keys: list[str], missing: set[str]) -> None:
        self.place, self.op, self.keys, self.missing = place, op, keys, missing


class Taking(NamedTuple):
    """A pop that waits for an item."""

    key: str


class Holding(NamedTuple):
    """A pop that was given an item and has not confirmed it."""

    key: str
    item: bytes


class Standing(NamedTuple):
    """A request that stands in a barrier."""

    key: str


class Listening(NamedTuple):
    """A subscription."""

    channel: str


Open = Waiting | Taking | Holding | Standing | Listening
