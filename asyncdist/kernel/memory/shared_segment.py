"""Segments of shared memory that one process writes and other processes of its host map to read.

A segment is anonymous: the kernel frees it with its last descriptor and mapping, also when processes are killed. Its size
is fixed, and only the mapping of the process that made it can write it. A reader maps it privately: what the reader writes
there goes into copies of the pages of its own, which `ReadMapping.renew` discards.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator

import numpy as np
import torch

from asyncdist.base import lifecycle
from asyncdist.errors import ProtocolError, SharedMemoryError
from asyncdist.kernel.memory.shared_arena import PAGE_NBYTES, ArenaMapping

_ADD_SEALS = 1033
_SEAL_ITSELF, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1, 2, 4, 16
_STEP_NBYTES = 2 << 20
"""Bytes per call: no call takes as long as a millisecond."""
_PRESENT, _SWAPPED, _OF_A_FILE = 1 << 63, 1 << 62, 1 << 61
"""Bits of an entry of /proc/self/pagemap. A copy that a process has made of a page belongs to no file."""

_numbers = itertools.count()


def can_share_segments() -> bool:
    """Return whether this system has segments."""
    return hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate")


class SharedSegment:
    """A segment that this process writes.

    `close` gives up the descriptor, as does the end of this object. The memory lasts until its tensors have gone, too.

    Attributes:
        id: A text that no other segment has.
        bytes: The memory, as a flat uint8 tensor.

    Raises:
        SharedMemoryError: No memory is left.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(PAGE_NBYTES, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES)
        self.id = f"{os.getpid()}-{next(_numbers)}-{secrets.token_hex(8)}"
        descriptor = -1
        try:
            descriptor = os.memfd_create("asyncdist-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # Without free memory this call fails, and no later access ends in SIGBUS.
            os.posix_fallocate(descriptor, 0, self.nbytes)
        except OSError as cause:
            if descriptor >= 0:
                os.close(descriptor)
            raise SharedMemoryError(
                f"cannot reserve {self.nbytes} bytes of shared memory: {cause.strerror}; free memory, or raise the limit "
                "of this process or container"
            ) from cause
        self._closing = weakref.finalize(self, os.close, descriptor)
        self._closing.atexit = False
        self._descriptor = descriptor
        lifecycle.close_in_children(self)
        mapping = ArenaMapping(descriptor, self.nbytes)
        self.bytes = mapping.tensor(0, self.nbytes, torch.uint8)
        # Kernels before 5.1 lack the last seal: a reader could map the segment for writing, and does not.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE | _SEAL_ITSELF)

    def fileno(self) -> int:
        """Return the descriptor, which a reader gets; -1 once it is closed."""
        return self._descriptor if self._closing.alive else -1

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._closing()


class ReadMapping:
    """A segment of another process, mapped into this one for as long as it has tensors.

    Args:
        descriptor: The descriptor of the segment, which belongs to the mapping from now on.
        nbytes: The size that its owner has told.
        id: The segment's id.

    Attributes:
        bytes: The memory, as a flat uint8 tensor. Writing it changes a copy of this process.
        is_renewed: Whether nothing has used the mapping since `renew`. The user of the mapping sets False.

    Raises:
        ProtocolError: The segment is smaller than told.
        SharedMemoryError: It cannot be mapped.
    """

    def __init__(self, descriptor: int, nbytes: int, id: str) -> None:
        self.id, self.nbytes = id, nbytes
        self._descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)
        self._closing.atexit = False
        self.is_renewed = False
        self._is_populated = False
        lifecycle.close_in_children(self)
        size = os.fstat(descriptor).st_size
        if not 0 < nbytes <= size:
            raise ProtocolError(f"a segment of {size} bytes, of which its owner says that it has {nbytes}")
        self._mapping = ArenaMapping(descriptor, nbytes, private=True)
        self.bytes = self._mapping.tensor(0, nbytes, torch.uint8)

    def fileno(self) -> int:
        """Return the descriptor, for further readers."""
        return self._descriptor

    def renew(self) -> None:
        """Show what the segment contains now: discard the pages that this process has written.

        The first call maps all pages, which takes nearly as long as a copy; a later one takes a fifth of that. Other
        threads run during the call.
        """
        if self._is_populated:
            self._discard_own_pages()
        else:
            self._is_populated = True
            # Page faults here, and not in a request.
            for offset, nbytes in self._steps():
                self.bytes[offset : offset + nbytes : PAGE_NBYTES].sum()
        self.is_renewed = True

    def _discard_own_pages(self) -> None:
        count = -(-self.nbytes // PAGE_NBYTES)
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as file:
                entries = os.pread(file.fileno(), 8 * count, self._mapping.address // PAGE_NBYTES * 8)
        except OSError:
            entries = b""
        if len(entries) != 8 * count:
            for offset, nbytes in self._steps():
                self._mapping.advise(mmap.MADV_DONTNEED, offset, nbytes)
            return
        flags = np.frombuffer(entries, "<u8")
        own = (flags & (_PRESENT | _SWAPPED) != 0) & (flags & _OF_A_FILE == 0)
        for page in np.flatnonzero(own).tolist():
            self._mapping.advise(mmap.MADV_DONTNEED, page * PAGE_NBYTES, PAGE_NBYTES)

    def _steps(self) -> Iterator[tuple[int, int]]:
        for offset in range(0, self.nbytes, _STEP_NBYTES):
            yield offset, min(_STEP_NBYTES, self.nbytes - offset)
