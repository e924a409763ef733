"""A process that calls: ``caller WHOSE``. `benchmark` starts it and sends it commands.

WHOSE is "unix" or "tcp" (asyncdist), "torch" or "ray". Each line of stdin is a command, a JSON list with the name of a
case and its arguments; the answer is a JSON number on stdout: seconds, or calls per second. The process starts the
processes that it calls, and they end with it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from statistics import median
from typing import Any, Protocol

from benchmarks.publication import python
from benchmarks.rpc.callee import OBJECTS, Target, count_bytes, increment, torch_worker

PROCESSES = 8
"""The processes of the call to all objects."""
_WARM_UP = 20


class RpcContender(Protocol):
    """A library that is measured. Each public method is a case."""

    def round_trip(self, count: int) -> float:
        """Return the median seconds of calls one after another, with a number."""

    def rate(self, count: int, in_flight: int) -> float:
        """Return the calls per second with many in flight."""

    def tensor(self, count: int, nbytes: int) -> float:
        """Return the median seconds of calls with a tensor."""

    def to_all(self, count: int) -> float:
        """Return the median seconds of a call of all objects; NaN if it is not measured."""


def _start(whose: str, address: str, number: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(python("benchmarks.rpc.callee", whose, address, str(number)), stdin=subprocess.PIPE)


class AsyncdistCalls:
    """asyncdist's remote calls, over a Unix socket or TCP.

    Args:
        whose: "unix" or "tcp".
    """

    def __init__(self, whose: str) -> None:
        from asyncdist.base.background_loop import new_loop

        self._whose = whose
        self._runner = asyncio.Runner(loop_factory=new_loop)
        self._callees: list[subprocess.Popen[bytes]] = []
        self._runner.run(self._open())

    async def _open(self) -> None:
        from asyncdist import rpc
        from asyncdist.config import Config
        from asyncdist.store import StoreServer

        server = await StoreServer.start("127.0.0.1", 0)
        self._job = f"asyncdist://127.0.0.1:{server.port}/bench"
        self._session = rpc.connect(self._job, config=Config(host=None if self._whose == "unix" else "caller"))
        await self._session.__aenter__()
        self._add_callee()
        self._target = await self._session.find("one")

    def _add_callee(self) -> None:
        self._callees.append(_start(self._whose, self._job, len(self._callees)))

    def _run(self, coroutine: Coroutine[Any, Any, float]) -> float:
        return self._runner.run(coroutine)

    def round_trip(self, count: int) -> float:
        return self._run(self._one_by_one(count, lambda: self._target.increment(1)))

    def tensor(self, count: int, nbytes: int) -> float:
        import torch

        tensor = torch.ones(nbytes, dtype=torch.uint8)
        return self._run(self._one_by_one(count, lambda: self._target.count_bytes(tensor)))

    def rate(self, count: int, in_flight: int) -> float:
        async def call() -> None:
            for _ in range(count // in_flight):
                await self._target.increment(1)

        async def measure() -> float:
            begun = time.perf_counter()
            await asyncio.gather(*[call() for _ in range(in_flight)])
            return count // in_flight * in_flight / (time.perf_counter() - begun)

        return self._run(measure())

    def to_all(self, count: int) -> float:
        async def measure() -> float:
            while len(self._callees) < PROCESSES:
                self._add_callee()
            objects = await self._session.find_all("many", count=PROCESSES * OBJECTS)
            return await self._one_by_one(count, lambda: objects.increment(1))

        return self._run(measure())

    async def _one_by_one(self, count: int, call: Callable[[], asyncio.Future[Any]]) -> float:
        times = []
        for _ in range(count + min(count, _WARM_UP)):
            begun = time.perf_counter()
            await call()
            times.append(time.perf_counter() - begun)
        return median(times[-count:])


class TorchCalls:
    """torch's RPC over TensorPipe."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._callee = _start("torch", str(port), 1)
        self._rpc = torch_worker(port, 0)

    def round_trip(self, count: int) -> float:
        return _one_by_one(count, lambda: self._rpc.rpc_sync("worker1", increment, args=(1,)))

    def tensor(self, count: int, nbytes: int) -> float:
        import torch

        tensor = torch.ones(nbytes, dtype=torch.uint8)
        return _one_by_one(count, lambda: self._rpc.rpc_sync("worker1", count_bytes, args=(tensor,)))

    def rate(self, count: int, in_flight: int) -> float:
        import torch

        begun = time.perf_counter()
        for _ in range(count // in_flight):
            calls = [self._rpc.rpc_async("worker1", increment, args=(1,)) for _ in range(in_flight)]
            torch.futures.wait_all(calls)
        return count // in_flight * in_flight / (time.perf_counter() - begun)

    def to_all(self, count: int) -> float:
        return float("nan")


class RayCalls:
    """Ray's async actors."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
        self._actor = ray.remote(Target).options(max_concurrency=1000).remote()
        ray.get(self._actor.increment.remote(1))

    def round_trip(self, count: int) -> float:
        return _one_by_one(count, lambda: self._ray.get(self._actor.increment.remote(1)))

    def tensor(self, count: int, nbytes: int) -> float:
        import torch

        tensor = torch.ones(nbytes, dtype=torch.uint8)
        return _one_by_one(count, lambda: self._ray.get(self._actor.count_bytes.remote(tensor)))

    def rate(self, count: int, in_flight: int) -> float:
        begun = time.perf_counter()
        for _ in range(count // in_flight):
            self._ray.get([self._actor.increment.remote(1) for _ in range(in_flight)])
        return count // in_flight * in_flight / (time.perf_counter() - begun)

    def to_all(self, count: int) -> float:
        return float("nan")


def _one_by_one(count: int, call: Callable[[], Any]) -> float:
    times = []
    for _ in range(count + min(count, _WARM_UP)):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return median(times[-count:])


def contender_of(whose: str) -> RpcContender:
    """Start a library and what it calls."""
    if whose == "torch":
        return TorchCalls()
    return RayCalls() if whose == "ray" else AsyncdistCalls(whose)


def run_caller(whose: str) -> None:
    """Execute the commands on stdin."""
    # Libraries print to stdout too.
    answers, sys.stdout = sys.stdout, sys.stderr
    contender = contender_of(whose)
    for line in sys.stdin:
        case, *arguments = json.loads(line)
        answers.write(json.dumps(getattr(contender, case)(*arguments)) + "\n")
        answers.flush()


if __name__ == "__main__":
    run_caller(sys.argv[1])
