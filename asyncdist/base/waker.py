"""Wakes a thread that sleeps in ``poll``."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence
from operator import itemgetter

from asyncdist.base.deadline import poll_timeout

_descriptor_of = itemgetter(0)
_KEPT_POLLS = 64
"""The number of sets of descriptors whose poll objects are kept."""


class Waker:
    reader = writer = -1

    def __init__(self) -> None:
        self._polls: dict[tuple[tuple[int, int], ...], select.poll] = {}
        if hasattr(os, "eventfd"):
            self.reader = self.writer = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.reader, self.writer = os.pipe()
            os.set_blocking(self.reader, False)
            os.set_blocking(self.writer, False)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self.writer, b"\1\0\0\0\0\0\0\0")

    def sleep(self, waits: Sequence[tuple[int, int]], seconds: float) -> list[int] | None:
        """Sleep until a descriptor is ready, `ring` is called, or time is up; return the ready ones, None after `ring`.

        ``waits`` are descriptors, each with its poll events. It may return before: see `LONGEST_SLEEP`.
        """
        # A signal handler in which this thread sleeps too needs a poll object of its own.
        poll = self._polls.pop(wanted := tuple(waits), None) or self._make_poll(wanted)
        reported = poll.poll(poll_timeout(seconds))
        self._polls[wanted] = poll
        ready = list(map(_descriptor_of, reported))
        if self.reader in ready:
            os.read(self.reader, 64)
            return None
        return ready

    def _make_poll(self, waits: tuple[tuple[int, int], ...]) -> select.poll:
        if len(self._polls) >= _KEPT_POLLS:
            self._polls.clear()
        poll = select.poll()
        poll.register(self.reader, select.POLLIN)
        for descriptor, events in waits:
            poll.register(descriptor, events)
        return poll

    def __del__(self) -> None:  # until then another thread may call `ring`
        # They are missing if the process could open no more.
        for descriptor in {self.reader, self.writer} - {-1}:
            os.close(descriptor)
