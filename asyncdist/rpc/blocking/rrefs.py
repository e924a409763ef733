"""References to objects of workers, with torch's names."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from asyncdist.base.callables import AnyFunction
from asyncdist.errors import UnsupportedError
from asyncdist.rpc.blocking.agent import UNSET_TIMEOUT, WorkerInfo, current_agent
from asyncdist.rpc.blocking.calls import create, run, start
from asyncdist.rpc.blocking.stand_ins import Referring
from asyncdist.rpc.blocking.workers import Held, value_of

T = TypeVar("T")


def remote(
    to: str | int | WorkerInfo,
    func: AnyFunction,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[Any]:
    """Run a function, or make an object, on a worker, and return a reference to the result, which stays there."""
    info = current_agent().info(to)
    return RRef.standing_for(info, create(info, "create", [func, list(args or ()), dict(kwargs or {})], timeout))


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
        self._info = agent.own_info
        self._reference = concurrent.futures.Future()
        self._reference.set_result(agent.session.refer(Held(value)))

    def owner(self) -> WorkerInfo:
        """Return the worker that has the object."""
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
        value: T = run(self._info, "get", [self], timeout)
        return value

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the object and block: ``rref.rpc_sync().size()``."""
        return RRefProxy(lambda name, args, kwargs: run(self._info, "run_method", [self, name, args, kwargs], timeout))

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the object and return futures."""
        return RRefProxy(
            lambda name, args, kwargs: start(self._info, "run_method", [self, name, args, kwargs], timeout)
        )

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """Return a proxy whose methods run on the object and return references to their results."""
        return RRefProxy(
            lambda name, args, kwargs: RRef.standing_for(
                self._info, create(self._info, "create_by_method", [self, name, args, kwargs], timeout)
            )
        )

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Raise UnsupportedError: there is no distributed autograd."""
        raise UnsupportedError(
            "there is no distributed autograd: make the module with RemoteModule(worker, class), and call loss.backward()"
        )

    def __repr__(self) -> str:
        return f"<RRef at {self._info.name}{'' if self.confirmed_by_owner() else ', not confirmed'}>"


class RRefProxy:
    """Calls the methods of a referred object; made by `RRef.rpc_sync`, `RRef.rpc_async` and `RRef.remote`."""

    def __init__(self, call: Callable[[str, list[Any], dict[str, Any]], Any]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> AnyFunction:
        return lambda *args, **kwargs: self._call(name, list(args), kwargs)
