"""The memory in which a process writes versions: shared segments, which it uses again when no reader has them any more.

New memory costs several times the copy into it, so a publisher alternates between few segments. A segment is written again
only if each process that had it has said that it uses it no more. One whose reader has vanished is never written again: the
reader may be stopped, or its child may still read. Such a segment is closed, and the kernel frees it with its last mapping.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import torch

from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.kernel import SharedSegment, can_share_segments


class PrivateSegment:
    """Memory of this process alone, where the system has no shared segments."""

    id = ""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def fileno(self) -> int:
        """Return -1: there is no descriptor."""
        return -1

    def close(self) -> None:
        """Do nothing."""


OwnSegment = SharedSegment | PrivateSegment


class SegmentPool:
    """Segments of this process that are free to be written; ``on_close`` gets each one that will not be used again."""

    def __init__(self, threads: DaemonThreadPool, on_close: Callable[[OwnSegment], None]) -> None:
        self._threads = threads
        self._on_close = on_close
        self._free: list[OwnSegment] = []
        self._is_closed = False

    async def take(self, nbytes: int) -> OwnSegment:
        """Return a segment of at least ``nbytes`` bytes. Raises SharedMemoryError if no memory is left."""
        fitting = [each for each in self._free if nbytes <= each.nbytes <= 2 * max(nbytes, 1 << 20)]
        for each in self._free:
            if each not in fitting[:1]:
                self.discard(each)
        self._free.clear()
        if fitting:
            return fitting[0]
        kind: type[OwnSegment] = SharedSegment if can_share_segments() else PrivateSegment
        allocating: Future[OwnSegment] = self._threads.submit(kind, nbytes)
        try:
            return await asyncio.wrap_future(allocating)
        except asyncio.CancelledError:
            allocating.add_done_callback(_close_result)
            raise

    def give_back(self, segment: OwnSegment) -> None:
        if self._is_closed:
            segment.close()
            return
        # One is enough, unless readers are late by different numbers of versions.
        while self._free:
            self.discard(self._free.pop())
        self._free.append(segment)

    def discard(self, segment: OwnSegment) -> None:
        """Close a segment, which processes that have mapped it may read on."""
        segment.close()
        self._on_close(segment)

    def close(self) -> None:
        """Close the free segments, and those that come back later."""
        self._is_closed = True
        while self._free:
            self._free.pop().close()


def _close_result(allocating: Future[OwnSegment]) -> None:
    if not allocating.cancelled() and allocating.exception() is None:
        allocating.result().close()
