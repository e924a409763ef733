"""The processes of the benchmark of remote calls: callers, and the processes that they call."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from benchmarks.laboratory import obey
from benchmarks.rpc.called import OBJECTS, CalledObject, count_bytes, increment

_WARM_UP = 20


def serve(test: Connection, whose: str, where: str, number: int) -> None:
    """Serve one of the two libraries; ``where`` is the URL of a job, or the file where torch's workers meet."""
    if whose == "torch":
        torch_worker(where, 1)
        threading.Event().wait()
        return
    from asyncdist.base.background_loop import new_loop

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(where, number, None if whose == "unix" else "callee"))


async def _serve(job: str, number: int, host: str | None) -> None:
    from asyncdist import rpc
    from asyncdist.config import Config

    objects = {"one": CalledObject(), "many": [CalledObject() for _ in range(OBJECTS)]}
    async with rpc.serve(objects, job, rank=number, config=Config.from_environment().with_(host=host)):
        await asyncio.Event().wait()


def torch_worker(where: str, rank: int) -> Any:
    """Become one of the two workers of torch's RPC, and return its module."""
    import torch.distributed.rpc as torch_rpc

    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=where)
    torch_rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    return torch_rpc


def call(test: Connection, whose: str, where: str) -> None:
    """Execute what the benchmark orders, with one of the libraries: "unix" or "tcp" (asyncdist), "torch" or "ray"."""
    if whose == "ray":
        obey(test, RayCalls())
    else:
        obey(test, TorchCalls(where) if whose == "torch" else AsyncdistCalls(whose, where))


# A class for each library. A public method is a case, and returns the median seconds of a call, or calls per second.


class AsyncdistCalls:
    """asyncdist's remote calls, over a Unix socket ("unix") or TCP ("tcp")."""

    def __init__(self, whose: str, job: str) -> None:
        from asyncdist.base.background_loop import new_loop

        self._runner = asyncio.Runner(loop_factory=new_loop)
        self._runner.run(self._open(job, None if whose == "unix" else "caller"))

    async def _open(self, job: str, host: str | None) -> None:
        from asyncdist import rpc
        from asyncdist.config import Config

        self._session = rpc.connect(job, config=Config.from_environment().with_(host=host))
        await self._session.__aenter__()
        self._target = await self._session.find("one")

    def round_trip(self, count: int) -> float:
        return self._runner.run(self._one_by_one(count, lambda: self._target.increment(1)))

    def tensor(self, count: int, nbytes: int) -> float:
        tensor = _tensor(nbytes)
        return self._runner.run(self._one_by_one(count, lambda: self._target.count_bytes(tensor)))

    def rate(self, count: int, in_flight: int) -> float:
        async def call() -> None:
            for _ in range(count // in_flight):
                await self._target.increment(1)

        async def measure() -> float:
            begun = time.perf_counter()
            await asyncio.gather(*[call() for _ in range(in_flight)])
            return count // in_flight * in_flight / (time.perf_counter() - begun)

        return self._runner.run(measure())

    def to_all(self, count: int, objects_count: int) -> float:
        async def measure() -> float:
            objects = await self._session.find_all("many", count=objects_count)
            return await self._one_by_one(count, lambda: objects.increment(1))

        return self._runner.run(measure())

    async def _one_by_one(self, count: int, call: Callable[[], asyncio.Future[Any]]) -> float:
        times = []
        for _ in range(count + min(count, _WARM_UP)):
            begun = time.perf_counter()
            await call()
            times.append(time.perf_counter() - begun)
        return median(times[-count:])


class TorchCalls:
    """torch's RPC over TensorPipe."""

    def __init__(self, where: str) -> None:
        self._rpc = torch_worker(where, 0)

    def round_trip(self, count: int) -> float:
        return _one_by_one(count, lambda: self._rpc.rpc_sync("worker1", increment, args=(1,)))

    def tensor(self, count: int, nbytes: int) -> float:
        tensor = _tensor(nbytes)
        return _one_by_one(count, lambda: self._rpc.rpc_sync("worker1", count_bytes, args=(tensor,)))

    def rate(self, count: int, in_flight: int) -> float:
        import torch

        begun = time.perf_counter()
        for _ in range(count // in_flight):
            calls = [self._rpc.rpc_async("worker1", increment, args=(1,)) for _ in range(in_flight)]
            torch.futures.wait_all(calls)
        return count // in_flight * in_flight / (time.perf_counter() - begun)


class RayCalls:
    """Ray's async actors."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
        self._actor = ray.remote(CalledObject).options(max_concurrency=1000).remote()
        ray.get(self._actor.increment.remote(1))

    def round_trip(self, count: int) -> float:
        return _one_by_one(count, lambda: self._ray.get(self._actor.increment.remote(1)))

    def tensor(self, count: int, nbytes: int) -> float:
        tensor = _tensor(nbytes)
        return _one_by_one(count, lambda: self._ray.get(self._actor.count_bytes.remote(tensor)))

    def rate(self, count: int, in_flight: int) -> float:
        begun = time.perf_counter()
        for _ in range(count // in_flight):
            self._ray.get([self._actor.increment.remote(1) for _ in range(in_flight)])
        return count // in_flight * in_flight / (time.perf_counter() - begun)


def _tensor(nbytes: int) -> Any:
    import torch

    return torch.ones(nbytes, dtype=torch.uint8)


def _one_by_one(count: int, call: Callable[[], Any]) -> float:
    times = []
    for _ in range(count + min(count, _WARM_UP)):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return median(times[-count:])
