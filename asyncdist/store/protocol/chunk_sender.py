"""The sender of long messages: one chunk at a time, so that short messages pass between the chunks.

Clients and the server use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from asyncdist.store.protocol.chunking import ChunkedMessage
from asyncdist.store.protocol.codec import framed

Done = Callable[[ChunkedMessage], object]


class ChunkSender:
    """Sends long messages over a socket, one after the other, one chunk per call of `send_next`.

    Args:
        write: Sends bytes.
        is_wanted: ``is_wanted(request)`` tells whether the rest of the request's message still has to be sent.
        schedule: Calls `send_next` later, for example an event loop's ``call_soon``.
    """

    __slots__ = ("_carrying", "_is_wanted", "_parcels", "_paused", "_schedule", "_write")

    def __init__(
        self,
        write: Callable[[bytes], object],
        is_wanted: Callable[[int], bool],
        schedule: Callable[[Callable[[], None]], object],
    ) -> None:
        self._write, self._is_wanted = write, is_wanted
        self._schedule = schedule
        self._parcels: deque[tuple[ChunkedMessage, Done]] = deque()
        self._paused = False
        self._carrying = False

    @property
    def busy(self) -> bool:
        """Whether a message is queued or under way."""
        return bool(self._parcels)

    @property
    def nbytes_under_way(self) -> int:
        """The length in bytes of the message that is being sent."""
        return len(self._parcels[0][0]) if self._parcels else 0

    def send(self, parcel: ChunkedMessage, done: Done = lambda parcel: None) -> None:
        """Queue a message; ``done(message)`` is called when it is sent or abandoned."""
        self._parcels.append((parcel, done))
        self._carry_on()

    def pause(self) -> None:
        """Stop sending, because the socket is full."""
        self._paused = True

    def resume(self) -> None:
        """Send again."""
        self._paused = False
        self._carry_on()

    def drop(self) -> None:
        """Discard the queue, because the connection is lost."""
        self._parcels.clear()

    def _carry_on(self) -> None:
        if self._parcels and not self._paused and not self._carrying:
            self._carrying = True
            self._schedule(self.send_next)

    def send_next(self) -> None:
        """Send the next chunk; the schedule calls this."""
        self._carrying = False
        if self._paused or not self._parcels:
            return
        parcel, done = self._parcels[0]
        piece = next(parcel) if self._is_wanted(parcel.request) else parcel.abandoned()
        if piece:
            self._write(framed([piece]))
        if not parcel.is_under_way:
            self._parcels.popleft()
            done(parcel)
        self._carry_on()
