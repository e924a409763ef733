"""Shared memory through which the parts of long messages pass between two processes of one host.

Each direction of a channel has a staging area of its own: an anonymous segment in equal slots, which the sender makes with
its first long message, and whose descriptor it passes over the Unix socket. The sender copies a part into a free slot and
names it in a frame; the receiver copies it out and returns the slot. A segment is used by one channel only, and the kernel
frees it with the last of the two processes. So no process can read the later content of memory that another one reuses.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Sequence

from asyncdist.errors import ProtocolError, SharedMemoryError

NUM_SLOTS = 8
SLOT_NBYTES = 512 << 10
"""Bytes of a slot. A part is copied out while it is in the cache, and the copy takes longer than the frame about it."""
_MOST_NBYTES = 1 << 30


def can_stage() -> bool:
    return hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate")


class StagingArea:
    """The sender's side. ``descriptor`` is open until `forget_descriptor`. Raises SharedMemoryError without free memory."""

    def __init__(self) -> None:
        nbytes = NUM_SLOTS * SLOT_NBYTES
        self.descriptor = -1
        try:
            self.descriptor = os.memfd_create("asyncdist-channel", os.MFD_CLOEXEC)
            # Without free memory this call fails, and no later access ends in SIGBUS.
            os.posix_fallocate(self.descriptor, 0, nbytes)
            self._map = mmap.mmap(self.descriptor, nbytes, mmap.MAP_SHARED)
        except (OSError, ValueError) as cause:
            self.forget_descriptor()
            raise SharedMemoryError(f"cannot reserve {nbytes} bytes of shared memory: {cause}") from cause
        self._view = memoryview(self._map)
        self.free = list(range(NUM_SLOTS))

    def put(self, parts: Sequence[memoryview]) -> int:
        slot = self.free.pop()
        at = slot * SLOT_NBYTES
        for part in parts:
            self._view[at : at + part.nbytes] = part
            at += part.nbytes
        return slot

    def take_back(self, slots: bytes) -> None:
        """Note that the receiver has returned slots. Raises ProtocolError for slots that it did not have."""
        for slot in slots:
            if slot >= NUM_SLOTS or slot in self.free:
                raise ProtocolError(f"the peer returned slot {slot}, which it does not have")
            self.free.append(slot)

    def forget_descriptor(self) -> None:
        """Close the descriptor: the receiver has its own. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Unmap the area. Idempotent."""
        self.forget_descriptor()
        self._view.release()
        # A view of a slot that is being sent keeps the mapping.
        with contextlib.suppress(BufferError):
            self._map.close()


class StagedParts:
    """The receiver's side. Raises ProtocolError for a segment smaller than announced, SharedMemoryError if mmap fails."""

    def __init__(self, descriptor: int, num_slots: int, slot_nbytes: int) -> None:
        nbytes = num_slots * slot_nbytes
        if not 0 < nbytes <= _MOST_NBYTES or num_slots > 256 or os.fstat(descriptor).st_size < nbytes:
            raise ProtocolError(f"a staging area of {num_slots} slots of {slot_nbytes} bytes that is not there")
        try:
            self._map = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as cause:
            reason = os.strerror(cause.errno or errno.ENOMEM)
            raise SharedMemoryError(f"cannot map {nbytes} bytes of shared memory: {reason}") from cause
        self._view = memoryview(self._map)
        self._num_slots, self._slot_nbytes = num_slots, slot_nbytes

    def part(self, slot: int, nbytes: int) -> memoryview:
        """Return the part in a slot. Raises ProtocolError if there is no such slot."""
        if slot >= self._num_slots or nbytes > self._slot_nbytes:
            raise ProtocolError(f"a piece of {nbytes} bytes in slot {slot}, which does not exist")
        at = slot * self._slot_nbytes
        return self._view[at : at + nbytes]

    def close(self) -> None:
        """Unmap the area. Idempotent."""
        self._view.release()
        with contextlib.suppress(BufferError):
            self._map.close()
