"""Calls of functions on workers, from any thread: blocking, with torch's future, or for a reference to the result.

References travel in place of an `RRef` or a `RemoteModule`. The receiver makes such an object of them again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import torch

from asyncdist.base.background_loop import background_loop
from asyncdist.base.callables import AnyFunction
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.errors import NotInitializedError, UnsupportedError
from asyncdist.kernel import call_in_thread
from asyncdist.rpc.blocking.agent import UNSET_TIMEOUT, WorkerInfo, current_agent
from asyncdist.rpc.references import RemoteReference
from asyncdist.rpc.wire import pack_plain

T = TypeVar("T")
Referred = concurrent.futures.Future[RemoteReference]
"""A reference that may still be on its way."""


def rpc_sync(
    to: str | int | WorkerInfo,
    func: AnyFunction,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
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
    return run(to, [func, list(args or ()), dict(kwargs or {})], timeout)


def rpc_async(
    to: str | int | WorkerInfo,
    func: AnyFunction,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Run a function on a worker, and return a future of its result. The arguments are those of `rpc_sync`."""
    return start(to, [func, list(args or ()), dict(kwargs or {})], timeout)


def remote(
    to: str | int | WorkerInfo,
    func: AnyFunction,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[Any]:
    """Run a function, or make an object, on a worker, and return a reference to the result, which stays there."""
    return refer(to, [func, list(args or ()), dict(kwargs or {})], timeout)


# -- calls of the methods of a worker's `FunctionRunner` ----------------------------------------------


def run(to: str | int | WorkerInfo, args: list[Any], timeout: float, method: str = "run") -> Any:
    """Run a function, and return its result."""
    return background_loop().run(_result_of(to, method, args, timeout))


def start(to: str | int | WorkerInfo, args: list[Any], timeout: float) -> torch.futures.Future[Any]:
    """Start a function, and return a future of its result."""
    current_agent().info(to)
    return started(_result_of(to, "run", args, timeout))


def refer(to: str | int | WorkerInfo, args: list[Any], timeout: float) -> RRef[Any]:
    """Start a function, and return an `RRef` for its result."""
    info = current_agent().info(to)
    return RRef.standing_for(info, background_loop().submit(call(info, "create", args, timeout)))


async def _result_of(to: str | int | WorkerInfo, method: str, args: list[Any], timeout: float) -> Any:
    return arrived(await call(to, method, args, timeout))


async def call(to: str | int | WorkerInfo, method: str, args: list[Any], timeout: float) -> Any:
    """Make a call, and return its result without replacing references. Errors name the worker and the function."""
    agent = current_agent()

    async def make() -> Any:
        sent = await ready(args)
        info = agent.info(to)
        worker = agent.workers[info.id]
        key = worker._key + pack_plain(method)
        return await worker._caller.start(info.name, key, _shown(sent), sent, {}, agent.limit(timeout))

    return await counted(make())


def _shown(args: Sequence[Any]) -> str:
    """Return the name of the function that a call of a `FunctionRunner` runs."""
    function = "to_here" if isinstance(args[0], RemoteReference) else args[0]
    return function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__qualname__)


async def counted(call: Coroutine[Any, Any, T]) -> T:
    """Await a call for which `shutdown` waits."""
    try:
        agent = current_agent()
    except NotInitializedError:
        call.close()
        raise
    agent.num_open += 1
    try:
        return await call
    finally:
        agent.num_open -= 1


def started(call: Coroutine[Any, Any, Any]) -> torch.futures.Future[Any]:
    """Run a coroutine on the background loop, and return torch's future of its result.

    Callbacks of the program run in a thread in which they may block.
    """
    future: torch.futures.Future[Any] = torch.futures.Future()

    async def complete() -> None:
        try:
            result = await call
        except Exception as error:
            failure = error
            call_in_thread(lambda: future.set_exception(failure))
        else:
            call_in_thread(lambda: future.set_result(result))

    background_loop().submit(complete())
    return future


# -- references ---------------------------------------------------------------------------------------

_classes: dict[str, type[Referring]] = {}


class Referring(ProcessBound):
    """An object of this process that stands for an object of a worker, by a reference that may still be on its way.

    A derived class names the ``kind`` of the references that it stands for; without one it stands for all others.
    """

    _elsewhere = "pass it to a function of a worker as an argument, or in a list or dict, and not inside another object"

    _info: WorkerInfo
    _reference: Referred

    def __init_subclass__(cls, kind: str = "", **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        _classes[kind] = cls

    @classmethod
    def standing_for(cls, info: WorkerInfo, reference: Referred) -> Self:
        """Make an object that stands for a reference."""
        made = cls.__new__(cls)
        made._info, made._reference = info, reference
        return made


async def ready(part: Any) -> Any:
    """Replace each `Referring` inside lists, tuples and dictionaries by its reference, once its object exists."""
    if isinstance(part, Referring):
        return await asyncio.wrap_future(part._reference)
    if type(part) in (list, tuple):
        return type(part)([await ready(each) for each in part])
    if type(part) is dict:
        return {key: await ready(each) for key, each in part.items()}
    return part


def arrived(part: Any) -> Any:
    """Replace each reference inside lists, tuples and dictionaries by a `Referring`."""
    if isinstance(part, RemoteReference):
        return _classes.get(part.kind, _classes[""]).standing_for(current_agent().owner_of(part), _done(part))
    if type(part) in (list, tuple):
        return type(part)([arrived(each) for each in part])
    if type(part) is dict:
        return {key: arrived(each) for key, each in part.items()}
    return part


def _done(reference: RemoteReference) -> Referred:
    done: Referred = concurrent.futures.Future()
    done.set_result(reference)
    return done


class Held:
    """An object that workers refer to. It keeps equal small objects, such as numbers, apart."""

    def __init__(self, value: Any) -> None:
        self.value = value


def value_of(reference: RemoteReference) -> Any:
    """Return the object of a reference of this process."""
    held = reference.local_value()
    return held.value if isinstance(held, Held) else held


class RRef(Referring, Generic[T]):
    """A reference to an object of a worker, which keeps the object alive there.

    `remote` makes it, and ``RRef(value)`` refers to an object of this process. It may be an argument or a result of a
    function, also inside lists, tuples and dictionaries. Attributes and methods are torch's.

    Args:
        value: An object of this process.
        type_hint: Accepted and ignored.
    """

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = current_agent()
        self._info, self._reference = agent.own_info, _done(agent.session.refer(Held(value)))

    def owner(self) -> WorkerInfo:
        return self._info

    def owner_name(self) -> str:
        """Return the name of the worker that has the object."""
        return self._info.name

    def is_owner(self) -> bool:
        """Return whether this process has the object."""
        return self._info == current_agent().own_info

    def confirmed_by_owner(self) -> bool:
        """Return whether the object exists."""
        return self._reference.done() and self._reference.exception() is None

    def local_value(self) -> T:
        """Return the object itself; block until it exists. Raises UsageError in a process that does not have it."""
        value: T = value_of(self._reference.result())
        return value

    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """Copy the object to this process; block until it exists and has arrived."""
        if self.is_owner():
            return self.local_value()
        value: T = run(self._info, [self], timeout, "get")
        return value

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the object and block: ``rref.rpc_sync().size()``."""
        return RRefProxy(self, run, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the object and return futures."""
        return RRefProxy(self, start, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the object and return references to their results."""
        return RRefProxy(self, refer, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Raise UnsupportedError: there is no distributed autograd."""
        raise UnsupportedError(
            "there is no distributed autograd: make the module with RemoteModule(worker, class), and call loss.backward()"
        )

    def __repr__(self) -> str:
        return f"<RRef at {self._info.name}{'' if self.confirmed_by_owner() else ', not confirmed'}>"


class RRefProxy:
    """Calls the methods of a referred object by `run`, `start` or `refer`."""

    def __init__(self, rref: RRef[Any], how: AnyFunction, timeout: float) -> None:
        self._rref, self._how, self._timeout = rref, how, timeout

    def __getattr__(self, name: str) -> AnyFunction:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._how(self._rref._info, [name, [*args], kwargs, self._rref], self._timeout)

        return call
