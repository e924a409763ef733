"""Memory that the processes of one host share: one anonymous, sparse segment per process.

A process creates its *arena* on first use: a memfd far larger than it needs, which has no memory until pages are reserved.
Other processes receive its descriptor and map it once as a whole, so they see later allocations at their offsets. It has
no name, so the kernel frees it when its processes have ended.

Pages are reserved (`fallocate`) before use. Without free memory an allocation raises `SharedMemoryError`, and no access
ends in SIGBUS.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import functools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator

import torch

from asyncdist.base import lifecycle
from asyncdist.errors import SharedMemoryError

PAGE_NBYTES = mmap.PAGESIZE
ALIGNMENT = 64
"""Alignment of tensors in bytes: a cache line."""

# The smallest segment. A group takes 32 MiB of addresses.
_MIN_NBYTES = 64 << 20
# Addresses for groups, which reserve memory in their ranges only when they use it.
_GROUPS_NBYTES = 256 << 30
# Limit for tensors, so that 256 processes of a host can map one another within 128 TiB of addresses.
_MAX_TENSORS_NBYTES = 192 << 30
# The pages of a freed block of at least this size are returned to the system.
_MIN_RETURNED_NBYTES = 1 << 20
_MAP_FAILED = ctypes.c_void_p(-1).value


def unavailable() -> str | None:
    """Return why this process cannot use shared memory; None if it can."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "posix_fallocate"):
        return "this system has no anonymous shared memory (memfd_create)"
    try:
        arena()
    except SharedMemoryError as error:
        return error.summary
    return None


class ArenaMapping:
    """A whole arena, or another segment, of this or another process, mapped into this process.

    A write of this process into a ``private`` mapping changes a copy of the page, which no other process sees. The mapping
    lasts until its views and tensors have gone, and needs the descriptor no more.
    """

    def __init__(self, descriptor: int, nbytes: int, *, private: bool = False) -> None:
        self.nbytes = nbytes
        try:
            self._map = _map(descriptor, nbytes, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        except OSError as cause:
            raise SharedMemoryError(f"cannot map {nbytes >> 20} MiB of shared memory: {cause}") from cause
        self.address = ctypes.addressof(self._map)

    @functools.cached_property
    def _bytes(self) -> torch.Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def words(self, offset: int, count: int) -> memoryview:
        """Return ``count`` 64-bit words that begin at an offset, a multiple of 8.

        Each access is one aligned instruction, so no other process sees half of a word.
        """
        return self.view(offset, 8 * count).cast("q")

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` bytes that begin at an offset."""
        return memoryview(self._map).cast("B")[offset : offset + nbytes]

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``count`` elements that begin at an offset, a multiple of their size, as a flat tensor."""
        # An inference tensor could only be written in inference mode.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.tensor(offset, count, dtype)
        return self._bytes[offset : offset + count * dtype.itemsize].view(dtype)

    def discard(self, offset: int, nbytes: int) -> None:
        """Return whole pages to the system."""
        with contextlib.suppress(OSError):
            self.advise(mmap.MADV_REMOVE, offset, nbytes)

    def advise(self, advice: int, offset: int, nbytes: int) -> None:
        """Call madvise for whole pages. Raises OSError."""
        if _libc().madvise(self.address + offset, nbytes, advice):
            raise _os_error()


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    return libc


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _map(descriptor: int, nbytes: int, flags: int) -> ctypes.Array[ctypes.c_char]:
    """Map a file into this process, until nothing refers to the result any more; raise OSError if that fails.

    `mmap.mmap` would keep a copy of the descriptor, one for each peer.
    """
    if os.fstat(descriptor).st_size < nbytes:
        raise OSError(errno.EINVAL, "the segment is smaller")
    address = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address == _MAP_FAILED:
        raise _os_error()
    mapped = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(mapped, _libc().munmap, address, nbytes).atexit = False
    return mapped


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
        failed = f"cannot make a shared segment of {self.nbytes >> 20} MiB"
        try:
            self.descriptor = os.memfd_create("asyncdist", os.MFD_CLOEXEC)
        except OSError as cause:
            raise SharedMemoryError(f"{failed}: {cause}") from cause
        closing = weakref.finalize(self, os.close, self.descriptor)
        closing.atexit = False  # other threads may use the arena until the process has ended
        try:
            os.ftruncate(self.descriptor, self.nbytes)
            self.mapping = ArenaMapping(self.descriptor, self.nbytes)
        except BaseException as cause:
            closing()
            if isinstance(cause, OSError):
                raise SharedMemoryError(f"{failed}: {cause}") from cause
            raise
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]
        """Ranges as (offset, nbytes), sorted, no two of them adjacent."""
        self._freed: deque[tuple[int, int]] = deque()
        """Ranges to merge into `_free`. A finalizer may free a block in a thread that holds the lock."""

    def allocate(self, nbytes: int) -> ArenaBlock:
        """Return reserved pages of undefined content for ``nbytes`` bytes. Raises SharedMemoryError if none are left."""
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
            self._merge_freed()
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
        """Reserve memory for an address range. Raises SharedMemoryError if the system has none left."""
        try:
            os.posix_fallocate(self.descriptor, offset, nbytes)
        except OSError as cause:
            reason = "no memory is left" if cause.errno in (errno.ENOSPC, errno.ENOMEM) else cause.strerror
            raise SharedMemoryError(
                f"cannot reserve {nbytes} bytes of shared memory: {reason}; free memory or raise the limit of this "
                "process (or container), or start with ASYNCDIST_TRANSPORT=tcp"
            ) from cause

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return the offset of an address range in the arena; None if the range is not in the arena."""
        offset = address - self.mapping.address
        return offset if 0 <= offset <= self.nbytes - nbytes else None

    def take_back(self, offset: int, nbytes: int) -> None:
        """Take back a block; see `ArenaBlock.free`."""
        # The pages of a block that a forked child has inherited belong to its parent.
        if os.getpid() != self.pid:
            return
        self._freed.append((offset, nbytes))
        if self._lock.acquire(blocking=False):
            try:
                self._merge_freed()
            finally:
                self._lock.release()

    @property
    def used_nbytes(self) -> int:
        """Bytes in blocks that have not been freed."""
        with self._lock:
            self._merge_freed()
            return self.nbytes - sum(nbytes for _, nbytes in self._free)

    def _merge_freed(self) -> None:
        free = self._free
        while self._freed:
            offset, nbytes = self._freed.popleft()
            if nbytes >= _MIN_RETURNED_NBYTES:
                self.mapping.discard(offset, nbytes)
            place = bisect.bisect(free, (offset, nbytes))
            if place < len(free) and offset + nbytes == free[place][0]:
                nbytes += free.pop(place)[1]
            if place and sum(free[place - 1]) == offset:
                place -= 1
                before, before_nbytes = free.pop(place)
                offset, nbytes = before, before_nbytes + nbytes
            free.insert(place, (offset, nbytes))


def _sparse_nbytes() -> int:
    """Return the size of a new arena: the machine's memory plus room for groups, within the limit of a file's size.

    With limited address space it is the machine's memory alone.
    """
    import resource

    nbytes = min(os.sysconf("SC_PHYS_PAGES") * PAGE_NBYTES, _MAX_TENSORS_NBYTES)
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        nbytes += _GROUPS_NBYTES
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        nbytes = min(nbytes, limit // PAGE_NBYTES * PAGE_NBYTES)
    if nbytes < _MIN_NBYTES:
        raise SharedMemoryError(f"this process may create files of at most {limit} bytes: raise the limit (ulimit -f)")
    return nbytes


_arena: Arena | None = None
_inherited: list[Arena] = []
"""In a forked child: the arenas of its parent, in which the child may have tensors."""
_arena_lock = threading.Lock()
lifecycle.renew_in_children(globals(), "_arena_lock", threading.Lock)


def arena() -> Arena:
    """Return this process's arena, created on first use; a forked child gets its own."""
    global _arena
    current = _arena
    if current is None or current.pid != os.getpid():
        with _arena_lock:
            current = _arena
            if current is None or current.pid != os.getpid():
                if current is not None:
                    _inherited.append(current)
                current = _arena = Arena()
    return current


def carve(counts: Iterable[tuple[int, torch.dtype]]) -> Iterator[torch.Tensor]:
    """Yield flat tensors of the given counts and dtypes in one block, each aligned to a cache line.

    Each tensor has its own storage, so `torch.save` of one saves no other. The last tensor frees the block.
    """
    wanted = list(counts)
    starts, end = [], 0
    for count, dtype in wanted:
        starts.append(end)
        end += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    block = arena().allocate(end)
    # The tensors refer to this object, whose finalizer frees the block.
    buffer = (ctypes.c_char * block.nbytes).from_address(arena().mapping.address + block.offset)
    weakref.finalize(buffer, block.free).atexit = False
    for start, (count, dtype) in zip(starts, wanted, strict=True):
        if count:
            nbytes = count * dtype.itemsize
            yield torch.frombuffer(buffer, dtype=torch.uint8, offset=start, count=nbytes).view(dtype)
        else:
            yield torch.empty(0, dtype=dtype, device="cpu")
