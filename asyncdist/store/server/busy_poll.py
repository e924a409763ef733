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
"""Consecutive requests of one client before the loop polls: at first, and at most after polling in vain."""

_LONGEST_POLL = 100e-6
"""Seconds: two or three times the time between a reply and the client's next request."""


class AdaptiveBusyPoll:
    """Keeps ``loop`` polling for up to ``seconds`` after each request of a client that talks alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._talking: object = None
        self._row = 0
        self._wanted = _FIRST_ROW
        self._polling = False
        self._until = 0.0

    @classmethod
    def where_it_pays(cls, loop: asyncio.AbstractEventLoop, config: Config) -> AdaptiveBusyPoll | None:
        """Return one for a server in a process of its own; None with one core, or if ASYNCDIST_SPIN_US is 0."""
        seconds = min(config.spin_us * 1e-6, _LONGEST_POLL)
        return cls(loop, seconds) if seconds > 0 and (os.cpu_count() or 1) > 1 else None

    def heard(self, client: object) -> None:
        """Count a request; None stands for several clients in one iteration."""
        if client is None or client is not self._talking:
            self._talking = client
            self._row = 0
            self._until = 0.0
            return
        self._row += 1
        if self._polling:
            self._wanted = _FIRST_ROW
            self._until = time.monotonic() + self._seconds
        elif self._row >= self._wanted:
            self._polling = True
            self._until = time.monotonic() + self._seconds
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """Make the loop poll once more without sleeping, until the time is over."""
        if time.monotonic() < self._until:
            self._loop.call_soon(self._poll)
            return
        self._polling = False
        self._talking = None
        self._wanted = min(2 * self._wanted, _LONGEST_ROW)
