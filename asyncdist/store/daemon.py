"""The store as a program of its own: it outlives every worker, and ends when it is told to."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from asyncdist.config import Config
from asyncdist.store.server import StoreServer

logger = logging.getLogger(__name__)


async def serve(
    host: str,
    port: int,
    *,
    token: str | None,
    config: Config,
    ready: Callable[[str, int], None] = lambda host, port: None,
) -> None:
    """Serve a store at ``host:port`` until SIGTERM or SIGINT, or until cancelled; then close it and return.

    Call it on the main thread's loop. ``ready`` is told the host and the port (a chosen one for port 0) once clients
    can connect. Raises AddressError and UsageError as `StoreServer.start` does.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    async with await StoreServer.start(host, port, token=token, config=config) as server:
        server.stays = True
        for number in signals:
            loop.add_signal_handler(number, stop.set)
        try:
            ready(server.host, server.port)
            await stop.wait()
            logger.info("store at %s:%d stops", server.host, server.port)
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
