"""The workers of torch's RPC names: processes that run any function of the program for each other.

Each worker serves a `FunctionRunner`. Functions run in threads, several at a time. Unlike the objects of
`asyncdist.rpc.serve`, which have the methods that they have, a worker runs whatever function a process with the job's token
names. So it also reads pickles of these processes.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from asyncdist.base.callables import AnyFunction
from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.kernel import torch_private
from asyncdist.rpc.blocking.calls import Held, arrived, counted, ready, value_of
from asyncdist.rpc.errors import RaisedByFunction
from asyncdist.rpc.references import RemoteReference
from asyncdist.rpc.session import current_session
from asyncdist.rpc.training import ServedModule

ASYNC_EXECUTION = "_wrapped_async_rpc_function"
"""The attribute of functions that return a future of their result; torch's own decorator sets it too."""


class FunctionRunner:
    """Runs functions for other workers.

    Args:
        threads: The most functions that run at a time.
    """

    def __init__(self, threads: int) -> None:
        self.threads = DaemonThreadPool("asyncdist-rpc-worker", threads, idle_timeout=5.0)

    async def run(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], of: RemoteReference | None = None
    ) -> Any:
        """Run a function, or the method of this name ``of`` a referred object, in a thread, and return its result."""
        return await ready(await self._call(function, args, kwargs, of))

    async def create(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], of: RemoteReference | None = None
    ) -> RemoteReference:
        """Do the same as `run`, and return a reference to the result."""
        return current_session().refer(Held(await self._call(function, args, kwargs, of)))

    async def _call(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], of: RemoteReference | None = None
    ) -> Any:
        function = function if of is None else getattr(value_of(of), function)
        return await counted(self._run(function, arrived(list(args)), arrived(dict(kwargs))))

    async def _run(self, function: AnyFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self.threads, _run, lambda: function(*args, **kwargs))
        return await _result_of(result) if hasattr(function, ASYNC_EXECUTION) else result

    async def serve_module(
        self, module: AnyFunction, args: Sequence[Any], kwargs: Mapping[str, Any], device: str
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
        return await ready(value_of(reference))


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


def _run(function: AnyFunction) -> Any:
    """Call a function; an exception comes back as the one that carries it."""
    try:
        return function()
    except BaseException as error:
        raise RaisedByFunction(error) from error
