"""The RPC agent: what a process has between `init_rpc` and `shutdown`, and the workers that it knows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.errors import NotInitializedError, UsageError
from asyncdist.rendezvous import RendezvousSession
from asyncdist.rpc.references import RemoteReference
from asyncdist.rpc.remote import RemoteObject
from asyncdist.rpc.session import RpcSession

UNSET_TIMEOUT = -1.0
"""torch's value of a timeout for "the default"."""


@dataclass(frozen=True)
class WorkerInfo:
    """A worker: its ``name`` and its ``id``, which is its rank."""

    name: str
    id: int


class TensorPipeRpcBackendOptions:
    """Options of `init_rpc` with torch's names.

    Args:
        num_worker_threads: The most functions that this worker runs at a time.
        rpc_timeout: Seconds of calls without a timeout; 0 for no limit.
        init_method: Where the workers meet, as for `asyncdist.init_process_group`.
        device_maps: For each worker, the device there for each device here. No map is needed: a tensor of a CUDA device
            arrives on the current CUDA device of the worker, and `init_rpc` refuses maps to another one.
        devices: Accepted and not needed.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = 16,
        rpc_timeout: float = 60.0,
        init_method: str = "env://",
        device_maps: Mapping[str, Any] | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        self.num_worker_threads, self.rpc_timeout, self.init_method = num_worker_threads, rpc_timeout, init_method
        self.device_maps, self.devices = dict(device_maps or {}), list(devices or ())

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Add to the map of the devices of a worker."""
        self.device_maps[to] = {**self.device_maps.get(to, {}), **device_map}

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Accept torch's list of devices, which is not needed."""
        self.devices = list(devices)


@dataclass
class RpcAgent:
    """The state of this process between `init_rpc` and `shutdown`. Workers are listed by rank."""

    meeting: RendezvousSession
    session: RpcSession
    threads: DaemonThreadPool
    timeout: float
    infos: Sequence[WorkerInfo]
    workers: Sequence[RemoteObject]
    num_open: int = 0
    """The calls and the functions of this process that have not ended."""
    ending: asyncio.Future[None] | None = None
    """The end of the agent, when it has begun."""

    @property
    def own_info(self) -> WorkerInfo:
        return self.infos[self.meeting.rank]

    def info(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """Return a worker by name, rank or info. Raises UsageError."""
        if isinstance(to, WorkerInfo):
            return to
        for info in self.infos:
            if to in (info.name, info.id):
                return info
        raise UsageError(f"there is no worker {to!r}; there are {', '.join(info.name for info in self.infos)}")

    def owner_of(self, reference: RemoteReference) -> WorkerInfo:
        return self.infos[[worker.owner_id for worker in self.workers].index(reference.owner_id)]

    def limit(self, timeout: float) -> float:
        """Return the seconds of a call with torch's value of a timeout."""
        return (self.timeout if timeout == UNSET_TIMEOUT else timeout) or inf

    def watch(self, rank: int) -> asyncio.Future[Any]:
        """Return a future that ends when a worker has ended."""
        watch = self.workers[rank].call("until_lost", timeout=inf)
        # Nobody asks a watch that ends late.
        watch.add_done_callback(lambda done: done.cancelled() or done.exception())
        return watch


this: RpcAgent | None = None
"""The agent of this process, between `init_rpc` and `shutdown`."""


def current_agent() -> RpcAgent:
    """Return the agent of this process. Raises NotInitializedError."""
    if this is None:
        raise NotInitializedError("no RPC agent: call init_rpc() first")
    return this
