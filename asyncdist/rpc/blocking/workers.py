"""The workers of torch's RPC names: processes that run any function of the program for each other.

Each worker serves a `FunctionRunner`. Functions run in threads, several at a time. Unlike the objects of
`asyncdist.rpc.serve`, which have the methods that they have, a worker runs whatever function a process with the job's token
names. So it also reads pickles of these processes.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from torch import nn

from asyncdist.base.callables import AnyFunction
from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.kernel import torch_private
from asyncdist.rpc.failures import RaisedByFunction
from asyncdist.rpc.references import RemoteReference
from asyncdist.rpc.session import current_session
from asyncdist.rpc.training import ServedModule

ASYNC_EXECUTION = "_wrapped_async_rpc_function"
"""The attribute of functions that return a future of their result; torch's own decorator sets it too."""


class FunctionRunner:
    """Runs functions for other workers.

    Args:
        threads: The most functions that run at a time.
        arrived: Called with each argument, which it may replace.
        leaving: Called with each result, which it may replace.
    """

    def __init__(self, threads: int, arrived: Callable[[Any], Any], leaving: Callable[[Any], Awaitable[Any]]) -> None:
        self._arrived, self._leaving = arrived, leaving
        self.pool = DaemonThreadPool("asyncdist-rpc-worker", threads, idle_timeout=5.0)
        self.num_running = 0

    async def run(self, function: AnyFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function in a thread, and return its result."""
        return await self._leaving(await self._call(function, args, kwargs))

    async def _call(self, function: AnyFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = self._arrived(list(args)), self._arrived(dict(kwargs))
        self.num_running += 1
        try:
            result = await asyncio.get_running_loop().run_in_executor(
                self.pool, _run, lambda: function(*args, **kwargs)
            )
            return await _result_of(result) if hasattr(function, ASYNC_EXECUTION) else result
        finally:
            self.num_running -= 1

    async def create(self, function: AnyFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RemoteReference:
        """Run a function in a thread, and return a reference to its result."""
        return current_session().refer(Held(await self._call(function, args, kwargs)))

    async def run_method(
        self, reference: RemoteReference, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a method of a referred object in a thread, and return its result."""
        return await self.run(getattr(value_of(reference), method), args, kwargs)

    async def create_by_method(
        self, reference: RemoteReference, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> RemoteReference:
        """Run a method of a referred object in a thread, and return a reference to its result."""
        return await self.create(getattr(value_of(reference), method), args, kwargs)

    async def serve_module(
        self, module: Callable[..., nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any], device: str
    ) -> RemoteReference:
        """Make a module in a thread, and return a reference to it by which others train it."""

        def make(*args: Any, **kwargs: Any) -> ServedModule:
            return ServedModule(module(*args, **kwargs).to(device))

        return current_session().refer(await self._call(make, args, kwargs))

    async def until_lost(self) -> None:
        """Wait until the caller cancels the call, or this process ends."""
        await asyncio.Event().wait()

    async def get(self, reference: RemoteReference) -> Any:
        """Return the object itself."""
        return await self._leaving(value_of(reference))


class Held:
    """An object that workers refer to. It keeps equal small objects, such as numbers, apart."""

    def __init__(self, value: Any) -> None:
        self.value = value


def value_of(reference: RemoteReference) -> Any:
    """Return the object of a reference of this process."""
    held = reference.local_value()
    return held.value if isinstance(held, Held) else held


async def _result_of(future: Any) -> Any:
    """Await the future that a function with ASYNC_EXECUTION has returned."""
    if inspect.isawaitable(future):
        return await future
    # then() and collect_all() return the class of C++ on which torch's is based.
    if not isinstance(future, torch_private.AnyFuture):
        raise TypeError(f"a function with @async_execution returns a torch.futures.Future, not {type(future).__name__}")
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not done.done():
            done.set_result(None)

    def completed(_: object) -> None:
        loop.call_soon_threadsafe(resolve)

    future.add_done_callback(completed)
    await done
    return _run(future.value)


def _run(function: Callable[[], Any]) -> Any:
    """Call a function; an exception comes back as the one that carries it."""
    try:
        return function()
    except BaseException as error:
        raise RaisedByFunction(error) from error
