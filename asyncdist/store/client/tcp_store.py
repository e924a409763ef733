"""TCPStore: the blocking client of a store, with torch's name and arguments, and the server too where it is master.

Users' programs create it.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from asyncdist.base.deadline import Timeout, seconds
from asyncdist.config import Config
from asyncdist.errors import AddressError, StoreTimeoutError
from asyncdist.store.base import BlockingStream, Store, Subscription, Watch
from asyncdist.store.client.blocking import BlockingConnection
from asyncdist.store.client.pending import ClientStream, StreamBuffer, SubscriptionBuffer, WatchBuffer
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.operations import Command
from asyncdist.store.server.embedded import EmbeddedServer

T = TypeVar("T")

_WORKERS, _WORKERS_COMPLETE = "init/", "init/complete"


class TCPStore(Store):
    """A store over TCP, with torch's name and arguments; with ``is_master``, also its server, in this process.

    ``host_name`` and ``port`` say where the store is, or for the master where it is to be: port 0 takes any free one
    (read ``.port``), and a host other than loopback has the master listen on every interface, which needs
    ASYNCDIST_TOKEN. With ``world_size`` and ``wait_for_workers``, the master returns when so many have connected.
    ``timeout`` is for connecting and for operations that name none. With ``multi_tenant``, a master that finds the
    port served already (by another master in this process, say) becomes its client. ``master_listen_fd`` is a bound
    socket to listen on. ``use_libuv`` is accepted and means nothing here.

    Raises AddressError, UsageError, AuthenticationError, StoreConnectionError, and StoreTimeoutError when not all
    workers came. `close` it in the end, or let it be collected.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = 300.0,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        token: str | None = None,
        config: Config | None = None,
    ) -> None:
        super().__init__(timeout)
        config = config or Config.from_environment()
        self._token = config.token if token is None else token
        self._host = host_name
        self._server: EmbeddedServer | None = None
        if is_master:
            try:
                self._server = EmbeddedServer(host_name, port, token=self._token, config=config, fd=master_listen_fd)
                port = self._server.port
            except AddressError:
                if not multi_tenant or port == 0:
                    raise
        self._port = port
        try:
            reached = self._server.reachable_host if self._server is not None else host_name
            self._connection = BlockingConnection.open(reached, port, self._token, timeout, config)
            self._finalizer = weakref.finalize(self, BlockingConnection.close, self._connection)
            if world_size is not None and world_size > 0 and wait_for_workers:
                self._meet(world_size, is_master)
        except BaseException:
            self.close()
            raise

    def _meet(self, world_size: int, is_master: bool) -> None:
        """Count this worker; the last worker releases the master."""
        if self.add(_WORKERS, 1) == world_size:
            self.set(_WORKERS_COMPLETE, b"")
        if is_master:
            try:
                self.wait([_WORKERS_COMPLETE])
            except StoreTimeoutError as error:
                came = self.add(_WORKERS, 0)
                raise StoreTimeoutError(
                    f"TCPStore ({came} of {world_size} workers connected)", (_WORKERS,), error.timeout
                ) from None

    @property
    def host(self) -> str:
        return self._host

    @property
    def port(self) -> int:
        return self._port

    def request(self, command: Command[T], timeout: Timeout = None) -> T:
        return self._connection.perform(command, self._timeout if timeout is None else seconds(timeout))

    def subscribe(self, channel: str) -> Subscription:
        """Start to listen to a channel, over a connection of its own: messages not yet read hold up nothing else."""
        return self._apart(operations.subscribe(channel), SubscriptionBuffer())

    def watch(self, key: str) -> Watch:
        """Watch a key, over a connection of its own."""
        return self._apart(operations.watch(key), WatchBuffer())

    def _apart(self, command: Command[Any], arrivals: StreamBuffer[T]) -> BlockingStream[T]:
        connection = self._connection.another(self._timeout)
        try:
            return ClientStream(connection, command, arrivals, self._timeout, store=self, owned=True)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Close the connection, and stop the server if this store runs it; waiting calls raise StoreConnectionError."""
        if hasattr(self, "_connection"):
            self._connection.close()
        if hasattr(self, "_finalizer"):
            self._finalizer.detach()
        if self._server is not None:
            self._server.close()

    def __repr__(self) -> str:
        return f"<TCPStore {self._host}:{self._port}{' (master)' if self._server is not None else ''}>"
