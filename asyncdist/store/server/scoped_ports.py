"""Scoped ports of a store server: each has an empty store behind it, and closes with the connection that opened it.

Clients of torch's TCPStore address a store by host and port and know no namespaces, so the keys of two jobs would mix.
The launcher of a job opens a scoped port and gives its workers that port. `StoreServer` owns one `ScopedStores` and
passes in how to start another server, so that this module does not import the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from asyncdist.errors import AddressError
from asyncdist.store.protocol.operations import OperationKind, Reason, Reply
from asyncdist.store.server.connection import ServerConnection


class ScopedStore(Protocol):
    """A server behind a scoped port."""

    port: int

    async def close(self) -> None:
        """Close the port and delete what is stored behind it."""


class ScopedStores:
    """The scoped ports that clients of one server have opened.

    Args:
        start: Starts a server with an empty store on a free port.
        serves: Returns whether a connection is still open.
        send: Sends a reply to the connection that it is for.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[ScopedStore]],
        serves: Callable[[ServerConnection], bool],
        send: Callable[[Reply], None],
    ) -> None:
        self._start = start
        self._serves = serves
        self._send = send
        self._open: dict[int, tuple[ServerConnection, ScopedStore]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, client: ServerConnection, request: int) -> None:
        """Open a scoped port for ``client``; the reply, the port's number, follows."""
        self._spawn(self._open_for(client, request))

    def release(self, client: ServerConnection) -> None:
        """Close the scoped ports of a connection that has ended."""
        for port in [port for port, (owner, _) in self._open.items() if owner is client]:
            self._spawn(self._close_port(port))

    async def close(self) -> None:
        """Close all scoped ports."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        for port in list(self._open):
            await self._close_port(port)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open_for(self, client: ServerConnection, request: int) -> None:
        try:
            store = await self._start()
        except AddressError as error:
            text = f"the daemon cannot open another port: {error}"
            if self._serves(client):
                self._send(Reply(client, request, OperationKind.REFUSED, (Reason.INVALID, text)))
            return
        self._open[store.port] = (client, store)
        if self._serves(client):
            self._send(Reply(client, request, OperationKind.RESULT, store.port))
        else:
            await self._close_port(store.port)

    async def _close_port(self, port: int) -> None:
        _, store = self._open.pop(port, (None, None))
        if store is not None:
            await store.close()
