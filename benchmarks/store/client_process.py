"""A process with store clients, asyncdist's or torch's. `benchmark` starts it and sends it commands.

It reads the token from the first line of stdin. Each further line is a command, a JSON object: "do" names a method of
`Clients`, and the other fields are its arguments. It prints the result of each command as JSON. It imports torch only
for torch's clients.

{"do": "dialogue", "client": "torch", "port": 29500, "operation": "get", "seconds": 0.5}   → calls per second
{"do": "flight", "port": …, "count": 1000, "seconds": …}                                   → calls per second
{"do": "prepare_crowd", "client": …}                                                       → 0
{"do": "crowd", "client": …, "port": …, "count": 2048, "total": 8192, "name": …}           → {"served": …, "last": …}
{"do": "hold", "client": …, "port": …, "count": …}                                         → the number of clients
{"do": "release"}                                                                          → 0
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
from asyncdist.config import Config
from asyncdist.store import AsyncStore, TCPStore
from benchmarks.store.server_process import HOST

_TIMEOUT = 240.0
"""Seconds for one call of a client."""
_CALLS_PER_BATCH = 20
"""The calls between two readings of the clock."""
_MOST_CONNECTING = 256
"""The most connections that asyncdist's clients open at a time."""
_STACK_NBYTES = 256 << 10
"""The stack of a thread of `_torch_crowd`, which starts one thread for each of several thousand clients."""

_VALUE = b"v" * 64


class Clients:
    """The clients of this process. Each public method is a command."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.loop = new_loop()
        self._stores: dict[tuple[str, int], Any] = {}
        self._held: list[Any] = []

    # -- commands ---------------------------------------------------------------------------------

    def dialogue(self, client: str, port: int, operation: str, seconds: float) -> float:
        """Make calls one after another on one connection for ``seconds``; return the calls per second.

        Args:
            client: "asyncdist" or "torch".
            port: The server's port.
            operation: "get" or "add".
            seconds: How long to make calls.
        """
        store = self._store(client, port)
        call = functools.partial(store.get, "key") if operation == "get" else functools.partial(store.add, "number", 1)
        return call_rate(call, seconds)

    def flight(self, port: int, count: int, seconds: float) -> float:
        """Make ``count`` concurrent `get`s on one connection, await all, and repeat; return the calls per second."""
        return self.loop.run_until_complete(self._flight(port, count, seconds))

    def prepare_crowd(self, client: str) -> int:
        """Do what `crowd` would otherwise do within the measured time: import torch, and free the previous crowd."""
        if client == "torch":
            import torch.distributed  # noqa: F401
        gc.collect()
        return 0

    def crowd(self, client: str, port: int, count: int, total: int, name: str) -> dict[str, float]:
        """Let ``count`` new clients connect, authenticate, add 1, and meet at a barrier of ``total`` clients.

        ``total`` counts the clients of all client processes. ``name`` is a prefix of the keys, a new one for each crowd.
        Returns how many clients passed the barrier, and when the last one did, on the monotonic clock.
        """
        if client == "torch":
            served = _torch_crowd(port, count, total, name)
        else:
            served = self.loop.run_until_complete(self._crowd(port, count, total, name))
        return {"served": len(served), "last": max(served, default=0.0)}

    def hold(self, client: str, port: int, count: int) -> int:
        """Connect ``count`` clients that make no calls, in addition to those held already; return ``count``."""
        if client == "torch":
            self._held += [_torch_client(port) for _ in range(count)]
        else:
            connecting = asyncio.Semaphore(_MOST_CONNECTING)
            self._held += self._gather([self._connect(port, connecting) for _ in range(count)])
        return count

    def release(self) -> int:
        """Disconnect the held clients; torch's disconnect when they are deleted."""
        held, self._held = self._held, []
        self._gather([store.close() for store in held if isinstance(store, AsyncStore)])
        return 0

    def _store(self, client: str, port: int) -> Any:
        """Return the blocking client of a server, connected on first use."""
        if (client, port) not in self._stores:
            if client == "torch":
                store: Any = _torch_client(port)
            else:
                store = TCPStore(HOST, port, timeout=_TIMEOUT, config=Config(token=self.token))
            store.set("key", _VALUE)
            store.get("key")
            self._stores[client, port] = store
        return self._stores[client, port]

    # -- asyncdist's awaited clients --------------------------------------------------------------

    def _gather(self, awaitables: list[Any]) -> list[Any]:
        async def gather() -> list[Any]:
            return await asyncio.gather(*awaitables)

        return self.loop.run_until_complete(gather())

    async def _connect(self, port: int, connecting: asyncio.Semaphore) -> AsyncStore:
        async with connecting:
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
        connecting = asyncio.Semaphore(_MOST_CONNECTING)

        async def client() -> float:
            store = await self._connect(port, connecting)
            try:
                await store.add(f"{name}/count", 1)
                await store.barrier(f"{name}/barrier", total)
                return time.monotonic()
            finally:
                await store.close()

        return list(await asyncio.gather(*[client() for _ in range(count)]))


def call_rate(call: Callable[[], object], seconds: float) -> float:
    """Make calls until ``seconds`` have passed; return the calls per second."""
    calls, spent, begun = 0, 0.0, time.perf_counter()
    while spent < seconds:
        for _ in range(_CALLS_PER_BATCH):
            call()
        calls += _CALLS_PER_BATCH
        spent = time.perf_counter() - begun
    return calls / spent


# -- torch's clients -------------------------------------------------------------------------------


def _torch_crowd(port: int, count: int, total: int, name: str) -> list[float]:
    served: list[float] = []

    def client() -> None:
        store = _torch_client(port)
        store.add(f"{name}/count", 1)
        store.barrier(f"{name}/barrier", total, timedelta(seconds=_TIMEOUT))
        served.append(time.monotonic())

    before = threading.stack_size(_STACK_NBYTES)
    try:
        threads = [threading.Thread(target=client) for _ in range(count)]
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
    """Read the token from stdin's first line, execute the command of each further line, and print its result."""
    clients = Clients(sys.stdin.readline().strip())
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(clients, command.pop("do"))(**command)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    run_store_clients()
