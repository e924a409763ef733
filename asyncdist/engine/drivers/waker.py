"""Wakes a thread that sleeps in ``poll``."""

from __future__ import annotations

import contextlib
import math
import os
import select

from asyncdist.engine.machine import READ
from asyncdist.transport.base import Wait


class Waker:
    """A descriptor that wakes a thread from its poll."""

    def __init__(self) -> None:
        self._poll: select.poll | None = None
        self._waits: list[Wait] = []
        if hasattr(os, "eventfd"):
            self.reader = self.writer = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.reader, self.writer = os.pipe()
            os.set_blocking(self.reader, False)
            os.set_blocking(self.writer, False)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self.writer, b"\1\0\0\0\0\0\0\0")

    def sleep(self, waits: list[Wait], seconds: float) -> list[int] | None:
        """Sleep until a descriptor is ready, `ring` is called, or time is up; return the ready ones, None after `ring`."""
        poll = self._poll
        if poll is None or waits != self._waits:
            poll, self._waits = select.poll(), waits
            poll.register(self.reader, READ)
            for descriptor, events in waits:
                poll.register(descriptor, events)
            self._poll = poll
        ready = [fd for fd, _ in poll.poll(None if seconds == math.inf else max(0, math.ceil(seconds * 1e3)))]
        if self.reader in ready:
            os.read(self.reader, 64)
            return None
        return ready

    def __del__(self) -> None:  # until then another thread may call `ring`
        for descriptor in {self.reader, self.writer}:
            os.close(descriptor)
