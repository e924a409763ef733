"""Registered memory for torch code that asks its back end for it, again and again for the same sizes, as FSDP2 may.

Making registered memory costs a system call and a fault a page. So what comes back is kept for the next one of its size.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque

import torch

from asyncdist import registered


class Lender:
    """Registered memory by size. It keeps no more than was ever lent at a time; all goes when it does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[torch.Tensor] = deque()
        self._returned: deque[torch.Tensor] = deque()  # by finalizers, which may run while we hold the lock
        self._kept_nbytes = self._lent_nbytes = self._most_nbytes = 0

    def lend(self, nbytes: int) -> torch.Tensor:
        """Return uninitialised bytes, which come back with the last tensor that shares them; SharedMemoryError if full."""
        with self._lock:
            self._settle()
            memory = self._take(nbytes)
            if memory is None:
                memory = registered.empty(nbytes, dtype=torch.uint8)
            self._lent_nbytes += nbytes
            self._most_nbytes = max(self._most_nbytes, self._lent_nbytes)
        loan = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
        weakref.finalize(loan, self._returned.append, memory).atexit = False
        return torch.frombuffer(loan, dtype=torch.uint8)

    def _settle(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._lent_nbytes -= memory.nbytes
            self._kept_nbytes += memory.nbytes
            self._kept.append(memory)
        while self._kept_nbytes + self._lent_nbytes > self._most_nbytes:
            self._kept_nbytes -= self._kept.popleft().nbytes

    def _take(self, nbytes: int) -> torch.Tensor | None:
        for place, memory in enumerate(self._kept):
            if memory.nbytes == nbytes:
                del self._kept[place]
                self._kept_nbytes -= nbytes
                return memory
        return None
