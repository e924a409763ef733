"""The sender of long messages: one chunk at a time, so that short messages pass between the chunks.

Clients and the server use it. No I/O: the caller passes the functions that write and schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from asyncdist.store.protocol.chunking import ChunkedMessage
from asyncdist.store.protocol.codec import framed

Done = Callable[[ChunkedMessage], object]


class ChunkSender:
    """Sends long messages over a connection, one after the other, one chunk per call of `send_next`.

    Args:
        write: Takes one frame to be sent.
        is_wanted: ``is_wanted(request)`` tells whether the rest of the request's message still has to be sent. If not,
            the message is abandoned, and a receiver that has received a part of it gets an empty chunk.
        schedule: Calls `send_next` later, for example an event loop's ``call_soon``. It may do nothing if the owner
            calls `send_next` itself.
    """

    __slots__ = ("_is_wanted", "_paused", "_schedule", "_scheduled", "_write", "queue")

    def __init__(
        self,
        write: Callable[[bytes], object],
        is_wanted: Callable[[int], bool],
        schedule: Callable[[Callable[[], None]], object],
    ) -> None:
        self._write, self._is_wanted = write, is_wanted
        self._schedule = schedule
        self.queue: deque[tuple[ChunkedMessage, Done]] = deque()
        """The messages that are not completely sent, each with its ``done`` function."""
        self._paused = False
        self._scheduled = False

    @property
    def busy(self) -> bool:
        """Whether a message is not completely sent."""
        return bool(self.queue)

    @property
    def nbytes_under_way(self) -> int:
        """The length in bytes of the queue's first message, which is being sent or is the next one; 0 without one."""
        return len(self.queue[0][0]) if self.queue else 0

    def send(self, message: ChunkedMessage, done: Done = lambda message: None) -> None:
        """Queue a message. ``done(message)`` is called when it is sent or abandoned, but not after `drop`."""
        self.queue.append((message, done))
        self._schedule_next()

    def pause(self) -> None:
        """Send nothing until `resume`, because the socket is full."""
        self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False
        self._schedule_next()

    def drop(self) -> None:
        """Discard the queue, because the connection is lost."""
        self.queue.clear()

    def _schedule_next(self) -> None:
        if self.queue and not self._paused and not self._scheduled:
            self._scheduled = True
            self._schedule(self.send_next)

    def send_next(self) -> None:
        """Send the next chunk, and schedule the one after it. Does nothing while paused."""
        self._scheduled = False
        if self._paused or not self.queue:
            return
        message, done = self.queue[0]
        chunk = next(message) if self._is_wanted(message.request) else message.abandoned()
        # There is nothing to send if the message is abandoned before its first chunk.
        if chunk:
            self._write(framed([chunk]))
        if not message.is_under_way:
            self.queue.popleft()
            done(message)
        self._schedule_next()
