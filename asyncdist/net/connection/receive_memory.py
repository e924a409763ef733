"""Memory for long messages, which is used again when the program has dropped what it received.

New memory costs more than the copy into it: the system clears each page when it is first written. So the memory of a
message goes back to a pool when the last object that refers to it has gone. The pool keeps at most `MOST_KEPT_NBYTES`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np

MOST_KEPT_NBYTES = 64 << 20
_LEAST_NBYTES = 64 << 10
"""Smaller memory comes from the allocator, which keeps it itself."""


class ReceiveMemory:
    """The pool of one process. Any thread may take and release memory."""

    def __init__(self, most_kept_nbytes: int = MOST_KEPT_NBYTES) -> None:
        self._most = most_kept_nbytes
        self._lock = threading.Lock()
        self._kept: deque[np.ndarray] = deque()
        self._released: deque[np.ndarray] = deque()
        """Memory to add to `_kept`. A finalizer may run in any thread, also in the middle of `take`."""

    @property
    def kept_nbytes(self) -> int:
        with self._lock:
            self._collect()
            return sum(each.nbytes for each in self._kept)

    def take(self, nbytes: int) -> memoryview:
        """Return writable memory of undefined content."""
        if nbytes < _LEAST_NBYTES:
            return np.empty(nbytes, dtype=np.uint8).data
        whole_nbytes = -(-nbytes // _LEAST_NBYTES) * _LEAST_NBYTES
        whole = self._take_kept(whole_nbytes)
        if whole is None:
            whole = np.empty(whole_nbytes, dtype=np.uint8)
        # Each user of the memory refers to this array, and the array refers to the whole.
        lent = np.ndarray.__new__(_Lent, (nbytes,), np.uint8, whole)
        weakref.finalize(lent, self._released.append, whole).atexit = False
        return lent.data

    def _take_kept(self, nbytes: int) -> np.ndarray | None:
        with self._lock:
            self._collect()
            # The memory that was released last is the most likely to be in the cache.
            for place in range(len(self._kept) - 1, -1, -1):
                if self._kept[place].nbytes == nbytes:
                    whole = self._kept[place]
                    del self._kept[place]
                    return whole
        return None

    def _collect(self) -> None:
        while self._released:
            self._kept.append(self._released.popleft())
        total = sum(each.nbytes for each in self._kept)
        while total > self._most:
            total -= self._kept.popleft().nbytes


class _Lent(np.ndarray):
    """An array over memory of the pool."""


receive_memory = ReceiveMemory()
"""The pool of this process."""
