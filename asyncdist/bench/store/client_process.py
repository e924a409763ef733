"""A process full of store clients, ours or torch's: does what it is told in lines of JSON, and answers with one each.

{"do": "dialogue", "client": "torch", "port": 29500, "operation": "get", "seconds": 0.5}   → calls a second
{"do": "flight", "port": …, "count": 1000, "seconds": …}                                   → calls a second
{"do": "crowd", "client": …, "port": …, "count": 2048, "total": 8192, "name": …}           → when the last was through
{"do": "hold", "client": …, "port": …, "count": …}, then {"do": "release"}                 → how many there are
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
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from asyncdist.base.background_loop import new_loop
from asyncdist.bench.store.c10d_peer import Peer
from asyncdist.config import Config
from asyncdist.store import AsyncStore, TCPStore

_HOST = "127.0.0.1"
_PATIENCE = 240.0
_BATCH = 20
_CONNECTING = 256
"""Connections that a process of ours opens at a time."""
_STACK_NBYTES = 256 << 10

_VALUE = b"v" * 64


class Clients:
    """The clients of this process, each made when it is first needed."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.loop = new_loop()
        self._made: dict[tuple[str, int], Any] = {}
        self._held = ExitStack()
        self._held_stores: list[AsyncStore] = []

    # -- what can be asked ------------------------------------------------------------------------

    def dialogue(self, client: str, port: int, operation: str, seconds: float) -> float:
        """One call after the other."""
        store = self._client(client, port)
        call = functools.partial(store.get, "key") if operation == "get" else functools.partial(store.add, "number", 1)
        return _rate(call, seconds)

    def flight(self, port: int, count: int, seconds: float) -> float:
        """Keep ``count`` calls of `get` in flight on one connection: all are awaited, and made again."""
        return self.loop.run_until_complete(self._flight(port, count, seconds))

    def crowd(self, client: str, port: int, count: int, total: int, name: str) -> dict[str, float]:
        """Have ``count`` new clients connect, authenticate, add 1, and meet at a barrier of ``total``."""
        gc.collect()
        if client == "torch":
            arrived = _torchs_crowd(port, count, total, name)
        else:
            arrived = self.loop.run_until_complete(_our_crowd(port, self.token, count, total, name))
        return {"served": len(arrived), "last": max(arrived, default=0.0)}

    def hold(self, client: str, port: int, count: int) -> int:
        """Connect ``count`` clients that then say nothing."""
        if client == "torch":
            for _ in range(count):
                self._held.enter_context(Peer(port))
        else:
            connecting = [self._connect(port, _Gate(_CONNECTING)) for _ in range(count)]
            self._held_stores += self.loop.run_until_complete(_together(connecting))
        return count

    def release(self) -> int:
        """Disconnect those that were held."""
        self._held.close()
        held, self._held_stores = self._held_stores, []
        self.loop.run_until_complete(_together([store.close() for store in held]))
        return 0

    # -- inside -----------------------------------------------------------------------------------

    def _client(self, client: str, port: int) -> Any:
        if (client, port) not in self._made:
            if client == "torch":
                made: Any = _torchs_client(port)
            else:
                made = TCPStore(_HOST, port, timeout=_PATIENCE, config=Config(token=self.token))
            made.set("key", _VALUE)
            made.get("key")
            self._made[client, port] = made
        return self._made[client, port]

    async def _connect(self, port: int, gate: _Gate) -> AsyncStore:
        async with gate:
            return await AsyncStore.connect(_HOST, port, token=self.token, timeout=_PATIENCE)

    async def _flight(self, port: int, count: int, seconds: float) -> float:
        store = await AsyncStore.connect(_HOST, port, token=self.token, timeout=_PATIENCE)
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


_Gate = asyncio.Semaphore


def _rate(call: Callable[[], object], seconds: float) -> float:
    calls, spent, begun = 0, 0.0, time.perf_counter()
    while spent < seconds:
        for _ in range(_BATCH):
            call()
        calls += _BATCH
        spent = time.perf_counter() - begun
    return calls / spent


async def _together(these: list[Any]) -> list[Any]:
    return await asyncio.gather(*these)


# -- crowds ----------------------------------------------------------------------------------------


async def _our_crowd(port: int, token: str | None, count: int, total: int, name: str) -> list[float]:
    gate = _Gate(_CONNECTING)

    async def one() -> float:
        async with gate:
            store = await AsyncStore.connect(_HOST, port, token=token, timeout=_PATIENCE)
        try:
            await store.add(f"{name}/count", 1)
            await store.barrier(f"{name}/barrier", total)
            return time.monotonic()
        finally:
            await store.close()

    return list(await asyncio.gather(*[one() for _ in range(count)]))


def _torchs_crowd(port: int, count: int, total: int, name: str) -> list[float]:
    import torch.distributed  # noqa: F401, or the first of the threads would, and the others wait for it

    arrived: list[float] = []

    def one() -> None:
        store = _torchs_client(port)
        store.add(f"{name}/count", 1)
        store.barrier(f"{name}/barrier", total, timedelta(seconds=_PATIENCE))
        arrived.append(time.monotonic())

    before = threading.stack_size(_STACK_NBYTES)
    try:
        threads = [threading.Thread(target=one) for _ in range(count)]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(before)
    for thread in threads:
        thread.join()
    return arrived


def _torchs_client(port: int) -> Any:
    from torch.distributed import TCPStore as TorchStore  # type: ignore[attr-defined]

    return TorchStore(
        _HOST, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_PATIENCE), use_libuv=True
    )


def run_store_clients() -> None:
    """Take the token from stdin's first line, and do what each further one says until there are no more."""
    clients = Clients(sys.stdin.readline().strip())
    for line in sys.stdin:
        told = json.loads(line)
        answer = getattr(clients, told.pop("do"))(**told)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    run_store_clients()
