"""The figures of a store server that `asyncdist store status` prints and Prometheus collects.

It reads a server through `StatusSource` and does not import it.
"""

from __future__ import annotations

import os
import time
from typing import Any, Protocol

from asyncdist.base.release import VERSION
from asyncdist.config import Config
from asyncdist.net.refusals import RefusalLog
from asyncdist.store.persistence.group_commit import GroupCommit
from asyncdist.store.server.accept import Admission
from asyncdist.store.state.limits import MemoryQuota
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.sessions import SessionTable


class StatusSource(Protocol):
    """The attributes of a server that the figures are read from."""

    admission: Admission
    refusals: RefusalLog
    quota: MemoryQuota
    config: Config
    durability: GroupCommit | None
    sessions: SessionTable
    num_requests: int
    started: float
    state: StoreState


MEANINGS = {
    "uptime_seconds": "seconds since the server was started",
    "connections": "connections that are open",
    "connections_limit": "limit of open connections",
    "connections_total": "connections that were accepted since the start",
    "refusals_total": "connections that were refused or dropped: no token, garbage, too many, too slow",
    "requests_total": "requests that have been executed since the start",
    "clients": "clients with a session, connected or not",
    "keys": "keys with a value",
    "queue_items": "items in queues",
    "waiting": "requests that wait for a key, an item, a barrier or messages",
    "stored_bytes": "bytes of keys, values, items and kept replies",
    "stored_bytes_limit": "limit of stored bytes (--max-memory)",
    "log_bytes": "bytes of log and snapshot that a restart would read (--data)",
    "commits_total": "times that changes were written since the start (--data)",
    "snapshots_total": "snapshots that were written since the start (--data)",
}
"""The meaning of each figure by its name. Figures whose names end in ``_total`` only grow."""


def figures(server: StatusSource) -> dict[str, float]:
    """Return the figures of this server."""
    state = server.state
    values: dict[str, float] = {
        "uptime_seconds": time.monotonic() - server.started,
        "connections": len(server.admission.connections),
        "connections_limit": server.config.store_max_connections,
        "connections_total": server.admission.num_admitted,
        "refusals_total": server.refusals.count,
        "requests_total": server.num_requests,
        "clients": len(server.sessions),
        "keys": len(state.keys),
        "queue_items": state.queues.num_items,
        "waiting": state.num_open,
        "stored_bytes": server.quota.nbytes,
    }
    if server.config.store_max_nbytes:
        values["stored_bytes_limit"] = server.config.store_max_nbytes
    if server.durability is not None:
        values["log_bytes"] = server.durability.journal.nbytes
        values["commits_total"] = server.durability.num_commits
        values["snapshots_total"] = server.durability.num_snapshots
    return values


def status(server: StatusSource) -> dict[str, Any]:
    """Return the figures and the texts."""
    durability = server.durability
    texts = {
        "version": VERSION,
        "pid": os.getpid(),
        "data": str(durability.journal.folder) if durability is not None else "",
        "fsync": str(durability.policy) if durability is not None else "",
    }
    return {**texts, **figures(server)}
