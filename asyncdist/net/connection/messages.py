"""Long messages in progress, on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asyncdist.errors import AsyncdistError
from asyncdist.net.connection.frames import BufferCursor


class Sink(Protocol):
    def write(self, part: memoryview, /) -> object:
        """Take the next bytes. The memory is used again afterwards."""


class IncomingMessage:
    """A long message that arrives.

    Attributes:
        head: Its head.
        sizes: The bytes of each of its buffers.
        buffers: The memory of the buffers; empty until the handler or the first part provides it.
        sink: Takes the bytes instead of ``buffers``, if the handler sets it.
        error: Why the bytes are read and dropped; None if they are kept.
        context: For the handler's own use.
    """

    __slots__ = ("_cursor", "buffers", "context", "error", "head", "left", "sink", "sizes")

    def __init__(self, head: bytes, sizes: tuple[int, ...]) -> None:
        self.head, self.sizes = head, sizes
        self.buffers: Sequence[memoryview] = ()
        self.sink: Sink | None = None
        self.error: Exception | None = None
        self.context: Any = None
        self.left = sum(sizes)
        """The bytes that have not arrived."""
        self._cursor: BufferCursor | None = None

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def room(self, nbytes: int) -> list[memoryview]:
        """Return the memory of the next bytes that arrive; an empty list if a sink takes them, or they are dropped."""
        self.left -= nbytes
        if self.error is None and self.sink is None:
            try:
                return self._position().take(nbytes, nbytes)
            # The message claims more memory than there is, or its handler provided memory of another size.
            except (MemoryError, ValueError) as error:
                self.drop(error)
        return []

    def drop(self, error: Exception) -> None:
        """Keep no further bytes. The handler gets the message with this error."""
        self.error, self.buffers, self.sink, self._cursor = error, (), None, None

    def _position(self) -> BufferCursor:
        cursor = self._cursor
        if cursor is None:
            if not self.buffers:
                # Loads NumPy, which programs without tensors do without.
                from asyncdist.net.connection.receive_memory import receive_memory

                self.buffers = [receive_memory.take(size) for size in self.sizes]
            buffers = [buffer if buffer.format == "B" else buffer.cast("B") for buffer in self.buffers]
            given = [buffer.nbytes for buffer in buffers]
            if given != list(self.sizes):
                raise ValueError(f"the memory for {list(self.sizes)} bytes has {given}")
            cursor = self._cursor = BufferCursor(buffers)
        return cursor


class OutgoingMessage:
    """A long message that is being sent. Its buffers are read until it is ``done``, and must not change before.

    Attributes:
        done: Whether its memory is not read any more: all bytes have left, or the message has failed.
        error: Why it has failed; None if all bytes have left.
        opening: Bytes that leave with the first part; empty afterwards.
        on_done: Called once on the loop of the channel when it is done.
    """

    __slots__ = ("cursor", "done", "error", "number", "on_done", "opening")

    def __init__(self, number: int, buffers: Sequence[memoryview]) -> None:
        self.number = number
        self.opening = b""
        self.cursor = BufferCursor(buffers)
        self.done = False
        self.error: AsyncdistError | None = None
        self.on_done: Callable[[OutgoingMessage], None] | None = None

    def is_wanted(self) -> bool:
        """Return True to send the next part, False if the message is withdrawn."""
        return True

    def finish(self, error: AsyncdistError | None = None) -> None:
        """Note that the memory is not read any more. Idempotent."""
        if not self.done:
            self.done, self.error = True, error
            if self.on_done is not None:
                self.on_done(self)
