"""Serve the store of a world on the process's background loop, where it runs while the program computes.

`join.host_world` calls it on rank 0. Worlds of one process with the same host and port share one server, because a port
can be bound only once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from asyncdist.base.background_loop import background_loop, on_loop
from asyncdist.config import Config
from asyncdist.errors import AddressError

if TYPE_CHECKING:
    from asyncdist.store.server.server import StoreServer


@dataclass
class _Shared:
    server: StoreServer
    token: str | None
    users: int = 0


@dataclass
class _Servers:
    """The servers on one background loop, accessed only there."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    by_address: dict[tuple[str, int], _Shared] = field(default_factory=dict)


_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Servers] = WeakKeyDictionary()


class ServerHandle:
    """One world's reference to a server. `close` it also if `open` failed or was cancelled."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shared: _Shared | None = None

    async def open(self, host: str, port: int, *, token: str | None, config: Config) -> StoreServer:
        """Start the server, or share the one that this process serves at that address with the same token.

        Raises AddressError if another process uses the port, or this process serves it with another token.
        """
        self._loop = background_loop().loop
        return await on_loop(self._loop, self._open(host, port, token, config))

    async def close(self) -> None:
        """Close the server unless other worlds of this process use it. A cancelled caller waits until it is closed."""
        if self._loop is None or self._loop.is_closed():
            return
        closing = on_loop(self._loop, self._close())
        try:
            # On Python 3.14 a task that is cancelled at once does not start.
            await asyncio.wait([closing])
        except asyncio.CancelledError:
            await asyncio.wait([closing])
            raise
        closing.result()

    async def _open(self, host: str, port: int, token: str | None, config: Config) -> StoreServer:
        servers = _servers.setdefault(asyncio.get_running_loop(), _Servers())
        async with servers.lock:
            shared = servers.by_address.get((host, port))
            if shared is None:
                # Only the ranks that serve a store need the server.
                from asyncdist.store.server.server import StoreServer

                server = await StoreServer.start(host, port, token=token, config=config, of_rank=True)
                shared = _Shared(server, token)
                servers.by_address[host, shared.server.port] = shared
            elif shared.token != token:
                raise AddressError(
                    f"this process already serves a store at {host}:{port} with another token; "
                    "use the same token, or another port"
                )
            shared.users += 1
            self._shared = shared
            return shared.server

    async def _close(self) -> None:
        servers = _servers.setdefault(asyncio.get_running_loop(), _Servers())
        async with servers.lock:
            shared, self._shared = self._shared, None
            if shared is None:
                return
            shared.users -= 1
            if shared.users == 0:
                servers.by_address = {key: other for key, other in servers.by_address.items() if other is not shared}
                await shared.server.close()
