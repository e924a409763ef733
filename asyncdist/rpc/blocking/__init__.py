"""Remote calls with torch's names, for blocking programs: ``import asyncdist.rpc.blocking as rpc``.

It replaces ``import torch.distributed.rpc as rpc``: `init_rpc`, `rpc_sync`, `rpc_async`, `remote`, `RRef`, `shutdown` and
what belongs to them. The calls run on the background loop. There is no distributed autograd: `asyncdist.rpc.RemoteModule`
trains modules of other processes.

A worker runs any function that another worker names, and reads its pickles, as torch's does. Only processes with the job's
token can call it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from asyncdist.base.background_loop import background_loop
from asyncdist.base.deadline import Timeout, seconds
from asyncdist.config import Config
from asyncdist.engine.work import call_in_thread
from asyncdist.errors import AlreadyInitializedError, NotInitializedError, UnsupportedError, UsageError
from asyncdist.rendezvous import RendezvousSession, meet
from asyncdist.rpc.references import RemoteReference
from asyncdist.rpc.remote import RemoteObject
from asyncdist.rpc.session import RpcSession
from asyncdist.rpc.workers import ASYNC_EXECUTION, FunctionRunner, Held, value_of

T = TypeVar("T")

_DEFAULT_TIMEOUT = 60.0
_UNSET = -1.0
"""torch's value of a timeout for "the default"."""
_WORKER = "worker"


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
        device_maps: Accepted and not needed: a tensor arrives on a device of the kind that it had.
        devices: Accepted and not needed.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = 16,
        rpc_timeout: float = _DEFAULT_TIMEOUT,
        init_method: str = "env://",
        device_maps: Mapping[str, Any] | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        self.num_worker_threads, self.rpc_timeout, self.init_method = num_worker_threads, rpc_timeout, init_method
        self.device_maps, self.devices = dict(device_maps or {}), list(devices or ())

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Accept torch's device map, which is not needed."""
        self.device_maps[to] = device_map


class RpcAgent:
    """The state of this process between `init_rpc` and `shutdown`."""

    def __init__(self, meeting: RendezvousSession, session: RpcSession, runner: FunctionRunner, timeout: float) -> None:
        self.meeting, self.session, self.runner = meeting, session, runner
        self.timeout = timeout
        self.infos: list[WorkerInfo] = []
        self.workers: list[RemoteObject] = []
        self.ports: dict[str, int] = {}
        """The rank of each worker by the id of its port."""

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

    def call(self, to: str | int | WorkerInfo, method: str, args: Sequence[Any], timeout: float) -> asyncio.Future[Any]:
        """Start a call of a worker's `FunctionRunner`, on its loop."""
        limit = self.timeout if timeout == _UNSET else timeout
        return self.workers[self.info(to).id].call(method, args, timeout=limit or float("inf"))


_agent: RpcAgent | None = None
_lock = threading.Lock()


def _current() -> RpcAgent:
    if _agent is None:
        raise NotInitializedError("no RPC agent: call init_rpc() first")
    return _agent


def is_available() -> bool:
    """Return True: remote calls need nothing that may be missing."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: TensorPipeRpcBackendOptions | Any = None,
) -> None:
    """Meet the other workers, and begin to run functions for them. Every worker calls it.

    Args:
        name: The name of this worker, which no other has.
        backend: Accepted and ignored.
        rank: The rank of this worker; by default the launcher's.
        world_size: The number of workers; by default the launcher's.
        rpc_backend_options: `TensorPipeRpcBackendOptions`, of this module or of torch.

    Raises:
        AlreadyInitializedError: There is an agent.
        UsageError: Two workers have one name.
        RendezvousTimeoutError: Not every worker came in time.
    """
    options = rpc_backend_options or TensorPipeRpcBackendOptions()
    with _lock:
        if _agent is not None:
            raise AlreadyInitializedError("the RPC agent exists: call shutdown() first")
        background_loop().run(_open(name, rank, world_size, options))


async def _open(name: str, rank: int, world_size: int | None, options: Any) -> None:
    global _agent
    config = Config.from_environment()
    meeting = await meet(options.init_method, rank=rank, world_size=world_size, name="rpc", config=config)
    try:
        names = [json.loads(each) for each in await meeting.exchange(json.dumps(name).encode())]
        if len(set(names)) < len(names):
            raise UsageError(f"the workers need different names, and have {', '.join(names)}")
        runner = FunctionRunner(int(options.num_worker_threads), _arrived, _ready)
        own = config.with_(token=meeting.token or config.token, allow_pickle=True)
        session = RpcSession({_WORKER: runner}, meeting.store, rank=meeting.rank, config=own)
        await session.__aenter__()
        try:
            agent = RpcAgent(meeting, session, runner, float(options.rpc_timeout))
            agent.infos = [WorkerInfo(each, number) for number, each in enumerate(names)]
            agent.workers = list(await session.find_all(_WORKER, count=meeting.world_size))
            agent.ports = {worker.owner_id: number for number, worker in enumerate(agent.workers)}
            # Functions that others call need the agent. Nobody calls a worker that has not found the others.
            _agent = agent
            await meeting.exchange(b"")
        except BaseException:
            _agent = None
            await session.__aexit__()
            raise
    except BaseException:
        await meeting.close()
        raise


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End the agent of this process.

    Args:
        graceful: Wait until all workers call this, and have run the functions that were called; else end at once, which
            fails the calls of others to this worker.
        timeout: Seconds to wait; 0 for no limit.
    """
    with _lock:
        if _agent is not None:
            background_loop().run(_close(_agent, graceful, timeout or None))


async def _close(agent: RpcAgent, graceful: bool, timeout: Timeout) -> None:
    global _agent
    try:
        if graceful:
            limit = seconds(timeout)
            # A function that still runs may call others.
            while agent.runner.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await agent.meeting.store.barrier("shutdown", agent.meeting.world_size, limit)
    finally:
        _agent = None
        await agent.session.__aexit__()
        agent.runner.pool.shutdown(wait=False)
        await agent.meeting.close()


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return a worker by its name; None for this worker."""
    agent = _current()
    return agent.infos[agent.meeting.rank] if worker_name is None else agent.info(worker_name)


# -- calls ------------------------------------------------------------------------------------------


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = _UNSET,
) -> Any:
    """Run a function on a worker, and return its result.

    Args:
        to: The worker.
        func: A function that the worker can import, by its module and name.
        args: Its arguments.
        kwargs: Its keyword arguments.
        timeout: Seconds; 0 for no limit, -1 for that of `init_rpc`.

    Raises:
        CallError: See `asyncdist.rpc.RemoteObject`.
    """
    return _run(to, "run", [func, list(args or ()), dict(kwargs or {})], timeout)


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = _UNSET,
) -> torch.futures.Future[Any]:
    """Run a function on a worker, and return a future of its result. The arguments are those of `rpc_sync`."""
    return _start(to, "run", [func, list(args or ()), dict(kwargs or {})], timeout)


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = _UNSET,
) -> RRef[Any]:
    """Run a function, or make an object, on a worker, and return a reference to the result, which stays there."""
    return _remote(_current().info(to), "create", [func, list(args or ()), dict(kwargs or {})], timeout)


def _run(to: str | int | WorkerInfo, method: str, args: list[Any], timeout: float) -> Any:
    agent = _current()

    async def call() -> Any:
        return await agent.call(to, method, await _ready(args), timeout)

    return _arrived(background_loop().run(call()))


def _start(to: str | int | WorkerInfo, method: str, args: list[Any], timeout: float) -> torch.futures.Future[Any]:
    agent = _current()
    agent.info(to)
    future: RpcFuture = RpcFuture()

    async def call() -> None:
        try:
            result = _arrived(await agent.call(to, method, await _ready(args), timeout))
        except Exception as error:
            future.complete(None, error)
        else:
            future.complete(result, None)

    background_loop().submit(call())
    return future


def _remote(info: WorkerInfo, method: str, args: list[Any], timeout: float) -> RRef[Any]:
    agent = _current()

    async def create() -> RemoteReference:
        made = await agent.call(info, method, await _ready(args), timeout)
        assert isinstance(made, RemoteReference)
        return made

    return RRef._of(info, background_loop().submit(create()))


async def _ready(part: Any) -> Any:
    """Replace each `RRef` inside lists, tuples and dictionaries by its reference, once its object exists."""
    if isinstance(part, RRef):
        return await asyncio.wrap_future(part._reference)
    if type(part) in (list, tuple):
        return type(part)([await _ready(each) for each in part])
    if type(part) is dict:
        return {key: await _ready(each) for key, each in part.items()}
    return part


def _arrived(part: Any) -> Any:
    """Replace each reference inside lists, tuples and dictionaries by an `RRef`."""
    if isinstance(part, RemoteReference):
        made: concurrent.futures.Future[RemoteReference] = concurrent.futures.Future()
        made.set_result(part)
        return RRef._of(_current().owner_of(part), made)
    if type(part) in (list, tuple):
        return type(part)([_arrived(each) for each in part])
    if type(part) is dict:
        return {key: _arrived(each) for key, each in part.items()}
    return part


class RpcFuture(torch.futures.Future[Any]):
    """torch's future of a call. Callbacks of the program run in a thread in which they may block."""

    def complete(self, result: Any, error: Exception | None) -> None:
        """Complete the future with a result or an error."""

        def complete() -> None:
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(result)

        call_in_thread(complete)


# -- references -------------------------------------------------------------------------------------


class RRef(Generic[T]):
    """A reference to an object of a worker, which keeps the object alive there.

    `remote` makes it, and ``RRef(value)`` refers to an object of this process. It may be an argument or a result of a
    function, also inside lists, tuples and dictionaries. Attributes and methods are torch's.

    Args:
        value: An object of this process.
        type_hint: Accepted and ignored.
    """

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = _current()
        self._info = agent.infos[agent.meeting.rank]
        self._reference: concurrent.futures.Future[RemoteReference] = concurrent.futures.Future()
        self._reference.set_result(agent.session.refer(Held(value)))

    @classmethod
    def _of(cls, info: WorkerInfo, reference: concurrent.futures.Future[RemoteReference]) -> RRef[Any]:
        made: RRef[Any] = cls.__new__(cls)
        made._info, made._reference = info, reference
        return made

    def owner(self) -> WorkerInfo:
        """Return the worker that has the object."""
        return self._info

    def owner_name(self) -> str:
        """Return the name of the worker that has the object."""
        return self._info.name

    def is_owner(self) -> bool:
        """Return whether this process has the object."""
        return self._info == get_worker_info()

    def confirmed_by_owner(self) -> bool:
        """Return whether the object exists."""
        return self._reference.done() and self._reference.exception() is None

    def local_value(self) -> T:
        """Return the object itself; block until it exists. Raises UsageError in a process that does not have it."""
        value: T = value_of(self._reference.result())
        return value

    def to_here(self, timeout: float = _UNSET) -> T:
        """Copy the object to this process; block until it exists and has arrived."""
        if self.is_owner():
            return self.local_value()
        value: T = _run(self._info, "get", [self], timeout)
        return value

    def rpc_sync(self, timeout: float = _UNSET) -> Any:
        """Return a proxy whose methods run on the object and block: ``rref.rpc_sync().size()``."""
        return RRefProxy(lambda name, args, kwargs: _run(self._info, "run_method", [self, name, args, kwargs], timeout))

    def rpc_async(self, timeout: float = _UNSET) -> Any:
        """Return a proxy whose methods run on the object and return futures."""
        return RRefProxy(
            lambda name, args, kwargs: _start(self._info, "run_method", [self, name, args, kwargs], timeout)
        )

    def remote(self, timeout: float = _UNSET) -> Any:
        """Return a proxy whose methods run on the object and return references to their results."""
        return RRefProxy(
            lambda name, args, kwargs: _remote(self._info, "create_by_method", [self, name, args, kwargs], timeout)
        )

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Raise UnsupportedError: there is no distributed autograd."""
        raise UnsupportedError("there is no distributed autograd: train with asyncdist.rpc.RemoteModule")

    def __reduce__(self) -> Any:
        raise UsageError("an RRef inside another object cannot be sent: pass it as an argument, or in a list or dict")

    def __repr__(self) -> str:
        return f"<RRef at {self._info.name}{'' if self.confirmed_by_owner() else ', not confirmed'}>"


class RRefProxy:
    """Calls the methods of a referred object; made by `RRef.rpc_sync`, `RRef.rpc_async` and `RRef.remote`."""

    def __init__(self, call: Callable[[str, list[Any], dict[str, Any]], Any]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(name, list(args), kwargs)


class functions:  # noqa: N801 - torch's name of a module
    """Decorators for functions that workers run: torch's module ``torch.distributed.rpc.functions``."""

    @staticmethod
    def async_execution(function: Callable[..., Any]) -> Callable[..., Any]:
        """Mark a function that returns a future. The call ends with its result, and holds no thread until then."""

        @functools.wraps(function)
        def returns_a_future(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        setattr(returns_a_future, ASYNC_EXECUTION, function)
        return returns_a_future


class BackendType:
    """torch's names of back ends, which `init_rpc` ignores."""

    TENSORPIPE = "TENSORPIPE"
