"""A byte stream from one rank to another through a ring buffer in the sender's memory: two copies, no system call.

This is a single-producer, single-consumer ring. The sender owns the buffer and the count of bytes written, the receiver
the count of bytes read; both counts only grow. Each end behaves like a non-blocking socket, so `byte_stream.Writer` and
`byte_stream.Reader` send messages over it as they do over TCP. `local_peer` makes both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from asyncdist.base.callables import Callback
from asyncdist_transports.shm.control_block import READ, WRITTEN
from asyncdist_transports.shm.memory_order import Fence

NBYTES = 1 << 20
"""Size of a ring in bytes: small enough to stay in the cache."""


class _RingEnd:
    """One end of a ring. ``peer_words`` are the peer's words about this rank, ``wake_peer`` wakes a sleeping peer."""

    # The word of this rank's line that counts the bytes moved.
    _word: ClassVar[int]

    def __init__(
        self, memory: memoryview, own_words: memoryview, peer_words: memoryview, fence: Fence, wake_peer: Callback
    ) -> None:
        self._memory, self._own_words, self._peer_words = memory, own_words, peer_words
        self._fence, self._wake_peer = fence, wake_peer
        self._moved = own_words[self._word]

    def _move(self, buffers: Sequence[bytes | bytearray | memoryview], copy: Callable[[memoryview], int]) -> int:
        """Copy what fits, publish it, and wake the peer, which may wait for bytes or space. Raises BlockingIOError."""
        moved = 0
        for buffer in buffers:
            if len(buffer):
                count = copy(memoryview(buffer))
                moved += count
                if count < len(buffer):
                    break
        if not moved:
            raise BlockingIOError
        self._fence.light()
        self._own_words[self._word] = self._moved
        self._fence.full()
        self._wake_peer()
        return moved


class RingWriter(_RingEnd):
    """The sending end."""

    _word = WRITTEN

    def sendmsg(self, buffers: Sequence[bytes | bytearray | memoryview], /) -> int:
        """Write as many bytes as there is free space for; BlockingIOError without free space."""
        return self._move(buffers, self._copy_in)

    def send(self, data: memoryview, /) -> int:
        return self._move((data,), self._copy_in)

    def _copy_in(self, data: memoryview) -> int:
        size = len(self._memory)
        room = size - (self._moved - self._peer_words[READ])
        # The peer's loads of these bytes come before the stores that overwrite them.
        self._fence.light()
        count = min(room, len(data))
        start = self._moved % size
        first = min(count, size - start)
        self._memory[start : start + first] = data[:first]
        if first < count:
            self._memory[: count - first] = data[first:count]
        self._moved += count
        return count


class RingReader(_RingEnd):
    """The receiving end."""

    _word = READ

    @property
    def empty(self) -> bool:
        """Whether every byte written has been read."""
        return self._peer_words[WRITTEN] == self._moved

    def recv_into(self, buffer: memoryview, nbytes: int, /) -> int:
        """Read the bytes that have arrived, up to ``nbytes``; BlockingIOError if no byte has arrived."""
        return self._move((buffer[:nbytes],), self._copy_out)

    def recvmsg_into(self, buffers: Sequence[bytearray | memoryview], /) -> tuple[int]:
        return (self._move(buffers, self._copy_out),)

    def _copy_out(self, buffer: memoryview) -> int:
        count = min(len(buffer), self._peer_words[WRITTEN] - self._moved)
        # The count is loaded before the bytes.
        self._fence.light()
        size = len(self._memory)
        start = self._moved % size
        first = min(count, size - start)
        buffer[:first] = self._memory[start : start + first]
        if first < count:
            buffer[first:count] = self._memory[: count - first]
        self._moved += count
        return count
