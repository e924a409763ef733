"""Registers the descriptors and the timer of one machine on an event loop. Used by `progress` and `idle_watch`."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from time import monotonic

from asyncdist.engine.machine import READ, WRITE


class LoopWatcher:
    """Makes a loop call ``found(descriptor)`` when a watched descriptor is ready, and ``found(None)`` when the timer fires.

    Only the loop's thread calls the methods, except `retire`.
    """

    def __init__(self, found: Callable[[int | None], None]) -> None:
        self._found = found
        self.watched: dict[int, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._retired: list[socket.socket] = []

    @property
    def looks(self) -> bool:
        """Whether the loop holds a descriptor, a timer or a retired socket of the machine."""
        return bool(self.watched or self._timer or self._retired)

    def retire(self, sock: socket.socket) -> bool:
        """Close a socket, or if it is watched, once it is not; return whether the close is still pending."""
        if sock.fileno() in self.watched:
            self._retired.append(sock)
            return True
        sock.close()
        return False

    def watch(self, loop: asyncio.AbstractEventLoop, wanted: dict[int, int]) -> None:
        """Watch exactly these descriptors, each for its poll events."""
        watched = self.watched
        if wanted != watched:
            for fd in watched.keys() | wanted.keys():
                before, after = watched.get(fd, 0), wanted.get(fd, 0)
                if after & READ and not before & READ:
                    loop.add_reader(fd, self._found, fd)
                elif before & READ and not after & READ:
                    loop.remove_reader(fd)
                if after & WRITE and not before & WRITE:
                    loop.add_writer(fd, self._found, fd)
                elif before & WRITE and not after & WRITE:
                    loop.remove_writer(fd)
            self.watched = wanted
        while self._retired:
            self._retired.pop().close()

    def set_timer(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """Set the timer to a monotonic time, in place of the previous one; infinity for no timer."""
        if self._timer is not None:
            if self._timer_at == at:
                return
            self._timer.cancel()
            self._timer = None
        if at != math.inf:
            self._timer_at = at
            self._timer = loop.call_later(max(0.0, at - monotonic()), self._timed)

    def _timed(self) -> None:
        self._timer = None
        self._found(None)

    def forget(self) -> None:
        """Drop all registrations without touching the loop, which is closed."""
        self.watched, self._timer, self._timer_at = {}, None, math.inf

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Remove all registrations from the loop."""
        self.set_timer(loop, math.inf)
        if loop.is_closed():
            self.watched = {}
        self.watch(loop, {})
