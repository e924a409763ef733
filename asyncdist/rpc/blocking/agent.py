"""The RPC agent: what a process has between `init_rpc` and `shutdown`, and the workers that it knows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from asyncdist.errors import NotInitializedError, UnsupportedError, UsageError
from asyncdist.rendezvous import RendezvousSession
from asyncdist.rpc.blocking.workers import FunctionRunner
from asyncdist.rpc.references import RemoteReference
from asyncdist.rpc.remote import RemoteObject
from asyncdist.rpc.session import RpcSession
from asyncdist.rpc.wire import pack_plain

DEFAULT_TIMEOUT = 60.0
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
        rpc_timeout: float = DEFAULT_TIMEOUT,
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


def check_device_maps(device_maps: Mapping[str, Mapping[Any, Any]]) -> None:
    """Raise UnsupportedError for a map to a device other than the first."""
    for name, device_map in device_maps.items():
        for source, target in device_map.items():
            # torch's options have made devices of numbers.
            if str(target) not in ("0", "cpu", "cuda:0") or (str(target) == "cpu") != (str(source) == "cpu"):
                raise UnsupportedError(
                    f"the device map of {name!r} sends tensors of device {source} to device {target}, and they arrive on "
                    "the current device of their kind: leave the map out, and call torch.cuda.set_device() in the "
                    "function, or tensor.to(device)"
                )


class RpcAgent:
    """The state of this process between `init_rpc` and `shutdown`."""

    def __init__(self, meeting: RendezvousSession, session: RpcSession, runner: FunctionRunner, timeout: float) -> None:
        self.meeting, self.session, self.runner = meeting, session, runner
        self.timeout = timeout
        self.infos: list[WorkerInfo] = []
        self.workers: list[RemoteObject] = []
        self.ports: dict[str, int] = {}
        """The rank of each worker by the id of its port."""
        self.num_open = 0
        """The calls of this process that have not ended."""
        self.ending: asyncio.Future[None] | None = None
        """The end of the agent, when it has begun."""

    @property
    def own_info(self) -> WorkerInfo:
        """This worker."""
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
        """Return the worker that has the object of a reference."""
        return self.infos[self.ports[reference.owner_id]]

    def limit(self, timeout: float) -> float:
        """Return the seconds of a call with torch's value of a timeout."""
        return (self.timeout if timeout == UNSET_TIMEOUT else timeout) or inf

    def call(self, to: str | int | WorkerInfo, method: str, args: Sequence[Any], timeout: float) -> asyncio.Future[Any]:
        """Start a call of a worker's `FunctionRunner`, on its loop. Errors name the worker and the function."""
        info = self.info(to)
        worker = self.workers[info.id]
        key = worker._key + pack_plain(method)
        return worker._caller.start(info.name, key, _shown(args), args, {}, self.limit(timeout))

    def watch(self, rank: int) -> asyncio.Future[Any]:
        """Return a future that ends when a worker has ended."""
        watch = self.workers[rank].call("until_lost", timeout=inf)
        # Nobody asks a watch that ends late.
        watch.add_done_callback(lambda done: done.cancelled() or done.exception())
        return watch


def _shown(args: Sequence[Any]) -> str:
    """Return the name of the function that a call of a `FunctionRunner` runs."""
    # The methods of a referred object have its reference first.
    function = args[1] if len(args) == 4 and isinstance(args[1], str) else args[0] if len(args) > 1 else "to_here"
    return function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__qualname__)


_agent: RpcAgent | None = None


def current_agent() -> RpcAgent:
    """Return the agent of this process. Raises NotInitializedError."""
    if _agent is None:
        raise NotInitializedError("no RPC agent: call init_rpc() first")
    return _agent


def set_agent(agent: RpcAgent | None) -> None:
    """Make an agent that of this process."""
    global _agent
    _agent = agent


def has_agent() -> bool:
    """Return whether this process has an agent."""
    return _agent is not None
