"""Accepts the connections of a listening socket, and handles each one in a task."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from asyncdist.base.error_text import describe_error

log = logging.getLogger("asyncdist")

_ACCEPT_AGAIN = 1.0
"""Seconds to pause when the process cannot accept a connection, for example without a free descriptor."""


class Acceptor:
    """Accepts from its creation until `stop`. It owns the listening socket, and closes it. Used on ``loop`` alone.

    Args:
        listening: The listening socket, which does not block.
        handle: Handles a connection, which it closes.
        what: What listens, for the log.
        most: The number of connections that are handled at a time. Further ones are closed.
        loop: The event loop.
    """

    def __init__(
        self,
        listening: socket.socket,
        handle: Callable[[socket.socket], Coroutine[Any, Any, None]],
        *,
        what: str,
        most: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._listening, self._handle, self._what, self._most, self._loop = listening, handle, what, most, loop
        self._handlers: set[asyncio.Task[None]] = set()
        self._accepting = loop.create_task(self._accept(), name="asyncdist-accept")
        # A task that is cancelled before it begins executes no line.
        self._accepting.add_done_callback(lambda _: listening.close())

    def stop(self) -> list[asyncio.Task[None]]:
        """Cancel all tasks, and return them: they end in the next turns of the loop."""
        tasks = [self._accepting, *self._handlers]
        for task in tasks:
            task.cancel()
        return tasks

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._listening)
            except OSError as error:
                log.error("%s cannot accept a connection: %s", self._what, describe_error(error))
                await asyncio.sleep(_ACCEPT_AGAIN)
                continue
            if len(self._handlers) >= self._most:
                sock.close()
                continue
            handler = self._loop.create_task(self._handle(sock))
            self._handlers.add(handler)
            handler.add_done_callback(functools.partial(self._end_handler, sock))

    def _end_handler(self, sock: socket.socket, handler: asyncio.Task[None]) -> None:
        self._handlers.discard(handler)
        # It may not have begun.
        if handler.cancelled():
            sock.close()
        elif (error := handler.exception()) is not None:
            log.error("%s failed to handle a connection", self._what, exc_info=error)
