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


class _RingEnd:
    """One end of a ring. ``peer_words`` is the peer's line about us, ``wake_peer`` rings the peer if it sleeps."""

    _word: ClassVar[int]  # of our line, in which we say how many bytes we have moved

    def __init__(
        self,
        memory: memoryview,
        own_words: memoryview,
        peer_words: memoryview,
        fence: Fence,
        wake_peer: Callable[[], None],
    ) -> None:
        self._memory, self._own_words, self._peer_words = memory, own_words, peer_words
        self._fence, self._wake_peer = fence, wake_peer
        self._moved = own_words[self._word]

    def _publish_moved(self) -> None:
        """Let the peer see what we have moved, and wake it: it may wait for bytes, or for room."""
        self._fence.light()
        self._own_words[self._word] = self._moved
        self._fence.full()
        self._wake_peer()


class RingWriter(_RingEnd):
    """The end that writes."""

    _word = WRITTEN

    def sendmsg(self, buffers: Sequence[bytes | bytearray | memoryview], /) -> int:
        """Write as much as there is room for; BlockingIOError if for nothing."""
        sent = 0
        for buffer in buffers:
            if len(buffer):
                count = self._copy_in(memoryview(buffer))
                sent += count
                if count < len(buffer):
                    break
        if not sent:
            raise BlockingIOError
        self._publish_moved()
        return sent

    def send(self, data: memoryview, /) -> int:
        return self.sendmsg((data,))

    def _copy_in(self, data: memoryview) -> int:
        size = len(self._memory)
        room = size - (self._moved - self._peer_words[READ])
        self._fence.light()  # the peer has read what we write over
        count = min(room, len(data))
        start = self._moved % size
        first = min(count, size - start)
        self._memory[start : start + first] = data[:first]
        if first < count:
            self._memory[: count - first] = data[first:count]
        self._moved += count
        return count


class RingReader(_RingEnd):
    """The end that reads."""

    _word = READ

    @property
    def empty(self) -> bool:
        """Whether everything that was written has been read."""
        return self._peer_words[WRITTEN] == self._moved

    def recv_into(self, buffer: memoryview, nbytes: int, /) -> int:
        """Read as much as has come and fits; BlockingIOError if nothing has."""
        count = self._copy_out(buffer[:nbytes])
        if not count:
            raise BlockingIOError
        self._publish_moved()
        return count

    def recvmsg_into(self, buffers: Sequence[bytearray | memoryview], /) -> tuple[int]:
        count = 0
        for buffer in buffers:
            if len(buffer):
                copied = self._copy_out(memoryview(buffer))
                count += copied
                if copied < len(buffer):
                    break
        if not count:
            raise BlockingIOError
        self._publish_moved()
        return (count,)

    def _copy_out(self, buffer: memoryview) -> int:
        count = min(len(buffer), self._peer_words[WRITTEN] - self._moved)
        self._fence.light()  # the count before the bytes
        size = len(self._memory)
        start = self._moved % size
        first = min(count, size - start)
        buffer[:first] = self._memory[start : start + first]
        if first < count:
            buffer[first:count] = self._memory[: count - first]
        self._moved += count
        return count
