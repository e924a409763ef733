"""Doors of a server: ports of its own, behind each of which there is an empty store.

Clients of torch's TCPStore know a host and a port, and no namespaces: what two jobs, or two starts of one, write there
would mix. So whoever starts them has a door opened for them, and all it gives them is its port. The door, and what was
stored behind it, goes when its opener is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from asyncdist.errors import AddressError
from asyncdist.store.protocol.operations import OperationKind, Reason, Reply
from asyncdist.store.server.connection import ServerConnection

if TYPE_CHECKING:
    from asyncdist.store.server.server import StoreServer


class ScopedStores:
    """The doors that clients of one server have opened."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._open: dict[int, tuple[ServerConnection, StoreServer]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, client: ServerConnection, request: int) -> None:
        """Open a door; the reply follows when that is done."""
        self._begin(self._open_for(client, request))

    def leave(self, client: ServerConnection) -> None:
        """A client is gone: close its doors."""
        for port in [port for port, (owner, _) in self._open.items() if owner is client]:
            self._begin(self._shut(port))

    async def close(self) -> None:
        """Close all doors."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        for port in list(self._open):
            await self._shut(port)

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open_for(self, client: ServerConnection, request: int) -> None:
        server = self._server
        try:
            behind = await type(server).start(server.host, 0, token=server.token, config=server.config)
        except AddressError as error:
            text = f"the daemon cannot open another port: {error}"
            if server.serves(client):
                server.deliver([Reply(client, request, OperationKind.REFUSED, (Reason.INVALID, text))], None)
            return
        self._open[behind.port] = (client, behind)
        if server.serves(client):
            server.deliver([Reply(client, request, OperationKind.RESULT, behind.port)], None)
        else:
            await self._shut(behind.port)

    async def _shut(self, port: int) -> None:
        _, behind = self._open.pop(port, (None, None))
        if behind is not None:
            await behind.close()
