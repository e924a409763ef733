"""Adaptive busy polling of an event loop, for a peer that sends one message after the other.

Two such peers spend most of their time waiting for each other to wake up. After a streak of messages of one peer the loop
polls for a moment instead of sleeping, and finds the next message at once. Each time that no message arrives while it
polls, the streak that it needs doubles. The store server does this in a process of its own only (`daemon`), and
`asyncdist.net` wherever remote calls are made.
"""

from __future__ import annotations

import asyncio
import os
import time

from asyncdist.config import Config

_FIRST_STREAK, _LONGEST_STREAK = 8, 256
"""Consecutive messages of one peer before the loop polls: at first, and at most."""

_LONGEST_POLL = 100e-6
"""Seconds: two or three times the time between an answer and the peer's next message."""


class AdaptiveBusyPoll:
    """Keeps ``loop`` polling for up to ``seconds`` after each message of the only active peer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._peer: object = None
        self._streak = 0
        self._needed_streak = _FIRST_STREAK
        self._polling = False
        self._until = 0.0

    @classmethod
    def where_it_pays(cls, loop: asyncio.AbstractEventLoop, config: Config) -> AdaptiveBusyPoll | None:
        """Return one; None with one core, or if ASYNCDIST_SPIN_US is 0."""
        seconds = min(config.spin_us * 1e-6, _LONGEST_POLL)
        return cls(loop, seconds) if seconds > 0 and (os.cpu_count() or 1) > 1 else None

    def heard(self, peer: object) -> None:
        """Count a message of ``peer``, or of several peers (None) in one iteration."""
        if peer is None or peer is not self._peer:
            self._peer = peer
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
            # The peer may wait for this core.
            os.sched_yield()
            self._loop.call_soon(self._poll)
            return
        self._polling = False
        self._peer = None
        self._needed_streak = min(2 * self._needed_streak, _LONGEST_STREAK)
