"""Adaptive busy polling of the event loop, for a client that sends one request after the other.

Such a client spends most of its time waiting for two processes to wake up. After a number of consecutive requests of one
client the loop polls for a moment instead of sleeping, and finds the next request at once. When polling is in vain, the
number of requests that it takes doubles. Only a server in a process of its own does this (`daemon`).
"""

from __future__ import annotations

import asyncio
import os
import time

from asyncdist.config import Config

_FIRST_ROW, _LONGEST_ROW = 8, 256
"""Requests in a row before the loop stays awake: at first, and at most after that has been in vain."""

_LONGEST_LOOK = 100e-6
"""Seconds: two or three times what a client needs to take a reply and to ask again."""


class AdaptiveBusyPoll:
    """Keeps ``loop`` awake for up to ``seconds`` after each request of a client that talks alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._talking: object = None
        self._row = 0
        self._wanted = _FIRST_ROW
        self._awake = False
        self._until = 0.0

    @classmethod
    def where_it_pays(cls, loop: asyncio.AbstractEventLoop, config: Config) -> AdaptiveBusyPoll | None:
        """Return one for a server in a process of its own; None where cores are too few, or waiting is not to spin."""
        seconds = min(config.spin_us * 1e-6, _LONGEST_LOOK)
        return cls(loop, seconds) if seconds > 0 and (os.cpu_count() or 1) > 1 else None

    def heard(self, client: object) -> None:
        """Take note of a request; None stands for several clients that have spoken at one time."""
        if client is None or client is not self._talking:
            self._talking = client
            self._row = 0
            self._until = 0.0
            return
        self._row += 1
        if self._awake:
            self._wanted = _FIRST_ROW
            self._until = time.monotonic() + self._seconds
        elif self._row >= self._wanted:
            self._awake = True
            self._until = time.monotonic() + self._seconds
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Have the loop look for what has come, without sleeping, until it is in vain."""
        if time.monotonic() < self._until:
            self._loop.call_soon(self._look)
            return
        self._awake = False
        self._talking = None
        self._wanted = min(2 * self._wanted, _LONGEST_ROW)
