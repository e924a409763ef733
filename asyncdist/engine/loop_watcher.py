"""What an event loop looks out for on a machine's behalf: descriptors that become ready, and one point in time."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from time import monotonic

from asyncdist.engine.machine import READ, WRITE


class LoopWatcher:
    """Has a loop call ``found(descriptor)`` when a watched one is ready, and ``found(None)`` when it is time.

    On the loop's thread only, but for `retire`.
    """

    def __init__(self, found: Callable[[int | None], None]) -> None:
        self._found = found
        self.watched: dict[int, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._retired: list[socket.socket] = []

    @property
    def looks(self) -> bool:
        """Whether the loop has anything of ours."""
        return bool(self.watched or self._timer or self._retired)

    def retire(self, sock: socket.socket) -> bool:
        """Close a socket, if it is watched as soon as it is no more; return whether that is still to come."""
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
        """Be called at a monotonic time, and not at the one asked for before; infinity for never."""
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
        """Take what the loop was asked for as never asked: it was closed."""
        self.watched, self._timer, self._timer_at = {}, None, math.inf

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop look out for nothing."""
        self.set_timer(loop, math.inf)
        if loop.is_closed():
            self.watched = {}
        self.watch(loop, {})
