"""Adaptive busy polling of the event loop, for a client that sends one request after the other.

Such a client spends most of its time waiting for two processes to wake up. After a streak of requests of one client the
loop polls for a moment instead of sleeping, and finds the next request at once. Each time that no request arrives while
it polls, the streak that it needs doubles. Only a server in a process of its own does this (`daemon`).
"""

from __future__ import annotations

import asyncio
import os
import time

from asyncdist.config import Config

_FIRST_STREAK, _LONGEST_STREAK = 8, 256
"""Consecutive requests of one client before the loop polls: at first, and at most."""

_LONGEST_POLL = 100e-6
"""Seconds: two or three times the time between a reply and the client's next request."""


class AdaptiveBusyPoll:
    """Keeps ``loop`` polling for up to ``seconds`` after each request of the only active client."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._client: object = None
        self._streak = 0
        self._needed_streak = _FIRST_STREAK
        self._polling = False
        self._until = 0.0

    @classmethod
    def where_it_pays(cls, loop: asyncio.AbstractEventLoop, config: Config) -> AdaptiveBusyPoll | None:
        """Return one for a server in a process of its own; None with one core, or if ASYNCDIST_SPIN_US is 0."""
        seconds = min(config.spin_us * 1e-6, _LONGEST_POLL)
        return cls(loop, seconds) if seconds > 0 and (os.cpu_count() or 1) > 1 else None

    def heard(self, client: object) -> None:
        """Count a request of ``client``, or of several clients (None) in one iteration."""
        if client is None or client is not self._client:
            self._client = client
            self._streak = 0
            self._until = 0.0
            return
        self._streak += 1
        if self._polling:
            self._needed_streak = _FIRST_STREAK
            self._until = time.monotonic() + self._seconds
        elif self._streak >= self._needed_streak:
            self._polling = True
            self._until = time.monotonic() + self._seconds
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """Make the loop poll once more without sleeping, until the time is over."""
        if time.monotonic() < self._until:
            self._loop.call_soon(self._poll)
            return
        self._polling = False
        self._client = None
        self._needed_streak = min(2 * self._needed_streak, _LONGEST_STREAK)
