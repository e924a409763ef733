"""Prometheus metrics of the operations of all groups of this process.

`GroupMetrics` is a hook on every group: it adds each operation to counters of its own, which a scrape only reads.
`serve_metrics` answers scrapes at an HTTP port, and ``ASYNCDIST_METRICS_PORT`` makes every rank call it. They need
prometheus-client, the extra ``metrics``.
"""

from __future__ import annotations

import itertools
import logging
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from asyncdist.base import lifecycle
from asyncdist.base.error_text import describe_error
from asyncdist.config import Config
from asyncdist.errors import AddressError, UsageError
from asyncdist.kernel.tracing.hooks import ObservedEntry, pending_operations, register_entry_hook

log = logging.getLogger("asyncdist")

SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the histogram's buckets."""
OTHER = "other"
"""The label of groups and peers above their limits."""
_LONGEST_NAME = 80


@dataclass(slots=True)
class _PeerCounters:
    """The counters of one peer, for which operations of one group have waited."""

    seconds: float = 0.0
    straggled: int = 0


@dataclass(slots=True)
class _OperationCounters:
    """The counters of one operation of one group, and those of the group's peers."""

    peers: dict[int | str, _PeerCounters]
    buckets: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    errors: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class GroupMetrics:
    """A Prometheus collector of the operations of all groups, for a registry of your own; see `serve_metrics`.

    It counts from its creation to `close`.

    Args:
        straggler_seconds: An operation that waits at least so long for one rank, and longer than for every other, counts
            that rank as its straggler.
        max_groups: The number of groups with a label of their own; later ones are counted as the group ``other``.
        max_peers: The number of peers of a group, on one rank, with a label of their own; others are the peer ``other``.

    Example:
        >>> prometheus_client.REGISTRY.register(dist.GroupMetrics())
    """

    def __init__(self, *, straggler_seconds: float = 1e-3, max_groups: int = 64, max_peers: int = 256) -> None:
        _check_available()
        self._straggler_seconds, self._max_groups, self._max_peers = straggler_seconds, max_groups, max_peers
        # A signal handler may run operations while its thread holds the lock.
        self._lock = threading.RLock()
        self._groups: dict[str, str] = {}
        self._operations: dict[tuple[str, int, str], _OperationCounters] = {}
        self._peers: dict[tuple[str, int], dict[int | str, _PeerCounters]] = {}
        self._hook = register_entry_hook(self._count)

    def close(self) -> None:
        """Stop counting. Idempotent."""
        self._hook.remove()

    def _count(self, entry: ObservedEntry) -> None:
        seconds = entry.finished - entry.issued
        key = entry.group, entry.of.rank, entry.op
        with self._lock:
            counters = self._operations.get(key) or self._counters(*key)
            counters.buckets[bisect_left(SECONDS, seconds)] += 1
            counters.seconds += seconds
            if entry.error is None:
                counters.nbytes += entry.nbytes
            else:
                counters.errors += 1
            if entry.spans:
                self._count_waits(counters.peers, entry.waits())

    def _counters(self, group: str, rank: int, op: str) -> _OperationCounters:
        """Return the counters of an operation under the label of its group."""
        key = label, _, _ = self._label(group), rank, op
        counters = self._operations.get(key)
        if counters is None:
            peers = self._peers.setdefault((label, rank), {})
            counters = self._operations[key] = _OperationCounters(peers)
        return counters

    def _label(self, group: str) -> str:
        """Return the label of a group; long names are shortened."""
        label = self._groups.get(group)
        if label is None:
            if len(self._groups) >= self._max_groups:
                return OTHER
            label = group if len(group) <= _LONGEST_NAME else f"{group[: _LONGEST_NAME - 1]}…"
            self._groups[group] = label
        return label

    def _count_waits(self, peers: dict[int | str, _PeerCounters], waits: dict[int, float]) -> None:
        longest, slowest = 0.0, None
        for peer, seconds in waits.items():
            counters = peers.get(peer) or self._peer(peers, peer)
            counters.seconds += seconds
            if seconds > longest:
                longest, slowest = seconds, counters
            elif seconds == longest:
                # Several peers for which it has waited equally long.
                slowest = None
        if slowest is not None and longest >= self._straggler_seconds:
            slowest.straggled += 1

    def _peer(self, peers: dict[int | str, _PeerCounters], peer: int) -> _PeerCounters:
        """Return the counters of a peer, whose first wait this is, or those of all peers above the limit."""
        return peers.setdefault(peer if len(peers) < self._max_peers else OTHER, _PeerCounters())

    # -- scrapes -----------------------------------------------------------------------------------

    def collect(self) -> Iterable[Any]:
        """Return the metrics of one scrape; prometheus-client calls it, on any thread."""
        with self._lock:
            return [*self._operation_metrics(), *self._peer_metrics(), *self._pending_metrics()]

    def _operation_metrics(self) -> Iterator[Any]:
        errors = _family("Counter", "operation_errors", "Operations that have failed.", "operation")
        nbytes = _family("Counter", "operation_bytes", "Payload of successful operations.", "operation")
        about = "Seconds from the call of an operation to its end."
        seconds = _family("Histogram", "operation_seconds", about, "operation")
        for (group, rank, op), counters in self._operations.items():
            labels = (group, str(rank), op)
            errors.add_metric(labels, counters.errors)
            nbytes.add_metric(labels, counters.nbytes)
            bounds = [*map(str, SECONDS), "+Inf"]
            buckets = list(zip(bounds, itertools.accumulate(counters.buckets), strict=True))
            seconds.add_metric(labels, buckets, counters.seconds)
        yield from (errors, nbytes, seconds)

    def _peer_metrics(self) -> Iterator[Any]:
        least = f"{self._straggler_seconds:g} s"
        about = "Seconds for which operations of the rank have waited for the peer."
        waits = _family("Counter", "wait_seconds", about, "peer")
        about = f"Operations whose longest wait, of at least {least}, was for the peer."
        stragglers = _family("Counter", "straggler_operations", about, "peer")
        for (group, rank), peers in self._peers.items():
            for peer, counters in peers.items():
                labels = (group, str(rank), str(peer))
                waits.add_metric(labels, counters.seconds)
                stragglers.add_metric(labels, counters.straggled)
        yield from (waits, stragglers)

    def _pending_metrics(self) -> Iterator[Any]:
        pending = _family("Gauge", "operations_pending", "Operations that have not ended.", "operation")
        about = "Seconds since the call of the oldest pending operation."
        oldest = _family("Gauge", "oldest_pending_seconds", about, "operation")
        # An operation that has no pending call is reported as 0, so that the series has no gaps.
        calls: dict[tuple[str, int, str], list[float]] = {key: [] for key in self._operations}
        for record in pending_operations():
            calls.setdefault((self._label(record.group), record.rank, record.op), []).append(record.start)
        now = perf_counter()
        for (group, rank, op), starts in calls.items():
            labels = (group, str(rank), op)
            pending.add_metric(labels, len(starts))
            oldest.add_metric(labels, now - min(starts) if starts else 0.0)
        yield from (pending, oldest)


def _family(kind: str, name: str, about: str, of: str) -> Any:
    """Return a family of metrics without samples, whose last label is ``of``."""
    from prometheus_client import core

    return getattr(core, f"{kind}MetricFamily")(f"asyncdist_{name}", about, labels=("group", "rank", of))


class MetricsServer:
    """The HTTP port of this process's metrics, made by `serve_metrics`. As a context manager it closes at the end.

    Attributes:
        host: The host at which it listens.
        port: The port.
        metrics: The collector.
    """

    def __init__(self, metrics: GroupMetrics, server: Any, thread: threading.Thread, host: str) -> None:
        self.metrics, self.host = metrics, host
        self.port: int = server.server_port
        self._server, self._thread = server, thread

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and counting. Idempotent."""
        self.metrics.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(port: int = 0, host: str = "127.0.0.1", *, straggler_seconds: float = 1e-3) -> MetricsServer:
    """Serve the metrics of all groups of this process to Prometheus, at ``http://host:port/metrics``.

    A daemon thread answers, until ``close()``. It has no authentication: let only your monitoring reach the port. The
    metrics have the labels ``group``, ``rank``, and ``operation`` or ``peer``; docs/metrics.md lists them.

    Args:
        port: The port; 0 takes a free one. Each process needs its own, for example ``9400 + local_rank``.
        host: The address to listen at; ``0.0.0.0`` for every IPv4 interface.
        straggler_seconds: An operation that waits at least so long for one rank, and longer than for every other, counts
            that rank as its straggler.

    Returns:
        The server, with its ``port``.

    Raises:
        UsageError: prometheus-client is not installed.
        AddressError: The port is in use, or the host is not an address of this machine.

    Example:
        >>> server = dist.serve_metrics(9400 + dist.get_node_local_rank(fallback_rank=0))
    """
    _check_available()
    from prometheus_client import CollectorRegistry, start_http_server

    metrics = GroupMetrics(straggler_seconds=straggler_seconds)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, host, registry)
    # OverflowError: no port has such a number.
    except (OSError, OverflowError) as cause:
        metrics.close()
        raise AddressError(
            f"cannot serve metrics at {host}:{port} ({describe_error(cause)}): choose another port, or an address of "
            "this machine"
        ) from cause
    lifecycle.close_in_children(server.socket)
    return MetricsServer(metrics, server, thread, host)


_configured: MetricsServer | None = None
_configuring = threading.Lock()
lifecycle.renew_in_children(globals(), "_configuring", threading.Lock)


def serve_configured_metrics(config: Config, local_rank: int) -> MetricsServer | None:
    """Serve the metrics at ``ASYNCDIST_METRICS_PORT`` plus the local rank, from the first world until the process ends.

    Returns:
        The server of this process; None if the setting is not set. The errors are those of `serve_metrics`.
    """
    global _configured
    with _configuring:
        # A forked child inherits the server of its parent, whose port it could not use.
        if _configured is None and config.metrics_port >= 0:
            port = config.metrics_port + local_rank if config.metrics_port else 0
            _configured = serve_metrics(port, config.metrics_host)
            log.info("serving metrics at http://%s:%d/metrics", _configured.host, _configured.port)
        return _configured


def _check_available() -> None:
    """Raise UsageError if prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise UsageError("metrics need the package prometheus-client: pip install prometheus-client") from None
