"""Selects the transport to each peer, and the groups whose collectives can be native.

`endpoint` owns the selector. Every rank publishes an address for each of its transports. Some transports then probe
which peers they reach. Every rank learns the result of every other rank, so that any two ranks select the same
transport, and all members of a group agree whether they share memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncdist.algorithms.hierarchy import NodeLayout, layout
from asyncdist.engine.operation import Channel
from asyncdist.errors import TransportUnavailableError
from asyncdist.transport.base import Link, MatchingQueue, Transport
from asyncdist.transport.native import Native

_MOST_LOOKS = 64
"""Most reads in a row from a peer that always has more data."""

Addresses = Mapping[str, Mapping[str, Any]]


class TransportSelector:
    """The transports of one rank, the preferred first, and the peers that each reaches."""

    def __init__(self, rank: int, transports: Sequence[Transport]) -> None:
        self._rank = rank
        self.transports = list(transports)
        self._addresses: Sequence[Addresses] = ()
        self._tried: dict[str, list[set[int]]] = {}  # by transport and rank: whom it has tried and reaches

    # -- finding out ---------------------------------------------------------------------------

    def connect(self, addresses: Sequence[Addresses]) -> None:
        """Take every rank's addresses, by rank."""
        self._addresses = addresses

    async def probe_peers(self, timeout: float) -> dict[str, list[int]]:
        """Probe the peers with each transport; return the ranks reached, by transport, for every rank to learn."""
        reached = {}
        for transport in self.transports:
            tried = await transport.probe_peers([address.get(transport.name) for address in self._addresses], timeout)
            if tried is not None:
                reached[transport.name] = tried
        return reached

    def finalize(self, reached: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Take what every rank's `probe_peers` returned, by rank. Two ranks use a transport if both reach the other.

        A probe of another rank counts even if this rank does not have the transport: all ranks must see a group alike.
        """
        for name in dict.fromkeys(name for one in reached for name in one):
            self._tried[name] = [set(one.get(name, ())) for one in reached]

    # -- asking --------------------------------------------------------------------------------

    def to(self, peer: int) -> Transport | None:
        """Return the transport by which a peer is reached."""
        for transport in self.transports:
            address = self._addresses[peer].get(transport.name)
            if address is not None and transport.reaches(address) and self._joined(transport.name, self._rank, peer):
                return transport
        return None

    def link(self, peer: int) -> Link:
        """Make the link to a peer; TransportUnavailableError if there is no way to it."""
        transport, published = self.to(peer), self._addresses[peer]
        if transport is not None:
            return transport.link(peer, published[transport.name])
        ours = ", ".join(transport.name for transport in self.transports)
        raise TransportUnavailableError(
            f"no transport reaches rank {peer}: it offers {', '.join(published) or 'none'}, we can use {ours}; "
            "start every rank with the same backend"
        )

    def used(self, members: Sequence[int]) -> list[str]:
        """Return the names of the transports among a group's members, the preferred first.

        A transport that probes belongs to the result on all members if it connects any two of them, so that all members may
        request the same transports again.
        """
        ours = {self.to(peer) for peer in members if peer != self._rank}
        joined = {
            name
            for name, tried in self._tried.items()
            if any(self._joined(name, rank, peer) for rank in members for peer in tried[rank].intersection(members))
        }
        return [each.name for each in self.transports if each in ours or each.name in joined]

    @property
    def local_size(self) -> int:
        """The number of ranks on this host: those that share memory, or all ranks if no transport has probed."""
        ours = [self._tried[each.name][self._rank] for each in self.transports if each.name in self._tried]
        return max((len(peers) + 1 for peers in ours), default=len(self._addresses))

    def spin_policy(self) -> tuple[float, Callable[[], None] | None]:
        """Return how many seconds to spin before sleeping, and, if ranks outnumber cores, what spreads them over the
        cores."""
        ways = {self.to(peer) for peer in range(len(self._addresses)) if peer != self._rank}
        waits = [way.spin_policy(self.local_size) for way in ways if way is not None]
        crowded = any(crowded for _, crowded in waits)
        return min((spin for spin, _ in waits), default=0.0), self._spread if crowded else None

    def busy(self) -> bool:
        """Return whether messages are queued that only this rank's drivers can send."""
        for transport in self.transports:  # a loop: a generator costs two frames on the way of each call
            if transport.busy():
                return True
        return False

    def look(self, inbox: MatchingQueue) -> None:
        """Read what has arrived, as a thread that wakes from a sleep does, and unblock stalled messages before it."""
        for _ in range(_MOST_LOOKS):
            inbox.unblock()
            ready = [(each, [descriptor for descriptor, _ in each.waits() or ()]) for each in self.transports]
            if not any(transport.advance(descriptors) for transport, descriptors in ready):
                return

    def _spread(self) -> None:
        for transport in self.transports:
            transport.rebalance_cores()

    def _joined(self, name: str, rank: int, peer: int) -> bool:
        tried = self._tried.get(name)
        return tried is None or (peer in tried[rank] and rank in tried[peer])

    def _named(self, name: str) -> Transport:
        return next(transport for transport in self.transports if transport.name == name)

    # -- for groups ----------------------------------------------------------------------------

    def native(self, channel: Channel) -> Native | None:
        """Return the native collectives of a group, if one transport that offers any reaches all of it."""
        pairs = list(itertools.combinations(channel.members, 2))
        for name in self._tried:
            if all(self._joined(name, *pair) for pair in pairs):
                return self._named(name).native(channel.number, channel.members)
        return None

    def node_layout(self, channel: Channel) -> tuple[NodeLayout, Native | None] | None:
        """Return how a group lies on several hosts, with the native collectives of our part of it (None if alone)."""
        members = channel.members
        for name in self._tried:
            where = layout(members, self._rank, functools.partial(self._joined, name))
            if where is not None:
                ours = tuple(members[rank] for rank in where.members)
                return where, self._named(name).native(channel.number, ours) if len(ours) > 1 else None
        return None
