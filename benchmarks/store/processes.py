"""The processes of the benchmark of the store: asyncdist's server or torch's, and clients of both.

They import torch only for torch's server and clients.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asyncdist.base.background_loop import new_loop
from asyncdist.base.callables import Callback
from asyncdist.config import Config
from asyncdist.store import AsyncStore, TCPStore
from asyncdist.store.server.daemon import Options
from asyncdist.store.server.daemon import serve as serve_store
from benchmarks.laboratory import HOST, obey

_TIMEOUT = 240.0
"""Seconds for one call of a client."""
_CALLS_PER_BATCH = 20
"""The calls between two readings of the clock."""
_MOST_CONNECTING = 256
"""The most connections that asyncdist's clients open at a time."""
_STACK_NBYTES = 256 << 10
"""The stack of a thread of `_torch_crowd`, which starts one thread for each of several thousand clients."""

_VALUE = b"v" * 64


def serve(test: Connection, whose: str, data: str | None) -> None:
    """Serve as ``asyncdist store`` does, or as torch's libuv TCPStore does, which has no token; send the port."""
    if whose == "torch":
        from torch.distributed import TCPStore as TorchStore  # type: ignore[attr-defined]

        server = TorchStore(HOST, 0, is_master=True, wait_for_workers=False, use_libuv=True)
        test.send(server.port)
        test.recv()
        return
    options, config = Options(data=Path(data) if data is not None else None), Config(store_c10d="loopback")
    token = Config.from_environment().token
    with asyncio.Runner(loop_factory=new_loop) as runner:
        ready = lambda host, port: test.send(port)  # noqa: E731
        runner.run(serve_store(HOST, 0, token=token, config=config, ready=ready, options=options))


def run_clients(test: Connection) -> None:
    """Execute what the benchmark orders."""
    obey(test, Clients(Config.from_environment().token))


class Clients:
    """The clients of this process. Each public method is an order."""

    def __init__(self, token: str | None) -> None:
        self.token = token
        self.loop = new_loop()
        self._stores: dict[tuple[str, int], Any] = {}
        self._held: list[Any] = []

    # -- orders -----------------------------------------------------------------------------------

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

    def crowd(self, client: str, port: int, count: int, total: int, name: str) -> tuple[int, float]:
        """Let ``count`` new clients connect, authenticate, add 1, and meet at a barrier of ``total`` clients.

        ``total`` counts the clients of all client processes. ``name`` is a prefix of the keys, a new one for each crowd.
        Returns how many clients passed the barrier, and when the last one did, on the monotonic clock.
        """
        if client == "torch":
            served = _torch_crowd(port, count, total, name)
        else:
            served = self.loop.run_until_complete(self._crowd(port, count, total, name))
        return len(served), max(served, default=0.0)

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


def call_rate(call: Callback, seconds: float) -> float:
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
