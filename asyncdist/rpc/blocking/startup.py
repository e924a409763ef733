"""Begin and end: `init_rpc`, `shutdown` and `get_worker_info`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Mapping
from math import inf
from typing import Any

from asyncdist.base import lifecycle
from asyncdist.base.background_loop import background_loop
from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.config import Config
from asyncdist.errors import (
    AlreadyInitializedError,
    PeerLostError,
    StoreConnectionError,
    StoreTimeoutError,
    UnsupportedError,
    UsageError,
)
from asyncdist.rendezvous import meet
from asyncdist.rpc.blocking import agent as agents
from asyncdist.rpc.blocking.agent import RpcAgent, TensorPipeRpcBackendOptions, WorkerInfo, current_agent
from asyncdist.rpc.blocking.workers import FunctionRunner
from asyncdist.rpc.session import RpcSession

_WORKER = "worker"
_lock = threading.Lock()
lifecycle.renew_in_children(globals(), "_lock", threading.Lock)


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
        UnsupportedError: A device map names a device other than the first.
        RendezvousTimeoutError: Not every worker came in time.
    """
    options = rpc_backend_options or TensorPipeRpcBackendOptions()
    _check_device_maps(options.device_maps)
    if not _lock.acquire(blocking=False):
        raise AlreadyInitializedError("another call of init_rpc() in this process waits for the other workers")
    try:
        if agents.this is not None:
            raise AlreadyInitializedError("the RPC agent exists: call shutdown() first")
        background_loop().run(_open(name, rank, world_size, options))
    finally:
        _lock.release()


def _check_device_maps(device_maps: Mapping[str, Mapping[Any, Any]]) -> None:
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


async def _open(name: str, rank: int, world_size: int | None, options: Any) -> None:
    config = Config.from_environment()
    async with contextlib.AsyncExitStack() as stack:
        meeting = await meet(options.init_method, rank=rank, world_size=world_size, name="rpc", config=config)
        stack.push_async_callback(meeting.close)
        names = [json.loads(each) for each in await meeting.exchange(json.dumps(name).encode())]
        if len(set(names)) < len(names):
            raise UsageError(f"the workers need different names, and have {', '.join(names)}")
        runner = FunctionRunner(int(options.num_worker_threads))
        own = config.with_(token=meeting.token or config.token, allow_pickle=True)
        session = await stack.enter_async_context(
            RpcSession({_WORKER: runner}, meeting.store, rank=meeting.rank, config=own)
        )
        infos = [WorkerInfo(each, number) for number, each in enumerate(names)]
        workers = await session.find_all(_WORKER, count=meeting.world_size)
        # Functions that others call need the agent. Nobody calls a worker that has not found the others.
        stack.callback(setattr, agents, "this", None)
        agents.this = RpcAgent(meeting, session, runner.threads, float(options.rpc_timeout), infos, workers)
        await meeting.exchange(b"")
        stack.pop_all()


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End the agent of this process. A call that is not graceful ends one that waits, in another thread.

    Args:
        graceful: Wait until all workers call this, and all calls have ended; else end at once, which fails the calls of
            others to this worker.
        timeout: Seconds to wait; 0 for no limit.

    Raises:
        PeerLostError: A worker ended, or died, without calling this. The agent of this process has ended.
        StoreTimeoutError: The timeout passed. The agent of this process has ended.
    """
    if agents.this is not None:
        background_loop().run(_close(graceful, timeout or None))


async def _close(graceful: bool, timeout: Timeout) -> None:
    # Agents come and go on this loop.
    if agents.this is None:
        return
    agent = current_agent()
    try:
        if graceful:
            deadline = Deadline.after(seconds(timeout, inf))
            # Until all are idle, functions of others may make this worker run some, and call.
            for stage in ("idle", "done"):
                await _until_all(agent, stage, deadline)
    except Exception:
        # The end of the agent by another thread ends what this one waits for.
        if agent.ending is None:
            raise
    finally:
        agent.ending = agent.ending or asyncio.ensure_future(_end(agent))
        await asyncio.shield(agent.ending)


async def _end(agent: RpcAgent) -> None:
    try:
        await agent.session.__aexit__()
        agent.threads.shutdown(wait=False)
        await agent.meeting.close()
    finally:
        agents.this = None


async def _until_all(agent: RpcAgent, stage: str, deadline: Deadline) -> None:
    """Wait until all workers have come to a stage of the shutdown, and all calls of this one have ended."""
    store, own = agent.meeting.store, agent.own_info.id
    keys = [f"{stage}/{info.id}" for info in agent.infos]
    watches: dict[asyncio.Future[Any], int] = {}
    complete: asyncio.Future[None] | None = None
    try:
        async with asyncio.timeout(deadline.remaining_or_none()):
            while agent.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await store.set(keys[own], b"1")
            complete = store.wait(keys, timeout=inf)
            watches = {agent.watch(rank): rank for rank in range(len(keys)) if rank != own}
            while not complete.done():
                ended, _ = await asyncio.wait([complete, *watches], return_when=asyncio.FIRST_COMPLETED)
                for watch in ended - {complete}:
                    rank = watches.pop(watch)
                    # A worker that leaves in order has come to the stage before.
                    if not await store.check([keys[rank]]):
                        raise PeerLostError(f"worker {agent.infos[rank].name!r}", "it ended without shutdown()")
            await complete
    except StoreConnectionError as error:
        raise PeerLostError(f"worker {agent.infos[0].name!r}", f"its store is gone: {error.summary}") from error
    except TimeoutError as error:
        reason = "not all workers have called shutdown() and ended their calls"
        raise StoreTimeoutError("wait", keys, None, reason) from error
    finally:
        for waiting in [*watches, *([] if complete is None else [complete])]:
            waiting.cancel()


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return a worker by its name; None for this worker."""
    agent = current_agent()
    return agent.own_info if worker_name is None else agent.info(worker_name)


class BackendType:
    """torch's names of back ends, which `init_rpc` ignores."""

    TENSORPIPE = "TENSORPIPE"
