"""Threads that drive their operations themselves, so that these do not wake the event loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from threading import get_ident

from asyncdist.base.callables import Callback


class Promises:
    """The threads that have promised to drive what they start. Thread-safe.

    Args:
        hand_over: Called at the end of each promise: lets another driver continue what is pending.
    """

    def __init__(self, hand_over: Callback) -> None:
        self._hand_over = hand_over
        self._threads: set[int] = set()

    def is_made_here(self) -> bool:
        """Return whether the calling thread has made a promise."""
        return bool(self._threads) and get_ident() in self._threads

    @contextlib.contextmanager
    def make(self, *, made: bool = True) -> Iterator[None]:
        """Let the calling thread promise, within this context, to wait for each operation that it starts.

        It does nothing else that lasts. Without ``made`` it has made no promise there: it waits for something else.
        """
        thread = get_ident()
        before = thread in self._threads
        self._set(thread, made)
        try:
            yield
        finally:
            self._set(thread, before)

    def _set(self, thread: int, made: bool) -> None:
        if made:
            self._threads.add(thread)
        elif thread in self._threads:
            self._threads.discard(thread)
            self._hand_over()
