"""Scoped ports of a store server: each has an empty store behind it, and closes at the end of a lease.

Clients of torch's TCPStore address a store by host and port, and its protocol has no namespaces, so that the keys of two
jobs would collide. The launcher of a job opens a scoped port and gives its workers that port. `StoreServer` owns one
`ScopedStores` and passes the function that starts another server, so that this module does not import the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from asyncdist.errors import AddressError
from asyncdist.store.protocol.operations import Client, OperationKind, Reason, Reply
from asyncdist.store.state.model import RequestRefused


class ScopedStore(Protocol):
    """A server behind a scoped port."""

    port: int

    async def close(self) -> None:
        """Close the port and delete what is stored behind it."""


class ScopedStores:
    """The scoped ports that clients of one server have opened.

    Args:
        start: Starts a server with an empty store on a free port.
        at_lease_end: Registers a callback for the end of a client's lease on a prefix, or raises RequestRefused.
        send: Sends a reply to the connection that it is for.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[ScopedStore]],
        at_lease_end: Callable[[Client, str, Callable[[], None]], None],
        send: Callable[[Reply], None],
    ) -> None:
        self._start = start
        self._at_lease_end = at_lease_end
        self._send = send
        self._open: set[ScopedStore] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, connection: Client, identity: bytes, request: int, prefix: str) -> None:
        """Open a port until the client's lease on ``prefix`` ends; the reply, the port's number, follows."""
        self._spawn(self._open_and_reply(connection, identity, request, prefix))

    async def close(self) -> None:
        """Close all scoped ports."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        for store in list(self._open):
            await self._close(store)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open_and_reply(self, connection: Client, identity: bytes, request: int, prefix: str) -> None:
        try:
            port = await self._open_store(identity, prefix)
        except RequestRefused as refused:
            self._send(refused.reply(connection, request))
        else:
            self._send(Reply(connection, request, OperationKind.RESULT, port))

    async def _open_store(self, identity: bytes, prefix: str) -> int:
        """Start a store that closes at the end of the lease; return its port."""
        try:
            store = await self._start()
        except AddressError as error:
            raise RequestRefused(Reason.INVALID, f"the daemon cannot open another port: {error}") from None
        self._open.add(store)
        try:
            self._at_lease_end(identity, prefix, lambda: self._spawn(self._close(store)))
        except RequestRefused:
            await self._close(store)
            raise
        return store.port

    async def _close(self, store: ScopedStore) -> None:
        if store in self._open:
            self._open.remove(store)
            await store.close()
