"""Memory that the processes of one host share: one anonymous, sparse segment per process.

The shm transport and `registered` use it. A process creates its *arena* on first use: a memfd far larger than it needs, of
which no memory exists until pages are reserved. Other processes receive its descriptor and map the whole of it once, so
they see later allocations at their offsets. It has no name, so the system frees it when its processes have ended.

Pages are reserved (`fallocate`) before use: without free memory an allocation fails with `SharedMemoryError`, and no
access ends in SIGBUS.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator

import torch

from asyncdist.errors import SharedMemoryError

PAGE_NBYTES = mmap.PAGESIZE
ALIGNMENT = 64
"""Bytes at whose multiples tensors begin: a cache line."""

# The smallest segment; a group takes a range of 32 MiB of addresses.
_LEAST_NBYTES = 64 << 20
# Addresses for groups, which reserve memory in their ranges only when they use it.
_GROUPS_NBYTES = 256 << 30
# Limit for tensors, so that 256 processes of a host can map one another within 128 TiB of addresses.
_MOST_TENSORS_NBYTES = 192 << 30
# A freed block of at least this size returns its pages to the system.
_RETURNED_NBYTES = 1 << 20


def unavailable() -> str | None:
    """Return why this process cannot use shared memory; None if it can."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "posix_fallocate"):
        return "this system has no anonymous shared memory (memfd_create)"
    try:
        arena()
    except SharedMemoryError as error:
        return str(error)
    return None


class ArenaMapping:
    """A whole arena, of this or another process, mapped into this process."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            self._map = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
        except (OSError, ValueError) as cause:
            raise SharedMemoryError(f"cannot map {nbytes >> 20} MiB of shared memory: {cause}") from cause
        # An inference tensor could only be written in inference mode.
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()

    def words(self, offset: int, count: int) -> memoryview:
        """Return ``count`` 64-bit words from an offset (a multiple of 8) on.

        Each access is one aligned instruction, so no other process sees half of a word.
        """
        return memoryview(self._map)[offset : offset + 8 * count].cast("q")

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes from an offset on."""
        return memoryview(self._map)[offset : offset + nbytes]

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``count`` elements from an offset (a multiple of their size) on as a flat tensor."""
        with torch.inference_mode(False):
            return self._bytes[offset : offset + count * dtype.itemsize].view(dtype)

    def discard(self, offset: int, nbytes: int) -> None:
        """Return whole pages to the system."""
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_REMOVE, offset, nbytes)


class ArenaBlock:
    """A range of reserved pages of this process's arena, allocated until `free`."""

    __slots__ = ("__weakref__", "_arena", "nbytes", "offset")

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self._arena: Arena | None = arena
        self.offset = offset
        self.nbytes = nbytes

    def free(self) -> None:
        """Free the block; no process may use it any more. Idempotent and thread-safe."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.take_back(self.offset, self.nbytes)


class Arena:
    """The segment of this process, and its allocated ranges."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.nbytes = _sparse_nbytes()
        try:
            self.descriptor = os.memfd_create("asyncdist", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, self.nbytes)
        except OSError as cause:
            raise SharedMemoryError(f"cannot make a shared segment of {self.nbytes >> 20} MiB: {cause}") from cause
        self.mapping = ArenaMapping(self.descriptor, self.nbytes)
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]
        """Ranges as (offset, nbytes), sorted, no two of them adjacent."""
        self._returned: deque[tuple[int, int]] = deque()
        """Freed by finalizers, which may run in a thread that holds the lock."""
        weakref.finalize(self, os.close, self.descriptor)

    def allocate(self, nbytes: int) -> ArenaBlock:
        """Return reserved pages for ``nbytes`` bytes, of undefined content. Raises SharedMemoryError without room."""
        block = self.hold(nbytes)
        try:
            self.reserve(block.offset, block.nbytes)
        except SharedMemoryError:
            block.free()
            raise
        return block

    def hold(self, nbytes: int) -> ArenaBlock:
        """Return an address range without memory: `reserve` its parts before using them."""
        nbytes = -(-max(1, nbytes) // PAGE_NBYTES) * PAGE_NBYTES
        with self._lock:
            self._settle()
            for place, (offset, free) in enumerate(self._free):
                if free >= nbytes:
                    self._free[place : place + 1] = [(offset + nbytes, free - nbytes)] if free > nbytes else []
                    return ArenaBlock(self, offset, nbytes)
        raise SharedMemoryError(
            f"no {nbytes >> 20} MiB in one piece are left in this process's shared segment of {self.nbytes >> 20} MiB: "
            "release registered tensors, destroy groups, or lower "
            "ASYNCDIST_SHM_AREA_NBYTES (a group takes 32 of these areas)"
        )

    def reserve(self, offset: int, nbytes: int) -> None:
        """Reserve memory for an address range. Raises SharedMemoryError without free memory."""
        try:
            os.posix_fallocate(self.descriptor, offset, nbytes)
        except OSError as cause:
            reason = "no memory is left" if cause.errno in (errno.ENOSPC, errno.ENOMEM) else cause.strerror
            raise SharedMemoryError(
                f"cannot reserve {nbytes} bytes of shared memory: {reason}; free memory or raise the limit of this "
                "process (or container), or start with ASYNCDIST_TRANSPORT=tcp"
            ) from cause

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return the offset of some memory in the arena, None if it is not in the arena."""
        offset = address - self.mapping.address
        return offset if 0 <= offset <= self.nbytes - nbytes else None

    def take_back(self, offset: int, nbytes: int) -> None:
        """Take back a block; see `ArenaBlock.free`."""
        if os.getpid() != self.pid:
            # A forked child's copy of a block: the pages belong to its parent.
            return
        self._returned.append((offset, nbytes))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    @property
    def used_nbytes(self) -> int:
        """Bytes in blocks that have not been freed."""
        with self._lock:
            self._settle()
            return self.nbytes - sum(nbytes for _, nbytes in self._free)

    def _settle(self) -> None:
        while self._returned:
            offset, nbytes = self._returned.popleft()
            if nbytes >= _RETURNED_NBYTES:
                self.mapping.discard(offset, nbytes)
            place = bisect.bisect(self._free, (offset, nbytes))
            before = self._free[place - 1] if place else (0, 0)
            after = self._free[place] if place < len(self._free) else (0, 0)
            start, stop = place, place
            if place and before[0] + before[1] == offset:
                offset, nbytes, start = before[0], before[1] + nbytes, place - 1
            if after[1] and offset + nbytes == after[0]:
                nbytes, stop = nbytes + after[1], place + 1
            self._free[start:stop] = [(offset, nbytes)]


def _sparse_nbytes() -> int:
    """Return the size of a new arena: the machine's memory plus room for groups, within the limit of a file's size.

    With limited address space it is the machine's memory alone.
    """
    import resource

    nbytes = min(os.sysconf("SC_PHYS_PAGES") * PAGE_NBYTES, _MOST_TENSORS_NBYTES)
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        nbytes += _GROUPS_NBYTES
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        nbytes = min(nbytes, limit // PAGE_NBYTES * PAGE_NBYTES)
    if nbytes < _LEAST_NBYTES:
        raise SharedMemoryError(f"this process may make files of {limit} bytes at most (ulimit -f)")
    return nbytes


_arena: Arena | None = None
_inherited: list[Arena] = []
"""The parent's arenas in a forked child, which may have tensors there."""
_making = threading.Lock()


def arena() -> Arena:
    """Return this process's arena, created on first use; a forked child gets its own."""
    global _arena
    current = _arena
    if current is None or current.pid != os.getpid():
        with _making:
            current = _arena
            if current is None or current.pid != os.getpid():
                if current is not None:
                    _inherited.append(current)
                current = _arena = Arena()
    return current


def tensor_of_block(block: ArenaBlock, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the first elements of a block as a flat tensor; the last tensor that shares the block frees it."""
    return _tensor(_buffer(block), 0, count, dtype)


def carve(counts: Iterable[tuple[int, torch.dtype]]) -> Iterator[torch.Tensor]:
    """Yield flat tensors of the given counts and dtypes in one block, each aligned to a cache line.

    Each has a storage of its own, so `torch.save` of one saves no other. The last of them frees the block.
    """
    wanted = list(counts)
    starts, end = [], 0
    for count, dtype in wanted:
        starts.append(end)
        end += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    whole = _buffer(arena().allocate(end))
    for start, (count, dtype) in zip(starts, wanted, strict=True):
        yield _tensor(whole, start, count, dtype)


def _buffer(block: ArenaBlock) -> ctypes.Array[ctypes.c_char]:
    """Return a block as an object that tensors refer to; its finalizer frees the block."""
    buffer = (ctypes.c_char * block.nbytes).from_address(arena().mapping.address + block.offset)
    weakref.finalize(buffer, block.free).atexit = False
    return buffer


def _tensor(buffer: ctypes.Array[ctypes.c_char], start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=torch.uint8, offset=start, count=count * dtype.itemsize).view(dtype)
