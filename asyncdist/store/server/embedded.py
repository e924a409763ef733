"""A store server inside a blocking program: it runs on the background loop of the process.

Called by the blocking `TCPStore` and by the rendezvous.
"""

from __future__ import annotations

import contextlib
import socket
import weakref

from asyncdist.base import lifecycle
from asyncdist.base.background_loop import BackgroundLoop, background_loop
from asyncdist.base.lifecycle import WeakRegistry
from asyncdist.config import Config
from asyncdist.net.network import is_loopback, unguarded
from asyncdist.store.c10d_policy import for_ranks
from asyncdist.store.server import listener
from asyncdist.store.server.server import StoreServer

_AT_EXIT = 1.0
"""Seconds for which a process waits for its connections to end when it exits."""


class EmbeddedServer:
    """A server on the background loop. It also closes when it is garbage-collected, and at exit.

    Clients of torch's TCPStore are refused, unless ``ASYNCDIST_STORE_C10D`` says otherwise.
    """

    def __init__(self, host: str, port: int, *, token: str | None, config: Config, fd: int | None = None) -> None:
        running = background_loop()
        sockets = [socket.socket(fileno=fd)] if fd is not None else []
        listen_host = _listen_host(host, port, token, config)
        server = running.run(
            StoreServer.start(listen_host, port, token=token, config=for_ranks(config), sockets=sockets)
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
