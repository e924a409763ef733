"""The members of a simulated world that regroup: the real `Agreements` of each, in the time of the simulation."""

from __future__ import annotations

import asyncio
import functools
from asyncio import TimerHandle
from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

from asyncdist.errors import GroupError, PeerLostError
from asyncdist.kernel.engine import agreements
from asyncdist.kernel.engine.agreements import REGROUP, Agreements
from asyncdist.kernel.engine.control_messages import ENDED
from asyncdist.kernel.engine.operation import Channel
from asyncdist.kernel.membership.messages import AgreementMessage, Decision
from benchmarks.scale.cluster import Cluster

_TIMEOUT = 600.0


class SimulatedMembers:
    """The living ranks of a world, in one group that has failed.

    Args:
        connected: The pairs of ranks that are connected.
        send: Sends a message of some bytes between two ranks, and then calls a function.
        have_ended: Whether the processes of the silent ranks have ended.
    """

    def __init__(
        self, cluster: Cluster, connected: set[tuple[int, int]], send: Callable[..., None], *, have_ended: bool
    ) -> None:
        self.cluster, self.connected, self.send, size = cluster, connected, send, len(cluster.processes)
        self.have_ended = have_ended
        self.watch: Callable[[int, int], None] = _ignore
        """Is called with a member that watches another one, which is silent."""
        self.channel = Channel(1, "simulated", (), 0)
        # One for all ranks, and without a table of them.
        self.channel.members = cast(Any, range(size))
        self.channel.error = GroupError("a member was lost")
        self._undecided: set[int] = set()
        self.decision: Decision | None = None
        self.of: dict[int, SimulatedMember] = {}
        self.seen: defaultdict[int, dict[int, str]] = defaultdict(dict)
        """By rank, the members that it has lost so far, and why."""

    def lose(self, rank: int, peer: int, reason: str) -> None:
        """Let a member lose another one."""
        self.seen[rank][peer] = reason
        if rank in self.of:
            self.of[rank].lose_after_reading(peer, reason)

    async def regroup(self) -> Decision:
        """Return when all members have decided."""
        unpack = functools.lru_cache(1 << 12)(AgreementMessage.unpack)
        with (
            patch.object(agreements, "monotonic", self.cluster.now),
            patch.object(AgreementMessage, "unpack", unpack),
        ):
            self._done = asyncio.get_running_loop().create_future()
            living = [rank for rank, process in enumerate(self.cluster.processes) if not process.is_silent]
            self.of, self._undecided = {rank: SimulatedMember(self, rank) for rank in living}, set(living)
            for rank, lost in self.seen.items():
                for peer, reason in lost.items():
                    self.of[rank].lose_after_reading(peer, reason)
            for member in self.of.values():
                member.begin()
            await self._done
        for member in self.of.values():
            member.end()
        self.of = {}
        assert self.decision is not None
        return self.decision

    def deliver(self, rank: int, sender: int, key: bytes, body: bytes) -> None:
        """Pass a message to a member."""
        if rank in self.of:
            self.of[rank].agreements.on_message(sender, key, body)

    def decided(self, rank: int, decision: Decision | None, error: GroupError | None) -> None:
        """Take what a member has decided."""
        if decision is None:
            raise RuntimeError(f"simulated rank {rank} does not regroup: {error}")
        assert self.decision is None or decision == self.decision
        self.decision = decision
        self._undecided.discard(rank)
        if not self._undecided:
            self._done.set_result(None)


class SimulatedMember:
    """Stands for the endpoint of a rank, its failures and its timers, as far as its agreements use them."""

    def __init__(self, members: SimulatedMembers, rank: int) -> None:
        self._members, self.rank, self._cluster = members, rank, members.cluster
        self.channels, self.lost_peers = {members.channel.prefix: members.channel}, dict[int, GroupError]()
        self._timers: dict[object, TimerHandle] = {}
        self._dialled = set[int]()
        self.timers = self
        self.agreements = Agreements(cast(Any, self), cast(Any, self))

    def begin(self) -> None:
        """Call ``regroup``."""
        finish = functools.partial(self._members.decided, self.rank)
        self.agreements.begin(self._members.channel, REGROUP, "regroup()", b"\1", _TIMEOUT, finish)

    def end(self) -> None:
        """Stop all timers."""
        for timer in self._timers.values():
            timer.cancel()

    # -- timers ------------------------------------------------------------------------------------

    def schedule(self, key: object, at: float, callback: Callable[[], None]) -> None:
        def call() -> None:
            del self._timers[key]
            callback()

        if key not in self._timers:
            self._timers[key] = self._cluster.at(at, call)

    def cancel(self, key: object) -> None:
        if timer := self._timers.pop(key, None):
            timer.cancel()

    # -- the endpoint and its failures -----------------------------------------------------------

    def assert_held(self) -> None:
        """Do nothing: there is one thread."""

    def send_unordered(self, peer: int, kind: int, key: bytes, body: bytes) -> None:
        if peer not in self._members.of:
            self.watch(peer)
        elif peer not in self.lost_peers:
            self._members.send(self.rank, peer, len(body), self._members.deliver, peer, self.rank, key, body)

    def watch(self, peer: int) -> None:
        """Connect to a peer, which fails if its process has ended."""
        if peer in self._members.of:
            if not self.hears(peer):
                self._members.send(self.rank, peer, 0, _ignore)
        elif peer in self.lost_peers:
            return
        elif not self._members.have_ended:
            self._members.watch(self.rank, peer)
        elif peer not in self._dialled:
            self._dialled.add(peer)
            dialled = self._cluster.processes[self.rank].work(self._cluster.costs.dial)
            self._cluster.at(dialled + 2 * self._cluster.costs.latency, self.lose_after_reading, peer, ENDED)

    def hears(self, peer: int) -> bool:
        return peer in self._members.of and (min(self.rank, peer), max(self.rank, peer)) in self._members.connected

    def has_ended(self, peer: int) -> bool:
        per_host = self._cluster.per_host
        is_gone = self._members.have_ended and peer not in self._members.of
        return is_gone and peer // per_host == self.rank // per_host

    def lose_after_reading(self, peer: int, reason: str) -> None:
        if peer not in self.lost_peers:
            self.lost_peers[peer] = PeerLostError(peer, reason)
            self.agreements.on_loss(peer)


def _ignore(*what: object) -> None:
    pass
