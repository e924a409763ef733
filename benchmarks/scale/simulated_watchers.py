"""The ranks of a simulated world that notice silent ones: the real `Heartbeat` of each, in the time of the simulation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

from asyncdist.config import Config
from asyncdist.errors import GroupError, PeerLostError
from asyncdist.kernel.engine import heartbeat
from asyncdist.kernel.engine.heartbeat import Heartbeat
from asyncdist.kernel.transport.wire_format import SUSPECT
from asyncdist.net.detector import BEATS
from asyncdist.net.process_identity import ProcessState
from benchmarks.scale.cluster import Cluster

_ACCEPTED_WITHIN = 1.0
"""Seconds after which a host that has not accepted a connection counts as one that does not answer."""
_STOPPED = ProcessState(text="its process is stopped")


class Watchers:
    """The ranks that hear from others until these fall silent. Only they run heartbeats: the others would see no change.

    Args:
        silent: The ranks that fall silent.
        is_cut_off: Whether their hosts do, so that they accept no connection either.
        heard: By rank, the silent ones that it hears.
        send: Sends a message of some bytes between two ranks, and then calls a function.
        lost: Is called with a rank, another one that it has lost, and the error.
    """

    def __init__(
        self,
        cluster: Cluster,
        silent: Collection[int],
        heard: dict[int, set[int]],
        *,
        is_cut_off: bool,
        send: Callable[..., None],
        lost: Callable[[int, int, PeerLostError], None],
    ) -> None:
        self.cluster, self.silent, self.is_cut_off, self.send, self.lost = cluster, silent, is_cut_off, send, lost
        self.period = Config().heartbeat / BEATS
        self.silent_since, self.are_over = 0.0, False
        self.of = {rank: _Watcher(self, rank, peers) for rank, peers in heard.items()}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Beat, and look for beats, during the block."""
        with (
            patch.object(heartbeat, "monotonic", self.cluster.now),
            patch.object(heartbeat, "periodic_calls", _Periodic(self)),
        ):
            for watcher in self.of.values():
                watcher.begin()
            try:
                yield
            finally:
                self.are_over = True

    def watch(self, rank: int, peer: int) -> None:
        """Let a rank connect to a silent one, whose host may not answer."""
        if rank not in self.of:
            self.of[rank] = _Watcher(self, rank, ())
            self.of[rank].begin()
        self.of[rank].dial(peer)

    def phase(self, rank: int) -> float:
        return self.period * (rank * 7919 % 1000) / 1000

    def beats(self, peer: int) -> int:
        """Return the number of beats of a peer that have arrived."""
        until = min(self.cluster.now(), self.silent_since)
        return int((until - self.phase(peer)) // self.period)


class _Watcher:
    """Stands for the endpoint of a rank, with one transport, and for its failures, as far as its heartbeat uses them."""

    beats, name = True, "simulated"
    config = Config()

    def __init__(self, watchers: Watchers, rank: int, peers: Collection[int]) -> None:
        self._watchers, self.rank, self._counts = watchers, rank, dict.fromkeys(peers, -1)
        self._asked: set[int] = set()
        self.lost_peers: dict[int, PeerLostError] = {}
        self.transports, self.transport_selector, self.processes = [self], self, self
        self.heartbeat = Heartbeat(cast(Any, self), cast(Any, self))

    def begin(self) -> None:
        cluster = self._watchers.cluster
        cluster.at(cluster.now() + self._watchers.phase(self.rank), self._start)

    def _start(self) -> None:
        if not self._watchers.are_over:
            self.heartbeat.start(cast(Any, self))

    def dial(self, peer: int) -> None:
        if peer not in self._counts:
            cluster, is_cut_off = self._watchers.cluster, self._watchers.is_cut_off
            cluster.at(cluster.now() + (_ACCEPTED_WITHIN if is_cut_off else 0.0), self._listen_to, peer)

    def _listen_to(self, peer: int) -> None:
        """Watch a peer that has accepted a connection, or has had the time to do so."""
        if self._watchers.is_cut_off:
            self._asked.add(peer)
        self._counts.setdefault(peer, self._watchers.beats(peer))

    def look(self, look: Callable[[], bool]) -> None:
        look()

    # -- the transport ---------------------------------------------------------------------------

    def pulse(self) -> None:
        """Do nothing: `Watchers.beats` counts the beats of the ranks that matter."""

    def beat(self) -> dict[int, bool]:
        before, self._counts = self._counts, {peer: self._watchers.beats(peer) for peer in self._counts}
        return {peer: count > before[peer] for peer, count in self._counts.items()}

    def unanswered(self) -> set[int]:
        return self._asked

    def on_host_of(self, peer: int) -> range:
        per_host = self._watchers.cluster.per_host
        return range(peer - peer % per_host, peer - peer % per_host + per_host)

    def state_of(self, peer: int) -> ProcessState | None:
        return _STOPPED if self.rank in self.on_host_of(peer) else None

    # -- the endpoint ------------------------------------------------------------------------------

    def call_later(self, call: Callable[[], None]) -> None:
        """Do nothing: these calls write logs."""

    def read_arrived(self, peer: int) -> None:
        """Do nothing: what arrives is read at once."""

    def send_unordered(self, peer: int, kind: int, key: bytes, body: bytes) -> None:
        other = self._watchers.of.get(peer)
        if peer in self._watchers.silent:
            self.dial(peer)
        elif other is not None:
            take = other.heartbeat.on_question if kind == SUSPECT else other.heartbeat.on_answer
            self._watchers.send(self.rank, peer, len(body), take, self.rank, body)

    # -- the failures ------------------------------------------------------------------------------

    def accepts_notices(self, peer: int) -> bool:
        return peer not in self.lost_peers

    def lost(self, peer: int, reason: str, *, last_heard: float | None = None) -> None:
        error = self.lost_peers[peer] = PeerLostError(peer, reason)
        error.noticed, error.last_heard = "heartbeat", last_heard
        self._watchers.lost(self.rank, peer, error)

    def observe(self, *what: object) -> None:
        """Do nothing: no simulated rank reports suspicions."""

    def notified(self, error: GroupError) -> None:
        """Take a notice of another rank."""
        self.heartbeat.on_loss_elsewhere(error)


class _Periodic:
    """Calls functions at intervals, in the time of the simulation."""

    def __init__(self, watchers: Watchers) -> None:
        self._watchers, self._cluster = watchers, watchers.cluster

    def start(self, function: Callable[[], None], period: float) -> None:
        def call() -> None:
            if not self._watchers.are_over:
                function()
                self._cluster.at(self._cluster.now() + period, call)

        self._cluster.at(self._cluster.now() + period, call)
