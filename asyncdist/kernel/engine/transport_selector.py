"""Selects the transport to each peer, and the native collectives of each group (`transport.native`).

The endpoint makes the one `TransportSelector` of a rank; groups, failures and heartbeats ask it.

Every rank publishes an address for each of its transports: those of local transports, such as shared memory, for the ranks
of its machine alone. Some transports then probe which peers they reach. Every rank gets the results of all ranks, so that
any two ranks select the same transport, and all members of a group agree on which ranks share memory.

In a large world a rank asks for the address of a peer of another machine when it first needs it. Until it has the address,
it takes the first of the transports that all ranks have.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from time import monotonic
from typing import Any, Protocol

from asyncdist.errors import TransportUnavailableError
from asyncdist.kernel.algorithms.hierarchy import NodeLayout, layout
from asyncdist.kernel.algorithms.sharing import Sharing
from asyncdist.kernel.engine.drivers.core_placement import CorePlacement
from asyncdist.kernel.engine.operation import Channel
from asyncdist.kernel.transport.address_search import AddressBook, AddressSearch, SearchHost
from asyncdist.kernel.transport.awaited_link import AwaitedLink
from asyncdist.kernel.transport.base import Link, MatchingQueue, Transport
from asyncdist.kernel.transport.native import Native
from asyncdist.net.process_identity import Neighbours, last_core

_CORES_EVERY, _MOST_CORES = 0.01, 16
"""Seconds between two queries of the cores on which peers run, and the largest number of peers in a query."""
_MAX_READS = 64
"""Limit of `TransportSelector.read_arrived`, because a peer may send without end."""

Addresses = Mapping[str, Mapping[str, Any]]


class LinkHost(SearchHost, Protocol):
    """The part of the endpoint that the selector uses."""

    links: dict[int, Link]


class TransportSelector:
    """The transports of one rank, the preferred first, and the peers that each transport reaches."""

    def __init__(self, host: LinkHost, transports: Sequence[Transport]) -> None:
        self._host, self.rank = host, host.rank
        self.transports = list(transports)
        self.addresses: Sequence[Addresses | None] = ()
        """The addresses of all ranks for ranks on other machines, by rank and transport. None is not known yet."""
        self.search: AddressSearch | None = None
        """Finds the addresses that are not known. None if all are."""
        self._asked: dict[int, AwaitedLink] = {}
        """The links whose addresses have been requested, by peer."""
        self._here: Mapping[int, Addresses] = {}
        """The addresses of local transports, by rank of this machine and transport."""
        self._offered: Mapping[str, bool] = {}
        self.reached: Mapping[str, Sharing] = {}
        """Which ranks have reached which, by transport. A transport that does not probe has no entry."""
        self._processes: dict[int, Mapping[str, Any]] = {}
        """The processes on this host that this rank sees, by rank; its own is one of them. Empty if it sees none."""
        self.placement = CorePlacement(self.rank, self.peer_cores)
        self._cores: list[tuple[int, int, bool]] = []
        self._cores_until = 0.0

    # -- start ---------------------------------------------------------------------------------

    def know(
        self,
        addresses: Sequence[Addresses | None],
        here: Mapping[int, Addresses],
        offered: Mapping[str, bool],
        processes: Neighbours,
        book: AddressBook | None,
    ) -> None:
        """Store every rank's addresses; see `Endpoint.know`."""
        self.addresses, self._offered = addresses, offered
        if book is not None:
            self.search = AddressSearch(self._host, book, self._go_on)
        local = any(transport.is_local for transport in self.transports)
        self._here = {rank: each for rank, each in here.items() if each or local}
        self._processes = processes.visible()

    async def probe_peers(self, timeout: float) -> dict[str, list[int]]:
        """Probe the peers of this machine; return the ranks reached, by transport."""
        reached = {}
        for transport in self.transports:
            if transport.is_local:
                addresses = {rank: each.get(transport.name) for rank, each in self._here.items()}
                peers = await transport.probe_peers(addresses, timeout)
                if peers is not None:
                    reached[transport.name] = peers
        return reached

    # -- for one peer, or for all --------------------------------------------------------------

    def _transport_to(self, peer: int) -> Transport | None:
        """Return the preferred transport of those that reach a peer; None if none does."""
        known = self.addresses[peer] is not None
        for transport in self.transports:
            if not known and not transport.is_local and self._offered.get(transport.name):
                return transport
            address = self._address(transport, peer)
            if address is None or not transport.reaches(address):
                continue
            if self._both_reach(transport.name, self.rank, peer):
                return transport
        return None

    def _address(self, transport: Transport, peer: int) -> Mapping[str, Any] | None:
        return (self._here.get(peer, {}) if transport.is_local else self.addresses[peer] or {}).get(transport.name)

    def used_in_world(self) -> set[Transport]:
        """Return the transports to all peers, and those with which ranks of other machines may send to this one."""
        near = [self._transport_to(peer) for peer in self._here if peer != self.rank]
        used = {transport for transport in near if transport is not None}
        if sum(transport is not None and transport.is_local for transport in near) < len(self.addresses) - 1:
            used.update(each for each in self.transports if not each.is_local and each.name in self._offered)
        return used

    def end_all_but(self, used: set[Transport]) -> None:
        """Let the transports end to listen over which no peer sends to this rank."""
        for transport in set(self.transports) - used:
            transport.end_listening()

    def link(self, peer: int) -> Link:
        """Return a new link to a peer; raise TransportUnavailableError if no transport reaches it."""
        transport, published = self._transport_to(peer), self.addresses[peer]
        if published is None and (transport is None or not transport.is_local):
            return AwaitedLink(peer, self.rank, self._ask)
        if transport is not None:
            address = self._address(transport, peer)
            assert address is not None
            return transport.link(peer, address)
        published = {**self._here.get(peer, {}), **(published or {})}
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

    def _ask(self, link: AwaitedLink) -> None:
        """Look for the address of a peer."""
        assert self.search is not None
        self._asked[link.peer] = link
        self.search.begin(link.peer)

    def _go_on(self, peer: int, failure: str) -> None:
        """Continue with a peer whose address has been found, or not."""
        link = self._asked.pop(peer, None)
        if link is None:  # the peer is lost
            return
        try:
            if not failure:
                self._host.links[peer] = found = self.link(peer)
                link.continue_over(found)
        except TransportUnavailableError as error:
            failure = str(error)
        if failure:
            self._host.lost(peer, failure)

    def forget(self, peer: int) -> None:
        """Drop what is kept for a lost peer."""
        if self.search is not None:
            if self._asked.pop(peer, None) is not None:
                self.search.forget(peer)
            if peer == 0:
                self.search.without_store()

    def close(self) -> None:
        """Look for no address any more, and close the transports."""
        if self.search is not None:
            self.search.close()
        for transport in self.transports:
            transport.close()

    def used(self, members: Sequence[int]) -> list[str]:
        """Return the names of this rank's transports that a group uses, the preferred first.

        A transport that probes is included if it connects any two members, even if this rank is neither of them, so
        that all members may pass the names to `init_process_group`.
        """
        own = {self._transport_to(peer) for peer in members if peer != self.rank}
        connecting = {name for name, sharing in self.reached.items() if sharing.connects_any(members)}
        return [each.name for each in self.transports if each in own or each.name in connecting]

    def on_host_of(self, peer: int) -> set[int]:
        """Return the ranks that share memory with a peer."""
        return {
            other
            for sharing in self.reached.values()
            for each in sharing.reached(peer)
            for other in each
            if other != peer and sharing.connects(peer, other)
        }

    @property
    def local_size(self) -> int:
        """The number of ranks on this host: those that share memory, or whose processes this rank sees, or all ranks."""
        reached = [self.reached[each.name].reached(self.rank) for each in self.transports if each.name in self.reached]
        return max((sum(map(len, peers)) for peers in reached), default=len(self._processes) or len(self.addresses))

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
            own = os.getpid()
            others = ((rank, process) for rank, process in self._processes.items() if process["pid"] != own)
            self._cores = [(rank, *last_core(process)) for rank, process in islice(others, _MOST_CORES)]
        return self._cores

    def spin_policy(self, used: Iterable[Transport]) -> tuple[float, bool]:
        """Return the seconds to spin before sleeping, and whether ranks outnumber the cores."""
        policies = [transport.spin_policy(self.local_size) for transport in used]
        return min((spin for spin, _ in policies), default=0.0), any(crowded for _, crowded in policies)

    def busy(self) -> bool:
        """Return whether messages are queued that only this rank's drivers can send."""
        # Each call runs this: `any` with a generator would add two Python frames.
        for transport in self.transports:
            if transport.busy():
                return True
        return bool(self._asked)

    def undelivered(self) -> set[int]:
        """Return the peers for which bytes of messages wait on this host that are complete."""
        return {peer for transport in self.transports for peer in transport.undelivered()}

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
        sharing = self.reached.get(name)
        return sharing is None or sharing.connects(rank, peer)

    def _transport_named(self, name: str) -> Transport:
        return next(transport for transport in self.transports if transport.name == name)

    # -- for groups ----------------------------------------------------------------------------

    def native(self, channel: Channel) -> Native | None:
        """Return a group's native collectives if one transport that probes connects all members, None otherwise."""
        for name, sharing in self.reached.items():
            if sharing.connects_all(channel.members):
                waits = range(len(channel.members))
                return self._transport_named(name).native(channel.number, channel.members, waits)
        return None

    def node_layout(self, channel: Channel) -> tuple[NodeLayout, Native | None] | None:
        """Return the layout of a group over several nodes, and the native collectives of this rank's node.

        Return None if the group has no hierarchy. The collectives are None if this rank is alone on its node.
        """
        members = channel.members
        for name, sharing in self.reached.items():
            nodes = layout(members, self.rank, sharing)
            if nodes is not None:
                node = tuple(members[rank] for rank in nodes.members)
                if len(node) == 1:
                    return nodes, None
                return nodes, self._transport_named(name).native(channel.number, node, nodes.members)
        return None
