"""A process with store clients, asyncdist's or torch's. It executes commands, one JSON object per line, and answers each.

Started by `benchmark`.

{"do": "dialogue", "client": "torch", "port": 29500, "operation": "get", "seconds": 0.5}   → calls per second
{"do": "flight", "port": …, "count": 1000, "seconds": …}                                   → calls per second
{"do": "crowd", "client": …, "port": …, "count": 2048, "total": 8192, "name": …}           → when the last one was served
{"do": "hold", "client": …, "port": …, "count": …}, then {"do": "release"}                 → the number of clients
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from asyncdist.base.background_loop import new_loop
from asyncdist.bench.store.server_process import HOST
from asyncdist.config import Config
from asyncdist.store import AsyncStore, TCPStore

_TIMEOUT = 240.0
_BATCH = 20
_CONNECTING = 256
"""The number of connections that asyncdist's clients open at a time."""
_STACK_NBYTES = 256 << 10

_VALUE = b"v" * 64


class Clients:
    """The clients of this process. Each public method is a command."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.loop = new_loop()
        self._made: dict[tuple[str, int], Any] = {}
        self._held: list[Any] = []

    # -- commands ---------------------------------------------------------------------------------

    def dialogue(self, client: str, port: int, operation: str, seconds: float) -> float:
        """Make one call after the other."""
        store = self._client(client, port)
        call = functools.partial(store.get, "key") if operation == "get" else functools.partial(store.add, "number", 1)
        return call_rate(call, seconds)

    def flight(self, port: int, count: int, seconds: float) -> float:
        """Keep ``count`` calls of `get` in flight on one connection: await all of them, and make them again."""
        return self.loop.run_until_complete(self._flight(port, count, seconds))

    def crowd(self, client: str, port: int, count: int, total: int, name: str) -> dict[str, float]:
        """Let ``count`` new clients connect, authenticate, add 1, and meet at a barrier of ``total`` clients."""
        gc.collect()
        if client == "torch":
            served = _torch_crowd(port, count, total, name)
        else:
            served = self.loop.run_until_complete(self._crowd(port, count, total, name))
        return {"served": len(served), "last": max(served, default=0.0)}

    def hold(self, client: str, port: int, count: int) -> int:
        """Connect ``count`` clients that make no calls."""
        if client == "torch":
            self._held += [_torch_client(port) for _ in range(count)]
        else:
            gate = asyncio.Semaphore(_CONNECTING)
            self._held += self._gather([self._connect(port, gate) for _ in range(count)])
        return count

    def release(self) -> int:
        """Disconnect the held clients."""
        held, self._held = self._held, []
        self._gather([store.close() for store in held if isinstance(store, AsyncStore)])
        return 0

    # -- asyncdist's clients ----------------------------------------------------------------------

    def _gather(self, awaitables: list[Any]) -> list[Any]:
        async def gather() -> list[Any]:
            return await asyncio.gather(*awaitables)

        return self.loop.run_until_complete(gather())

    def _client(self, client: str, port: int) -> Any:
        if (client, port) not in self._made:
            if client == "torch":
                made: Any = _torch_client(port)
            else:
                made = TCPStore(HOST, port, timeout=_TIMEOUT, config=Config(token=self.token))
            made.set("key", _VALUE)
            made.get("key")
            self._made[client, port] = made
        return self._made[client, port]

    async def _connect(self, port: int, gate: asyncio.Semaphore) -> AsyncStore:
        async with gate:
            return await AsyncStore.connect(HOST, port, token=self.token, timeout=_TIMEOUT)

    async def _flight(self, port: int, count: int, seconds: float) -> float:
        store = await AsyncStore.connect(HOST, port, token=self.token, timeout=_TIMEOUT)
        try:
            await store.set("key", _VALUE)
            calls, spent, begun = 0, 0.0, time.perf_counter()
            while spent < seconds:
                await asyncio.gather(*[store.get("key") for _ in range(count)])
                calls += count
                spent = time.perf_counter() - begun
            return calls / spent
        finally:
            await store.close()

    async def _crowd(self, port: int, count: int, total: int, name: str) -> list[float]:
        gate = asyncio.Semaphore(_CONNECTING)

        async def one() -> float:
            store = await self._connect(port, gate)
            try:
                await store.add(f"{name}/count", 1)
                await store.barrier(f"{name}/barrier", total)
                return time.monotonic()
            finally:
                await store.close()

        return list(await asyncio.gather(*[one() for _ in range(count)]))


def call_rate(call: Callable[[], object], seconds: float) -> float:
    """Return the calls per second of batches of calls that take about ``seconds``."""
    calls, spent, begun = 0, 0.0, time.perf_counter()
    while spent < seconds:
        for _ in range(_BATCH):
            call()
        calls += _BATCH
        spent = time.perf_counter() - begun
    return calls / spent


# -- torch's clients -------------------------------------------------------------------------------


def _torch_crowd(port: int, count: int, total: int, name: str) -> list[float]:
    import torch.distributed  # noqa: F401 - else the first thread imports it, and the others wait

    served: list[float] = []

    def one() -> None:
        store = _torch_client(port)
        store.add(f"{name}/count", 1)
        store.barrier(f"{name}/barrier", total, timedelta(seconds=_TIMEOUT))
        served.append(time.monotonic())

    before = threading.stack_size(_STACK_NBYTES)
    try:
        threads = [threading.Thread(target=one) for _ in range(count)]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(before)
    for thread in threads:
        thread.join()
    return served


def _torch_client(port: int) -> Any:
    from torch.distributed import TCPStore as TorchStore  # type: ignore[attr-defined]

    return TorchStore(
        HOST, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_TIMEOUT), use_libuv=True
    )


def run_store_clients() -> None:
    """Read the token from stdin's first line, and execute the commands of the other lines."""
    clients = Clients(sys.stdin.readline().strip())
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(clients, command.pop("do"))(**command)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    run_store_clients()
