"""A stream of bytes from one rank to another through a ring in the sender's memory: two copies, no system call.

The sender owns the ring and the count of bytes written, the receiver the count of bytes read; both only grow. Each end
looks like a non-blocking socket, so that messages go over it as they go over one (`asyncdist_transports.byte_stream`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from asyncdist_transports.shm.control_block import READ, WRITTEN
from asyncdist_transports.shm.memory_order import Fence

NBYTES = 1 << 20
"""Size of a ring: what may be under way, and stays in the cache."""


class _End:
    """One end of a ring. ``theirs`` is the peer's line about us, ``wake`` rings the peer if it sleeps."""

    _word: ClassVar[int]  # of our line, in which we say how many bytes we have moved

    def __init__(
        self, memory: memoryview, ours: memoryview, theirs: memoryview, fence: Fence, wake: Callable[[], None]
    ) -> None:
        self._memory, self._ours, self._theirs = memory, ours, theirs
        self._fence, self._wake = fence, wake
        self._moved = ours[self._word]

    def _say(self) -> None:
        """Let the peer see what we have moved, and wake it: it may wait for bytes, or for room."""
        self._fence.light()
        self._ours[self._word] = self._moved
        self._fence.full()
        self._wake()


class RingOut(_End):
    """The end that writes."""

    _word = WRITTEN

    def sendmsg(self, buffers: Sequence[bytes | bytearray | memoryview], /) -> int:
        """Write as much as there is room for; BlockingIOError if for nothing."""
        sent = 0
        for buffer in buffers:
            if len(buffer):
                count = self._put(memoryview(buffer))
                sent += count
                if count < len(buffer):
                    break
        if not sent:
            raise BlockingIOError
        self._say()
        return sent

    def send(self, data: memoryview, /) -> int:
        return self.sendmsg((data,))

    def _put(self, data: memoryview) -> int:
        size = len(self._memory)
        room = size - (self._moved - self._theirs[READ])
        self._fence.light()  # the peer has read what we write over
        count = min(room, len(data))
        start = self._moved % size
        first = min(count, size - start)
        self._memory[start : start + first] = data[:first]
        if first < count:
            self._memory[: count - first] = data[first:count]
        self._moved += count
        return count


class RingIn(_End):
    """The end that reads."""

    _word = READ

    @property
    def empty(self) -> bool:
        """Whether everything that was written has been read."""
        return self._theirs[WRITTEN] == self._moved

    def recv_into(self, buffer: memoryview, nbytes: int, /) -> int:
        """Read as much as has come and fits; BlockingIOError if nothing has."""
        count = self._take(buffer[:nbytes])
        if not count:
            raise BlockingIOError
        self._say()
        return count

    def recvmsg_into(self, buffers: Sequence[bytearray | memoryview], /) -> tuple[int]:
        count = 0
        for buffer in buffers:
            if len(buffer):
                taken = self._take(memoryview(buffer))
                count += taken
                if taken < len(buffer):
                    break
        if not count:
            raise BlockingIOError
        self._say()
        return (count,)

    def _take(self, buffer: memoryview) -> int:
        count = min(len(buffer), self._theirs[WRITTEN] - self._moved)
        self._fence.light()  # the count before the bytes
        size = len(self._memory)
        start = self._moved % size
        first = min(count, size - start)
        buffer[:first] = self._memory[start : start + first]
        if first < count:
            buffer[first:count] = self._memory[: count - first]
        self._moved += count
        return count
