"""The store as a process of its own, which outlives the workers: `asyncdist store serve` calls `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncdist.base.background_loop import cancel_all
from asyncdist.config import Config
from asyncdist.environment import Service
from asyncdist.errors import AddressError
from asyncdist.store.persistence.group_commit import Fsync
from asyncdist.store.server import listener
from asyncdist.store.server.metrics import Metrics, check_available
from asyncdist.store.server.server import StoreServer

logger = logging.getLogger(__name__)

_FIRST_LISTEN_FD = 3


@dataclass(frozen=True, slots=True)
class Options:
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
        signals = stack.enter_context(_signals(loop, ends_process=options.own_process))
        sockets = _sockets_of_systemd(options.service)
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
        _notify_systemd(options.service, "READY=1")
        # The journal fails when the server's data cannot be written any more.
        failure = [asyncio.shield(server.durability.failure)] if server.durability is not None else []
        await _first_of(signals.get(), *failure)
        logger.info("store at %s:%d stops", server.host, server.port)
        _notify_systemd(options.service, "STOPPING=1")
        await _first_of(signals.get(), server.drain(options.drain_timeout))


def _unix_and_tcp(stack: contextlib.AsyncExitStack, unix: Path, host: str | None, port: int) -> list[socket.socket]:
    """Listen on a socket file, which ``stack`` removes, and at the address of the host, if there is one."""
    sockets = [stack.enter_context(listener.unix_socket(unix))]
    stack.callback(unix.unlink, missing_ok=True)
    if host is not None:
        sockets += listener.listening_sockets(host, port, listener.resolve_listen_address(host, port))
    return sockets


# -- systemd's protocols -----------------------------------------------------------------------------


def _sockets_of_systemd(service: Service) -> list[socket.socket]:
    """Return the listening sockets that systemd opened for this process. Raises AddressError for other descriptors."""
    if service.listen_pid != os.getpid():
        return []
    sockets = []
    for fd in range(_FIRST_LISTEN_FD, _FIRST_LISTEN_FD + service.listen_fds):
        try:
            sock = socket.socket(fileno=fd)
            listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise AddressError(
                f"descriptor {fd} of LISTEN_FDS is not a socket ({error.strerror}): check the .socket unit"
            ) from None
        if not listening or sock.type != socket.SOCK_STREAM:
            raise AddressError(
                f"descriptor {fd} of LISTEN_FDS does not listen: the .socket unit needs ListenStream= and no Accept="
            )
        os.set_inheritable(fd, False)
        sock.setblocking(False)
        sockets.append(sock)
    return sockets


def _notify_systemd(service: Service, state: str) -> None:
    """Send systemd a state such as ``READY=1`` if NOTIFY_SOCKET is set. Errors are ignored."""
    address = service.notify_socket
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


# -- the end -------------------------------------------------------------------------------------------

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, *, ends_process: bool) -> Iterator[asyncio.Queue[int]]:
    """Queue SIGTERM and SIGINT; ignore them afterwards if the process ends with the daemon."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in _SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        yield signals
    finally:
        # The loop restores handlers that end the process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            if ends_process:
                signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait until one of these is done, cancel the others, and raise its error if it has failed."""
    futures = [asyncio.ensure_future(each) for each in awaitables]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(*futures)
    for each in done:
        each.result()
