"""Remote calls that are awaited: objects that processes of a job serve, and that others find by name.

    async with rpc.serve({"policy": Policy()}, job="asyncdist://host:29500/job"):
        await stopped.wait()

    async with rpc.connect("asyncdist://host:29500/job"):
        policy = await rpc.find("policy")                            # waits until a process serves it
        action = await policy.act(observation, timeout=0.5)          # the deadline travels, and so does a cancellation
        async for part in policy.rollout(64):                        # a stream, with back-pressure
            ...
        actions = await (await rpc.find_all("policy")).act(observation)    # a result for each, or rpc.PartialError

See docs/rpc.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncdist.base.deadline import Timeout
from asyncdist.config import Config
from asyncdist.rpc.calls import CallStream, RemoteCall
from asyncdist.rpc.errors import (
    CalleeLostError,
    CallError,
    CallRefusedError,
    CallTimeoutError,
    NameNotFoundError,
    OverloadedError,
    PartialError,
    RemoteError,
    ResultError,
)
from asyncdist.rpc.references import RemoteReference
from asyncdist.rpc.remote import RemoteObject, RemoteObjects
from asyncdist.rpc.session import RpcSession, current_session
from asyncdist.rpc.training import RemoteModule, RemoteOptimizer, ServedModule, backward
from asyncdist.store import AsyncStoreBase

__all__ = [
    "CallError", "CallRefusedError", "CallStream", "CallTimeoutError", "CalleeLostError", "NameNotFoundError",
    "OverloadedError", "PartialError", "RemoteCall", "RemoteError", "RemoteModule", "RemoteObject", "RemoteObjects",
    "RemoteOptimizer", "RemoteReference", "ResultError", "RpcSession", "ServedModule", "backward", "connect", "find",
    "find_all", "refer", "serve",
]  # fmt: skip


def serve(
    objects: Mapping[str, Any],
    job: str | AsyncStoreBase,
    *,
    rank: int | None = None,
    threads: int = 16,
    max_calls: int = 16384,
    references: bool = True,
    timeout: Timeout = None,
    config: Config | None = None,
) -> RpcSession:
    """Serve objects to the processes of a job, inside an ``async with`` statement. The session can also make calls.

    ``async def`` methods run on the loop, ordinary ones in threads, and async generators are streams. Calls of one caller
    to one object begin in the order in which they were made; an ordinary method ends before the next one begins.

    All methods of an object can be called, those of its base classes too, unless their names begin with an underscore.

    Args:
        objects: The object for each name; a list of several that share a name. Any number of processes may serve a name.
        job: ``asyncdist://host:port/job`` of a store daemon, or a store that the processes of the job share.
        rank: The rank of this process, by which `find` can choose it; by default the launcher's, if there is one.
        threads: The most ordinary methods that run at a time.
        max_calls: The most calls of all callers that are open at a time. Further ones fail with OverloadedError.
        references: Whether callers may refer to tensors that are attributes of the objects, to read and write them, as in
            ``await policy.weights.ref()``. What methods return with `refer` can be used in either case.
        timeout: Seconds to reach the store, and of calls and look-ups without a timeout; None for ASYNCDIST_TIMEOUT.
        config: Settings; by default those of the environment.

    Returns:
        The session. Entering it may raise AuthenticationError, StoreConnectionError and AddressError.

    Example:
        >>> async with rpc.serve({"policy": Policy()}, job="asyncdist://host:29500/job"):
        ...     await stopped.wait()
    """
    return RpcSession(
        objects,
        job,
        rank=rank,
        threads=threads,
        max_calls=max_calls,
        references=references,
        timeout=timeout,
        config=config,
    )


def connect(job: str | AsyncStoreBase, *, timeout: Timeout = None, config: Config | None = None) -> RpcSession:
    """Call objects of the processes of a job, and serve none; the arguments are those of `serve`.

    Example:
        >>> async with rpc.connect("asyncdist://host:29500/job"):
        ...     policy = await rpc.find("policy")
    """
    return RpcSession({}, job, timeout=timeout, config=config)


def refer(target: Any) -> RemoteReference:
    """Return a reference to an object of this process, which methods return and arguments contain instead of the object.

    The object is kept as long as a process holds a reference to it.
    """
    return current_session().refer(target)


async def find(name: str, *, rank: int | None = None, timeout: Timeout = None) -> RemoteObject:
    """Return an object that a process of the job serves under a name; see `RpcSession.find`."""
    return await current_session().find(name, rank=rank, timeout=timeout)


async def find_all(name: str, *, count: int = 1, timeout: Timeout = None) -> RemoteObjects:
    """Return all objects that processes of the job serve under a name; see `RpcSession.find_all`."""
    return await current_session().find_all(name, count=count, timeout=timeout)
