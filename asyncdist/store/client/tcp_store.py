"""TCPStore: the blocking client of a store, with torch's name and arguments. The master also serves the store."""

from __future__ import annotations

import contextlib
import socket
import weakref
from typing import Any, TypeVar

from asyncdist.base import lifecycle
from asyncdist.base.background_loop import BackgroundLoop, background_loop
from asyncdist.base.deadline import Timeout, seconds
from asyncdist.base.descriptors import ClosingOnError
from asyncdist.base.lifecycle import WeakRegistry
from asyncdist.config import Config
from asyncdist.errors import AddressError, StoreTimeoutError, UsageError
from asyncdist.net.network import is_loopback, unguarded
from asyncdist.store.base import BlockingStream, Store
from asyncdist.store.client.blocking import BlockingConnection
from asyncdist.store.client.pending import ClientStream
from asyncdist.store.protocol.operations import Command
from asyncdist.store.protocol.streams import stream_buffer
from asyncdist.store.server import listener
from asyncdist.store.server.server import StoreServer

T = TypeVar("T")

_AT_EXIT = 1.0
"""Seconds for which a process waits for its connections to end when it exits."""
_WORKERS, _COMPLETE = "init/", "init/complete"
"""The key that counts the workers, as in torch's TCPStore, and the queue whose item releases the master."""


class TCPStore(Store):
    """A client of a store over TCP, with torch's name and arguments. The master also serves the store.

    Args:
        host_name: Where the store is. The master listens on loopback if this is a loopback name, else on every
            interface, which needs ASYNCDIST_TOKEN.
        port: The store's port. A master with port 0 takes any free port; read ``port``.
        world_size: With ``wait_for_workers``, the master's constructor returns when that many clients have connected.
        is_master: Serve the store in this process.
        timeout: Seconds or a timedelta, for connecting and for operations that name none.
        wait_for_workers: See ``world_size``.
        multi_tenant: A master that finds the port served already, for example by another master of this process,
            becomes a client.
        master_listen_fd: A bound socket that the master listens on. The store closes it.
        use_libuv: Ignored.
        token: The token; by default that of ``config``.
        config: Settings; by default those of the environment.

    Raises:
        AddressError: The host does not resolve, or the master's port is in use.
        UsageError: The master needs a token.
        AuthenticationError: The tokens differ.
        StoreConnectionError: No store has answered in time.
        StoreTimeoutError: Not all workers have connected in time.

    `close` the store after use. Garbage collection closes it as well.
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
        if not isinstance(host_name, str) or not hasattr(port, "__index__"):
            raise UsageError(f"TCPStore takes a host name and a whole number as port, not {host_name!r} and {port!r}")
        super().__init__(timeout)
        config = config or Config.from_environment()
        self._config = config
        self._token = config.token if token is None else token
        self._host = host_name
        self.server: EmbeddedServer | None = None
        if is_master:
            try:
                self.server = EmbeddedServer(host_name, port, token=self._token, config=config, fd=master_listen_fd)
                port = self.server.port
            except AddressError:
                if not multi_tenant or port == 0:
                    raise
        self._port = port
        reachable_host = self.server.reachable_host if self.server is not None else host_name
        self.connection = BlockingConnection(reachable_host, port, self._token, config)
        self._finalizer = weakref.finalize(self, BlockingConnection.close, self.connection)
        with ClosingOnError(self):
            self.connection.connect(timeout)
            if world_size is not None and world_size > 0 and wait_for_workers:
                self._meet(world_size, is_master)

    def _meet(self, world_size: int, is_master: bool) -> None:
        """Count this worker. The last worker releases the master."""
        if self.add(_WORKERS, 1) == world_size:
            self.queue_push(_COMPLETE, b"")
        if is_master:
            try:
                self.queue_pop(_COMPLETE)
            except StoreTimeoutError as error:
                connected = self.add(_WORKERS, 0)
                raise StoreTimeoutError(
                    f"TCPStore ({connected} of {world_size} workers connected)", (_WORKERS,), error.timeout
                ) from None

    @property
    def host(self) -> str:
        return self._host

    @property
    def port(self) -> int:
        return self._port

    def request(self, command: Command[T], timeout: Timeout = None) -> T:
        return self.connection.perform(command, self._timeout if timeout is None else seconds(timeout))

    def stream(self, command: Command[Any], hidden: str = "") -> BlockingStream[Any]:
        """Open a stream over a connection of its own: unread items do not delay other calls."""
        connection = self.connection.another(self._timeout)
        with ClosingOnError(connection):
            buffer = stream_buffer(command, hidden)
            return ClientStream(connection, command, buffer, self._timeout, self)

    def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, oldest first, without queues and the counter of the workers."""
        return [key for key in super().list_keys(prefix) if key != _WORKERS]

    def clone(self) -> TCPStore:
        """Return another client of the same store, with a connection and a timeout of its own."""
        return TCPStore(self.connection.host, self._port, timeout=self.timeout, token=self._token, config=self._config)

    def close(self) -> None:
        """Close the connection, and stop the server if this store runs it; waiting calls raise StoreConnectionError."""
        self.connection.close()
        self._finalizer.detach()
        if self.server is not None:
            self.server.close()

    def __repr__(self) -> str:
        return f"<TCPStore {self._host}:{self._port}{' (master)' if self.server is not None else ''}>"


class EmbeddedServer:
    """A server on the background loop of the process. It also closes when it is garbage-collected, and at exit.

    Clients of torch's TCPStore are refused, unless ``ASYNCDIST_STORE_C10D`` says otherwise.
    """

    def __init__(self, host: str, port: int, *, token: str | None, config: Config, fd: int | None = None) -> None:
        running = background_loop()
        sockets = [socket.socket(fileno=fd)] if fd is not None else []
        listen_host = _listen_host(host, port, token, config)
        server = running.run(
            StoreServer.start(listen_host, port, token=token, config=config, sockets=sockets, of_rank=True)
        )
        self.port = server.port
        self.reachable_host = _reachable(server.address)
        self._running = running
        self.server = server
        self._finalizer = weakref.finalize(self, _stop, running, server)
        self._finalizer.atexit = False
        _open.add(self)

    def close(self, timeout: float | None = None) -> None:
        """Stop the server and return when its connections have ended, or after ``timeout`` seconds. May be called again."""
        _open.discard(self)
        if self._finalizer.detach() is not None and not self._running.closed:
            with contextlib.suppress(TimeoutError):
                self._running.run(self.server.close(), timeout)


_open: WeakRegistry[EmbeddedServer] = WeakRegistry()


def _close_all() -> None:
    for embedded in _open.living():
        embedded.close(_AT_EXIT)


lifecycle.at_exit(lifecycle.Stage.SERVERS, _close_all)


def _stop(running: BackgroundLoop, server: StoreServer) -> None:
    """Stop the server without waiting: the garbage collector may call this on any thread, also the loop's."""
    if not running.closed:
        running.submit(server.close())


def _listen_host(host: str, port: int, token: str | None, config: Config) -> str:
    """Return the host to listen on for clients that connect to ``host``.

    A name that other hosts resolve to this host's network address may resolve to loopback here (by /etc/hosts). With a
    token, the server therefore listens on every interface. Without a token the server accepts only loopback addresses.
    """
    if is_loopback(host) or unguarded([host], token, config):
        return host
    listener.resolve_listen_address(host, port)  # a misspelt name fails here, and not on the other ranks
    return ""


def _reachable(address: str) -> str:
    """Return an address at which this process reaches a server that listens at ``address``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
