"""Accepts the connections of a listening socket, and handles each one in a task.

A connection that has not proven the token is handled for a limited time, and gives way when there are too many.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from asyncdist.base.error_text import describe_error
from asyncdist.errors import AsyncdistError
from asyncdist.net import listening
from asyncdist.net.admission import EvictingQueue
from asyncdist.net.listening import ListeningSocket
from asyncdist.net.network import peer_name
from asyncdist.net.refusals import RefusalLog

log = logging.getLogger("asyncdist")

_AT_A_TIME = 64
"""Accepts in one go, before other callbacks of the loop get their turn."""


class Acceptor:
    """Accepts from its creation until `stop`. It owns the listening socket, and closes it. Used on ``loop`` alone.

    ``begin`` authenticates the other side of a connection within ``timeout`` seconds, and closes the connection if it
    raises. What it returns, if anything, is awaited without that limit. At most ``most`` connections may be without proof:
    a further one evicts the oldest. ``what`` listens, for the log.
    """

    def __init__(
        self,
        sock: socket.socket,
        begin: Callable[[socket.socket], Coroutine[Any, Any, Coroutine[Any, Any, None] | None]],
        *,
        what: str,
        most: int,
        timeout: float,
        loop: asyncio.AbstractEventLoop,
        refusals: RefusalLog | None = None,
    ) -> None:
        self._begin = begin
        self._listening = ListeningSocket(sock, what, self._make_room)
        self._what, self._timeout, self._loop = what, timeout, loop
        self._refusals = refusals or RefusalLog(log, what)
        self._tasks: dict[asyncio.Task[None], socket.socket | None] = {}
        """The tasks, each with its socket until it begins: a task that is cancelled before executes no line."""
        self._unproven: EvictingQueue[asyncio.Task[None]] = EvictingQueue(most, self._evict)
        self._resuming: asyncio.TimerHandle | None = None
        self._resume()

    def stop(self) -> list[asyncio.Task[None]]:
        """Accept nothing more. Cancel all tasks, and return them: they end in the next turns of the loop. Idempotent."""
        if self._resuming is not None:
            self._resuming.cancel()
        elif self._listening.sock.fileno() >= 0:
            self._loop.remove_reader(self._listening.sock.fileno())
        self._listening.sock.close()
        self._refusals.flush()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    # A callback rather than a task, which an interrupt (KeyboardInterrupt) would end for good.
    def _accept(self) -> None:
        try:
            for sock in self._listening.pending(_AT_A_TIME):
                task = self._loop.create_task(self._handle(sock))
                self._tasks[task] = sock
                task.add_done_callback(self._end_task)
                self._unproven.add(task)
        except OSError:
            self._loop.remove_reader(self._listening.sock.fileno())
            self._resuming = self._loop.call_later(listening.ACCEPT_AGAIN, self._resume)

    def _make_room(self, error: OSError) -> bool:
        return self._unproven.evict_oldest(older_than=listening.ACCEPT_AGAIN)

    def _resume(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._listening.sock.fileno(), self._accept)

    async def _handle(self, sock: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        who = peer_name(sock)
        try:
            async with asyncio.timeout(self._timeout):
                serving = await self._begin(sock)
        except TimeoutError:
            self._refusals.add(f"no proof of the token within {self._timeout:g} s (ASYNCDIST_HANDSHAKE_TIMEOUT)", who)
            return
        except (OSError, EOFError, AsyncdistError) as error:
            self._refusals.add(describe_error(error), who)
            return
        finally:
            self._unproven.discard(task)
        if serving is not None:
            await serving

    def _evict(self, task: asyncio.Task[None]) -> None:
        self._refusals.add("it had not proven the token, and too many connections had not")
        task.cancel()

    def _end_task(self, task: asyncio.Task[None]) -> None:
        unbegun = self._tasks.pop(task)
        self._unproven.discard(task)
        if unbegun is not None:
            unbegun.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed to handle a connection", self._what, exc_info=error)
