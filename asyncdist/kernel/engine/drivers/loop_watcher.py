"""Registers the descriptors and the timer of one machine on an event loop."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from time import monotonic

from asyncdist.kernel.engine.machine import READ, WRITE


class LoopWatcher:
    """Makes a loop call ``on_event(descriptor)`` for a ready descriptor, and ``on_event(None)`` when the timer fires.

    Only the loop's thread calls the methods, except `retire`.
    """

    def __init__(self, on_event: Callable[[int | None], None]) -> None:
        self._on_event = on_event
        self.watched: dict[int, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._retired: list[socket.socket] = []

    @property
    def is_registered(self) -> bool:
        """Whether the loop holds a descriptor, a timer or a retired socket of the machine."""
        return bool(self.watched or self._timer or self._retired)

    def retire(self, sock: socket.socket) -> bool:
        """Close a socket, if necessary once it is no longer watched; return whether the close is still pending."""
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
                try:
                    self._change(loop, fd, before, after)
                except RuntimeError:
                    # uvloop ends the watch of a broken connection after one event. It begins a new one only after this.
                    self._change(loop, fd, READ | WRITE, 0)
                    self._change(loop, fd, 0, after)
            self.watched = wanted
        while self._retired:
            self._retired.pop().close()

    def _change(self, loop: asyncio.AbstractEventLoop, fd: int, before: int, after: int) -> None:
        if after & READ and not before & READ:
            loop.add_reader(fd, self._on_event, fd)
        elif before & READ and not after & READ:
            loop.remove_reader(fd)
        if after & WRITE and not before & WRITE:
            loop.add_writer(fd, self._on_event, fd)
        elif before & WRITE and not after & WRITE:
            loop.remove_writer(fd)

    def set_timer(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """Set the timer to a monotonic time; infinity removes it."""
        if self._timer is not None:
            if self._timer_at == at:
                return
            self._timer.cancel()
            self._timer = None
        if at != math.inf:
            self._timer_at = at
            self._timer = loop.call_later(max(0.0, at - monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._on_event(None)

    def forget(self) -> None:
        """Drop all registrations without touching the loop, which is closed."""
        self.watched, self._timer, self._timer_at = {}, None, math.inf

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Remove all registrations from the loop."""
        self.set_timer(loop, math.inf)
        if loop.is_closed():
            self.watched = {}
        self.watch(loop, {})
