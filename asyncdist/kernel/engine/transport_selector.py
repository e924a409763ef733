"""Selects the transport to each peer, and the native collectives of each group (`transport.native`).

The endpoint makes the one `TransportSelector` of a rank; groups, failures and heartbeats ask it.

Every rank publishes an address for each of its transports. Some transports, such as shared memory, then probe which peers
they reach. Every rank gets the results of all ranks, so that any two ranks select the same transport, and all members of a
group agree on which ranks share memory.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import Any

from asyncdist.errors import TransportUnavailableError
from asyncdist.kernel.algorithms.hierarchy import NodeLayout, layout
from asyncdist.kernel.engine.drivers.core_placement import CorePlacement
from asyncdist.kernel.engine.operation import Channel
from asyncdist.kernel.transport.base import Link, MatchingQueue, Transport
from asyncdist.kernel.transport.native import Native
from asyncdist.net.process_identity import is_visible, last_core

_CORES_EVERY, _MOST_CORES = 0.01, 16
"""Seconds between two questions to the system on which cores peers are, and the most peers about which it is asked."""
_MAX_READS = 64
"""Limit of `TransportSelector.read_arrived`, because a peer may send without end."""

Addresses = Mapping[str, Mapping[str, Any]]


class TransportSelector:
    """The transports of one rank, the preferred first, and the peers that each transport reaches."""

    def __init__(self, rank: int, transports: Sequence[Transport]) -> None:
        self.rank = rank
        self.transports = list(transports)
        self.addresses: Sequence[Addresses] = ()
        """The addresses of all ranks, by rank and transport."""
        self._reached: dict[str, list[set[int]]] = {}
        """The peers that each rank has reached, by transport and rank. A transport that does not probe has no entry."""
        self._processes: dict[int, Mapping[str, Any]] = {}
        """The processes on this host that this rank sees, by rank; its own is one of them. Empty if it sees none."""
        self.placement = CorePlacement(rank, self.peer_cores)
        self._cores: list[tuple[int, int, bool]] = []
        self._cores_until = 0.0

    # -- start ---------------------------------------------------------------------------------

    async def probe_peers(self, addresses: Sequence[Addresses], timeout: float) -> dict[str, list[int]]:
        """Store every rank's addresses, by rank, and probe the peers; return the ranks reached, by transport."""
        self.addresses, reached = addresses, {}
        for transport in self.transports:
            peers = await transport.probe_peers([address.get(transport.name) for address in addresses], timeout)
            if peers is not None:
                reached[transport.name] = peers
        return reached

    def finalize(
        self, reached: Sequence[Mapping[str, Sequence[int]]], processes: Sequence[Mapping[str, Any] | None] = ()
    ) -> None:
        """Store the results of every rank's `probe_peers`, by rank. Two ranks use a transport if both reach the other.

        The results of transports that this rank does not have are included, so that all ranks select alike. ``processes``
        are the identities of all ranks' processes, by rank.
        """
        for rank, process in enumerate(processes):
            if process is not None and is_visible(process, processes[self.rank]):
                self._processes[rank] = process
        for name in dict.fromkeys(name for one in reached for name in one):
            self._reached[name] = [set(one.get(name, ())) for one in reached]

    # -- for one peer, or for all --------------------------------------------------------------

    def _transport_to(self, peer: int) -> Transport | None:
        """Return the preferred transport of those that reach a peer; None if none does."""
        for transport in self.transports:
            address = self.addresses[peer].get(transport.name)
            if address is None or not transport.reaches(address):
                continue
            if self._both_reach(transport.name, self.rank, peer):
                return transport
        return None

    def _used(self) -> set[Transport]:
        """Return the transports to all peers."""
        selected = (self._transport_to(peer) for peer in range(len(self.addresses)) if peer != self.rank)
        return {transport for transport in selected if transport is not None}

    def end_unused(self) -> None:
        """Let the transports end to listen over which no peer sends to this rank."""
        for transport in set(self.transports) - self._used():
            transport.end_listening()

    def link(self, peer: int) -> Link:
        """Return a new link to a peer; raise TransportUnavailableError if no transport reaches it."""
        transport, published = self._transport_to(peer), self.addresses[peer]
        if transport is not None:
            return transport.link(peer, published[transport.name])
        own = [transport.name for transport in self.transports]
        common = [name for name in own if name in published]
        if common:
            raise TransportUnavailableError(
                f"{' and '.join(common)} cannot connect rank {self.rank} and rank {peer}, and no other transport is "
                "allowed; their logs say why: mend that, or allow tcp too"
            )
        raise TransportUnavailableError(
            f"no transport reaches rank {peer}: it offers {', '.join(published) or 'none'}, "
            f"rank {self.rank} has {', '.join(own)}; start every rank with the same backend"
        )

    def used(self, members: Sequence[int]) -> list[str]:
        """Return the names of this rank's transports that a group uses, the preferred first.

        A transport that probes is included if it connects any two members, even if this rank is neither of them, so
        that all members may pass the names to `init_process_group`.
        """
        own = {self._transport_to(peer) for peer in members if peer != self.rank}
        connecting = {
            name
            for name, reached in self._reached.items()
            if any(
                self._both_reach(name, rank, peer) for rank in members for peer in reached[rank].intersection(members)
            )
        }
        return [each.name for each in self.transports if each in own or each.name in connecting]

    def on_host_of(self, peer: int) -> set[int]:
        """Return the ranks that share memory with a peer."""
        return {
            other
            for name, reached in self._reached.items()
            for other in reached[peer]
            if self._both_reach(name, peer, other)
        }

    @property
    def local_size(self) -> int:
        """The number of ranks on this host: those that share memory, or whose processes this rank sees, or all ranks."""
        reached = [self._reached[each.name][self.rank] for each in self.transports if each.name in self._reached]
        return max((len(peers) + 1 for peers in reached), default=len(self._processes) or len(self.addresses))

    def peer_cores(self, core: int) -> Iterable[tuple[int, int, bool]]:
        """Publish the core of the calling thread, which waits; return the cores of its peers: see `Transport.peer_cores`.

        Without memory in common, the system says where the peers' main threads are.
        """
        published = [peer for transport in self.transports for peer in transport.peer_cores(core)]
        if published:
            return published
        now = monotonic()
        if now >= self._cores_until:
            self._cores_until = now + _CORES_EVERY
            others = [(rank, process) for rank, process in self._processes.items() if process["pid"] != os.getpid()]
            self._cores = [(rank, *last_core(process)) for rank, process in others[:_MOST_CORES]]
        return self._cores

    def spin_policy(self) -> tuple[float, bool]:
        """Return the seconds to spin before sleeping, and whether ranks outnumber the cores."""
        policies = [transport.spin_policy(self.local_size) for transport in self._used()]
        return min((spin for spin, _ in policies), default=0.0), any(crowded for _, crowded in policies)

    def busy(self) -> bool:
        """Return whether messages are queued that only this rank's drivers can send."""
        # Each call runs this: `any` with a generator would add two Python frames.
        for transport in self.transports:
            if transport.busy():
                return True
        return False

    def holds_bytes(self) -> bool:
        """Return whether a transport holds bytes of messages that are complete."""
        return any(transport.holds_bytes() for transport in self.transports)

    def read_arrived(self, inbox: MatchingQueue) -> None:
        """Read all data that has arrived, including the data behind the stalled messages of ``inbox``.

        A rank calls this before it declares the peer of ``inbox`` lost. The transports read as after a sleep on their
        descriptors.
        """
        for _ in range(_MAX_READS):
            inbox.unblock()
            ready = [(each, [descriptor for descriptor, _ in each.waits() or ()]) for each in self.transports]
            if not any(transport.advance(descriptors) for transport, descriptors in ready):
                return

    def _both_reach(self, name: str, rank: int, peer: int) -> bool:
        """Return whether two ranks have reached each other by a transport, or the transport does not probe."""
        reached = self._reached.get(name)
        return reached is None or (peer in reached[rank] and rank in reached[peer])

    def _transport_named(self, name: str) -> Transport:
        return next(transport for transport in self.transports if transport.name == name)

    # -- for groups ----------------------------------------------------------------------------

    def native(self, channel: Channel) -> Native | None:
        """Return a group's native collectives if one transport that probes connects all members, None otherwise."""
        pairs = list(itertools.combinations(channel.members, 2))
        for name in self._reached:
            if all(self._both_reach(name, *pair) for pair in pairs):
                waits = range(len(channel.members))
                return self._transport_named(name).native(channel.number, channel.members, waits)
        return None

    def node_layout(self, channel: Channel) -> tuple[NodeLayout, Native | None] | None:
        """Return the layout of a group over several nodes, and the native collectives of this rank's node.

        Return None if the group has no hierarchy. The collectives are None if this rank is alone on its node.
        """
        members = channel.members
        for name in self._reached:
            nodes = layout(members, self.rank, functools.partial(self._both_reach, name))
            if nodes is not None:
                node = tuple(members[rank] for rank in nodes.members)
                if len(node) == 1:
                    return nodes, None
                return nodes, self._transport_named(name).native(channel.number, node, nodes.members)
        return None
