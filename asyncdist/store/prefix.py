"""A part of a store, under a prefix, as a store of its own. Users' programs and `rendezvous` create it."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar, cast

from asyncdist.base.deadline import Timeout
from asyncdist.errors import UsageError
from asyncdist.store.base import AsyncStoreBase, AsyncStream, BlockingStream, Store
from asyncdist.store.protocol.operations import Command, Op

T = TypeVar("T")


def _strip(command: Command[T], prefix: str, result: Any) -> T:
    return cast(T, [key.removeprefix(prefix) for key in result] if command.op is Op.LIST_KEYS else result)


class PrefixStore(Store):
    """A part of another store: adds ``prefix/`` to the name of every key, queue, barrier and channel.

    `list_keys` and `watch_keys` return the keys of this part without the prefix. `num_keys` counts the whole store, as
    torch's does. The timeout is this object's own, initially that of ``store``. `close` does not close ``store``.

    Args:
        prefix: The prefix, without the slash.
        store: The other store.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(prefix, str) or not isinstance(store, Store):
            raise UsageError(f"PrefixStore takes a prefix and a store, not {prefix!r} and {store!r}")
        super().__init__(store.timeout)
        self._prefix = prefix + "/"
        self._store = store

    @property
    def underlying_store(self) -> Store:
        """The store that holds the keys."""
        return self._store

    def request(self, command: Command[T], timeout: Timeout = None) -> T:
        limit = self._timeout if timeout is None else timeout
        return _strip(command, self._prefix, self._store.request(command.under(self._prefix), limit))

    def stream(self, command: Command[Any], hidden: str = "") -> BlockingStream[Any]:
        return self._store.stream(command.under(self._prefix), self._prefix + hidden)

    def clone(self) -> PrefixStore:
        """Return the same part of the same store, with a timeout of its own."""
        other = PrefixStore(self._prefix.removesuffix("/"), self._store)
        other.set_timeout(self.timeout)
        return other

    def close(self) -> None:
        pass


class AsyncPrefixStore(AsyncStoreBase):
    """A part of an awaited store: what `PrefixStore` is for blocking stores.

    Args:
        prefix: The prefix, without the slash.
        store: The other store.
    """

    def __init__(self, prefix: str, store: AsyncStoreBase) -> None:
        self.timeout = store.timeout
        self._prefix = prefix + "/"
        self._store = store

    @property
    def underlying_store(self) -> AsyncStoreBase:
        """The store that holds the keys."""
        return self._store

    @property
    def lease(self) -> float:
        return self._store.lease

    @property
    def expiries(self) -> int:
        return self._store.expiries

    def request(self, command: Command[T], timeout: Timeout = None) -> asyncio.Future[T]:
        future = self._store.request(command.under(self._prefix), self._limit(timeout))
        if command.op is not Op.LIST_KEYS:
            return future
        return future.get_loop().create_task(self._stripped(command, future))

    async def take(self, command: Command[T], timeout: Timeout = None) -> T:
        return await self._store.take(command.under(self._prefix), self._limit(timeout))

    def _limit(self, timeout: Timeout) -> Timeout:
        return self.timeout if timeout is None else timeout

    async def _stripped(self, command: Command[T], future: asyncio.Future[T]) -> T:
        return _strip(command, self._prefix, await future)

    def stream(self, command: Command[Any], hidden: str = "") -> AsyncStream[Any]:
        return self._store.stream(command.under(self._prefix), self._prefix + hidden)

    async def close(self) -> None:
        pass
