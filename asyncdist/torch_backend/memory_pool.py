"""Registered memory for torch code that asks its back end for it, again and again for the same sizes, as FSDP2 may.

Making registered memory costs a system call and a fault a page. So what comes back is kept for the next one of its size.
Not at once: writing over what another core has just read takes several times as long (see the stream of the transport
shm). Over the same memory again and again a training step of FSDP2 took 66.8 ms, 63.7 without any of this; over memory
that has rested 59.2 and 62.6.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from typing import NamedTuple

import torch

from asyncdist.memory import registered

_REST_NBYTES = 16 << 20
"""How much is lent before what came back is lent again."""
_SMALL_NBYTES = 256 << 10
"""Up to here other ranks do not read what is lent, but copies."""


class _Kept(NamedTuple):
    memory: torch.Tensor
    rested_at: int
    """Of `MemoryPool._nbytes_so_far`."""


class MemoryPool:
    """Registered memory by size. It keeps no more than was ever lent at a time and rests; all goes when it does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[_Kept] = deque()
        self._returned: deque[torch.Tensor] = deque()  # by finalizers, which may run while we hold the lock
        self._kept_nbytes = self._lent_nbytes = self._most_nbytes = self._nbytes_so_far = 0

    def lend(self, nbytes: int) -> torch.Tensor:
        """Return uninitialised bytes, which come back with the last tensor that shares them; SharedMemoryError if full."""
        with self._lock:
            self._settle()
            memory = self._take(nbytes)
            if memory is None:
                memory = registered.empty(nbytes, dtype=torch.uint8)
            self._lent_nbytes += nbytes
            self._nbytes_so_far += nbytes
            self._most_nbytes = max(self._most_nbytes, self._lent_nbytes)
        loan = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
        weakref.finalize(loan, self._returned.append, memory).atexit = False
        return torch.frombuffer(loan, dtype=torch.uint8)

    def _settle(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._lent_nbytes -= memory.nbytes
            self._kept_nbytes += memory.nbytes
            rest = _REST_NBYTES if memory.nbytes > _SMALL_NBYTES else 0
            self._kept.append(_Kept(memory, self._nbytes_so_far + rest))
        while self._room() < 0:
            self._kept_nbytes -= self._kept.popleft().memory.nbytes

    def _room(self) -> int:
        """Return how much more there may be, of what is kept and lent together."""
        return self._most_nbytes + _REST_NBYTES - self._kept_nbytes - self._lent_nbytes

    def _take(self, nbytes: int) -> torch.Tensor | None:
        """Return what was kept longest of a size; None if it has not rested and there is room for more, or if none is."""
        for place, (memory, rested_at) in enumerate(self._kept):
            if memory.nbytes == nbytes:
                if self._nbytes_so_far < rested_at and self._room() >= nbytes:
                    return None
                del self._kept[place]
                self._kept_nbytes -= nbytes
                return memory
        return None
