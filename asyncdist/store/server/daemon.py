"""The store as a process of its own, which outlives the workers: `asyncdist store serve` calls `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncdist.config import Config
from asyncdist.environment import Service
from asyncdist.store.persistence.group_commit import Fsync
from asyncdist.store.server import listener, systemd
from asyncdist.store.server.metrics import Metrics, check_available
from asyncdist.store.server.server import StoreServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a daemon, all of them optional."""

    unix: Path | None = None
    """A socket file on which the daemon also listens. Only users who may write it can connect."""
    data: Path | None = None
    """The folder of the journal."""
    fsync: Fsync = Fsync.ALWAYS
    metrics_port: int | None = None
    drain_timeout: float = 5.0
    """Seconds for which the daemon sends pending replies after the first signal."""
    service: Service = field(default_factory=Service)
    """systemd's variables. If systemd opened sockets, the server listens on these instead of on the address."""
    own_process: bool = False
    """Whether the process ends with the daemon. After the daemon's end it ignores SIGTERM and SIGINT."""


async def serve(
    host: str | None,
    port: int,
    *,
    token: str | None,
    config: Config,
    ready: Callable[[str, int], None] = lambda host, port: None,
    options: Options | None = None,
) -> None:
    """Serve a store at ``host:port`` until SIGTERM or SIGINT, or until cancelled; then close it and return.

    Without a ``host``, the server listens only on the sockets of the options. After the first signal it accepts no
    connection, sends the pending replies, and returns; after the second it returns at once. Call this function on the
    main thread's loop. It calls ``ready`` with the host and the port (the chosen one for port 0) once clients can connect.

    Raises AddressError, UsageError and JournalError as `StoreServer.start` does, and JournalError also later, if the
    data cannot be written any more.
    """
    options = options or Options()
    if options.metrics_port is not None:
        check_available()
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        stop = _Stop(loop, ends_process=options.own_process)
        stack.callback(stop.close)
        sockets = systemd.inherited(options.service)
        if sockets:
            host = None
        if options.unix is not None:
            sockets += _unix_and_tcp(stack, options.unix, host, port)
        server = await StoreServer.start(
            host or "",
            port,
            token=token,
            config=config,
            sockets=sockets,
            data=options.data,
            fsync=options.fsync,
            stays=True,
            polls=True,
        )
        stack.push_async_callback(server.close)
        if options.metrics_port is not None:
            metrics_host = server.host if server.port else "127.0.0.1"  # a server of a socket file has no port
            metrics = await Metrics.start(server, metrics_host, options.metrics_port)
            stack.push_async_callback(metrics.close)
        ready(server.host, server.port)
        systemd.notify(options.service, "READY=1")
        await stop.first_signal(server)
        logger.info("store at %s:%d stops", server.host, server.port)
        systemd.notify(options.service, "STOPPING=1")
        await stop.until_second_signal(server.drain(options.drain_timeout))


def _unix_and_tcp(stack: contextlib.AsyncExitStack, unix: Path, host: str | None, port: int) -> list[socket.socket]:
    """Listen on a socket file, which ``stack`` removes, and at the address of the host, if there is one."""
    sockets = [stack.enter_context(listener.unix_socket(unix))]
    stack.callback(unix.unlink, missing_ok=True)
    if host is not None:
        sockets += listener.listening_sockets(host, port, listener.resolve_listen_address(host, port))
    return sockets


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Stop:
    """SIGTERM and SIGINT: the first drains the server, the second ends it at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, ends_process: bool) -> None:
        self._loop = loop
        self._ends_process = ends_process
        self._signals: asyncio.Queue[int] = asyncio.Queue()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signals.put_nowait, number)

    async def first_signal(self, server: StoreServer) -> None:
        """Return on the first signal.

        Raises:
            JournalError: The server's data cannot be written any more.
        """
        failure = [asyncio.shield(server.durability.failure)] if server.durability is not None else []
        await _first_of(self._signals.get(), *failure)

    async def until_second_signal(self, draining: Coroutine[Any, Any, None]) -> None:
        """Wait for ``draining``, or until the second signal."""
        await _first_of(self._signals.get(), draining)

    def close(self) -> None:
        """Remove the signal handlers; ignore the signals if the process ends with the daemon."""
        # The loop restores handlers that end the process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)
            if self._ends_process:
                signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait until one of these is done, cancel the others, and raise its error if it has failed."""
    futures = [asyncio.ensure_future(each) for each in awaitables]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in futures:
            each.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
    for each in done:
        each.result()
