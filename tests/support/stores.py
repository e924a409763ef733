"""Clients of a store for tests that run once with each kind of client."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncdist.config import Config
from asyncdist.store import AsyncStore, TCPStore

TOKEN = "a token for tests"
LONG = 60.0
"""Seconds that no test needs."""


class ThreadedStore:
    """A `TCPStore` with awaited methods: each call runs in a thread."""

    def __init__(self, store: TCPStore) -> None:
        self.connection = store.connection
        self._store = store
        self._threads = ThreadPoolExecutor(32)

    def __getattr__(self, name: str) -> Callable[..., asyncio.Future[Any]]:
        method = getattr(self._store, name)
        return lambda *args, **options: asyncio.wrap_future(self._threads.submit(method, *args, **options))

    async def close(self) -> None:
        await asyncio.to_thread(self._store.close)
        self._threads.shutdown()


async def open_store(
    kind: type[AsyncStore] | type[TCPStore], host: str, port: int, *, timeout: float | None = LONG, **settings: Any
) -> AsyncStore | ThreadedStore:
    """Connect a client of a kind with the token `TOKEN` and these settings."""
    config = Config(**{"token": TOKEN, **settings})
    if kind is AsyncStore:
        return await AsyncStore.connect(host, port, timeout=timeout, config=config)
    return ThreadedStore(await asyncio.to_thread(TCPStore, host, port, timeout=timeout, config=config))
