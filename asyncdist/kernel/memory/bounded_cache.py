"""The cache of prepared calls and of views of peers' memory: a dictionary of bounded size that forgets its oldest entry.

Programs repeat the same calls, so the order of eviction matters little. The bound matters for programs whose shapes never
repeat.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dictionary with at most ``size`` entries."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def add(self, key: K, value: V) -> V:
        """Add an entry, forget the oldest entries if there are too many, and return the value. Thread-safe."""
        while len(self) >= self._size:
            # Another thread may add or forget an entry at the same time.
            with contextlib.suppress(RuntimeError, StopIteration):
                self.pop(next(iter(self)), None)
        self[key] = value
        return value
