"""Calls of functions on workers, from any thread: blocking, with torch's future, or for a reference to the result."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch

from asyncdist.base.background_loop import background_loop
from asyncdist.base.callables import AnyFunction
from asyncdist.errors import NotInitializedError
from asyncdist.kernel import call_in_thread
from asyncdist.rpc.blocking.agent import UNSET_TIMEOUT, WorkerInfo, current_agent
from asyncdist.rpc.blocking.stand_ins import arrived, ready
from asyncdist.rpc.references import RemoteReference

T = TypeVar("T")


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
    return run(to, "run", [func, list(args or ()), dict(kwargs or {})], timeout)


def rpc_async(
    to: str | int | WorkerInfo,
    func: AnyFunction,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Run a function on a worker, and return a future of its result. The arguments are those of `rpc_sync`."""
    return start(to, "run", [func, list(args or ()), dict(kwargs or {})], timeout)


def run(to: str | int | WorkerInfo, method: str, args: list[Any], timeout: float) -> Any:
    """Call a method of a worker's `FunctionRunner`, and return its result."""
    return background_loop().run(result_of(to, method, args, timeout))


def start(to: str | int | WorkerInfo, method: str, args: list[Any], timeout: float) -> torch.futures.Future[Any]:
    """Start a call of a method of a worker's `FunctionRunner`, and return a future of its result."""
    current_agent().info(to)
    return started(result_of(to, method, args, timeout))


def create(
    info: WorkerInfo, method: str, args: list[Any], timeout: float
) -> concurrent.futures.Future[RemoteReference]:
    """Start a call of a method of a worker's `FunctionRunner` that returns a reference, and return a future of that."""
    agent = current_agent()

    async def call() -> RemoteReference:
        made = await agent.call(info, method, await ready(args), timeout)
        assert isinstance(made, RemoteReference)
        return made

    return background_loop().submit(counted(call()))


async def result_of(to: str | int | WorkerInfo, method: str, args: list[Any], timeout: float) -> Any:
    """Call a method of a worker's `FunctionRunner`."""
    agent = current_agent()

    async def call() -> Any:
        return arrived(await agent.call(to, method, await ready(args), timeout))

    return await counted(call())


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
    """Run a coroutine on the background loop, and return torch's future of its result."""
    future = RpcFuture()

    async def complete() -> None:
        try:
            result = await call
        except Exception as error:
            future.complete(None, error)
        else:
            future.complete(result, None)

    background_loop().submit(complete())
    return future


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
