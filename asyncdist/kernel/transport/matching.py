"""Matches messages with posted receives, with MPI's posted and unexpected queues; see `asyncdist.kernel.transport.base`."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from asyncdist.config import Config
from asyncdist.kernel.transport.wire_format import HEADER_NBYTES, pack_tail

_NO_ROOM = memoryview(b"")
_MOST_ASIDE, _LEAST_LIMIT = 8, 512 << 20
"""How many times ``aside_nbytes`` the unexpected messages of a peer may take while a receive is posted, and the least
bytes of this limit. A receive may be behind them on the wire, so they are not left there."""

# -- messages and receives ------------------------------------------------------------------------


class Owner(Protocol):
    """Is notified when a transfer is complete."""

    def transferred(self) -> None: ...


class Mover(Protocol):
    """What moves the bytes of a message that has begun: a thread, or the reader of a stream."""

    def stop(self) -> object:
        """Return when it does not touch the memory any more. The bytes that it has moved are counted."""


class Outgoing:
    """An outgoing message: header, body, and the number of bytes already sent.

    ``transfer`` is the thread that sends it at the moment; None if the driver of the world does.
    """

    __slots__ = ("body", "done", "header", "owner", "peer", "sent", "transfer")

    def __init__(
        self, peer: int, key: bytes, fingerprint: int, body: memoryview, owner: Owner | None, kind: int = 1
    ) -> None:
        self.peer = peer
        self.header = key + pack_tail(fingerprint, len(body), kind)
        self.body = body
        self.owner = owner
        self.transfer: Mover | None = None
        self.sent = 0
        self.done = False

    @classmethod
    def copied(cls, peer: int, header: bytes, body: memoryview, sent: int = 0) -> Outgoing:
        """Return a message that owns its body, without an owner."""
        message = cls.__new__(cls)
        message.peer, message.header, message.body = peer, header, memoryview(bytes(body))
        message.owner, message.transfer, message.sent, message.done = None, None, sent, False
        return message

    def finish(self) -> None:
        self.done = True
        if self.owner is not None:
            self.owner.transferred()

    def abandon(self) -> None:
        """Give the memory back. The rest of a message of which a part is sent comes from a copy.

        The receiver may succeed with it, so it must not get what the owner of the memory writes next.
        """
        if self.transfer is not None:
            self.transfer.stop()
        if self.sent and not self.done:
            self.body = memoryview(bytes(self.body[max(0, self.sent - HEADER_NBYTES) :]))
            self.sent = min(self.sent, HEADER_NBYTES)
        self.done = True


class Receive:
    """A posted receive of exactly ``nbytes`` bytes; ``room`` is the memory for the next of them.

    A transport fills ``room`` and calls `filled`, which returns the memory for the next bytes, or None after the last.
    This class receives in one piece; `operation.FoldingReceive` folds piece after piece into its accumulator.

    ``transfer`` is what has begun to receive it: a thread, or the reader of a stream. The thread calls `filled`, and the
    driver of the world `finish`.
    """

    __slots__ = ("done", "fingerprint", "key", "nbytes", "owner", "peer", "room", "transfer")

    def __init__(self, peer: int, key: bytes, fingerprint: int, room: memoryview, owner: Owner | None) -> None:
        self.peer = peer
        self.key = key
        self.fingerprint = fingerprint
        self.nbytes = len(room)
        self.room = room
        self.owner = owner
        self.transfer: Mover | None = None
        self.done = False

    def filled(self) -> memoryview | None:
        return None

    def finish(self) -> None:
        self.done = True
        if self.owner is not None:
            self.owner.transferred()

    def abandon(self) -> None:
        """Give the memory back, to which nothing refers afterwards. Bytes that arrive for it are discarded."""
        if self.transfer is not None:
            self.transfer.stop()
        self.room, self.owner = _NO_ROOM, None
        self.done = True


class UnexpectedMessage(Receive):
    """A message that arrived before its receive was posted, received into its own memory."""

    __slots__ = ("bytes", "claimed")

    def __init__(self, peer: int, key: bytes, fingerprint: int, nbytes: int) -> None:
        self.bytes = memoryview(bytearray(nbytes))
        self.claimed: Receive | None = None
        super().__init__(peer, key, fingerprint, self.bytes, None)

    def finish(self) -> None:
        self.done = True
        if self.claimed is not None and not self.claimed.done:
            copy_into(self.bytes, self.claimed)
            self.claimed.finish()


class DiscardReceive(Receive):
    """Receives and drops the bytes of a message that no receive will match."""

    __slots__ = ("_left",)

    def __init__(self, peer: int, key: bytes, nbytes: int) -> None:
        super().__init__(peer, key, 0, memoryview(bytearray(min(nbytes, 1 << 16))), None)
        self.nbytes = nbytes
        self._left = nbytes - len(self.room)

    def filled(self) -> memoryview | None:
        room = self.room[: self._left]
        self._left -= len(room)
        return room if room else None


def copy_into(source: memoryview, receive: Receive) -> None:
    """Fill a receive from memory."""
    at, room = 0, receive.room if receive.nbytes else None
    while room is not None:
        room[:] = source[at : at + len(room)]
        at += len(room)
        room = receive.filled()


# -- matching -------------------------------------------------------------------------------------


class StalledMessage(Protocol):
    """A connection that has read the header of a message without a posted receive and leaves the body on the wire."""

    key: bytes
    fingerprint: int
    nbytes: int

    def resume(self, receive: Receive) -> None:
        """Continue to read, the body into ``receive``."""


class MessageSource(Protocol):
    """A connection from which a rank reads the message that it expects next without posting a receive for it.

    Attributes:
        arrivals: The descriptor on which a poll reports what arrives, and the event.
    """

    arrivals: tuple[tuple[int, int], ...]

    @property
    def taken(self) -> int:
        """The bytes that `take` has read of a message that has not arrived whole."""

    def take(self, header: bytes, room: memoryview, tries: int, frame: bytearray | None = None, /) -> bool | None:
        """Read the next message into ``room`` if it has exactly this header. Never blocks.

        A message that arrives in parts needs several calls, with the same arguments. Any other reading of the connection
        ends this: it copies the part out of ``room``, and gets the message from its beginning. The owner of ``room`` must
        neither change nor free it until then. `MatchingQueue.purge` copies the part when a group fails.

        Args:
            header: The header of the expected message.
            room: The memory for its body.
            tries: How often to look for a message before returning None; at least once.
            frame: Memory for the whole message, of which ``room`` is the end, if there is any: one range is read faster.

        Returns:
            True if the message has been read, None if nothing or only a part of it has arrived. False if anything else has
            happened: post a receive then, which gets the message from the bytes that were read.
        """

    def put_back(self) -> None:
        """Copy the part of a message that `take` has read, if any, out of its memory, which is not used any more."""


class MatchingHost(Protocol):
    """The part of the endpoint that its `MatchingQueue` objects use; part of `asyncdist.kernel.transport.base.Host`."""

    config: Config

    @property
    def expects_anybody(self) -> bool:
        """Whether a receive from any rank is posted, so that no stalled message may delay the messages behind it."""

    def unclaimed(self, peer: int, key: bytes, fingerprint: int, nbytes: int) -> Receive | None:
        """Return the receive for a message without a posted receive from this peer, or None.

        It is a receive from any rank, or a `DiscardReceive` if the group of the message has ended.
        """

    def mismatch(self, peer: int, receive: Receive, fingerprint: int, nbytes: int) -> None:
        """Fail the operation of a receive whose message has another fingerprint or size."""

    def no_room(self, peer: int, key: bytes, nbytes: int, stored: int) -> None:
        """Fail the group of an unexpected message that cannot be stored in addition to the ``stored`` bytes of others."""


class MatchingQueue:
    """The unexpected messages from one peer, and the receives posted for messages from it.

    Attributes:
        posted: The posted receives, by the keys of their messages.
        aside: The unexpected messages, by their keys.
        source: The connection on which the small messages of the peer arrive; None if the transport offers none.
    """

    __slots__ = ("_host", "_stalled", "aside", "aside_nbytes", "peer", "posted", "source")

    def __init__(self, peer: int, host: MatchingHost) -> None:
        self.peer = peer
        self.posted: dict[bytes, deque[Receive]] = {}
        self.aside: dict[bytes, deque[UnexpectedMessage]] = {}
        self.source: MessageSource | None = None
        self.aside_nbytes = 0
        self._stalled: list[StalledMessage] = []
        self._host = host

    def first(self) -> Receive | None:
        """Return the oldest posted receive, which the next message most likely matches."""
        for queue in self.posted.values():
            return queue[0]
        return None

    def post(self, receive: Receive) -> bool:
        """Post a receive.

        Returns:
            True if an unexpected message has filled the receive; its owner is then not notified. Otherwise its owner is
            notified when the message has arrived, perhaps before this method returns.
        """
        key = receive.key
        if self.aside and key in self.aside:
            return self._claim(receive)
        for stalled in self._stalled:
            if stalled.key == key:
                self._stalled.remove(stalled)
                stalled.resume(self._checked(receive, stalled.fingerprint, stalled.nbytes))
                return False
        queue = self.posted.get(key)
        if queue is None:
            self.posted[key] = deque((receive,))
        else:
            queue.append(receive)
        if self._stalled:
            self.unblock()
        return False

    def unblock(self) -> None:
        """Receive the stalled messages as unexpected messages: an awaited message may be behind them on the wire."""
        while self._stalled:
            stalled = self._stalled.pop(0)  # in order, because several may have the same key
            stalled.resume(self._put_aside(stalled.key, stalled.fingerprint, stalled.nbytes))

    def arrive(self, key: bytes, fingerprint: int, nbytes: int) -> Receive | None:
        """Return the receive for a message whose header has arrived; None to leave its body on the wire.

        In that case the connection calls `block` and reads no further until it is resumed.
        """
        queue = self.posted.get(key)
        if queue is not None:
            receive = queue.popleft()
            if not queue:
                del self.posted[key]
            matches = receive.nbytes == nbytes and receive.fingerprint == fingerprint
            return receive if matches else self._refuse(receive, fingerprint, nbytes)
        receive_of_host = self._host.unclaimed(self.peer, key, fingerprint, nbytes)
        if receive_of_host is not None:
            return receive_of_host
        if any(stalled.key == key for stalled in self._stalled):
            return None  # this message must not overtake an earlier one with the same key
        config = self._host.config
        small = nbytes <= config.eager_nbytes and self.aside_nbytes + nbytes <= config.aside_nbytes
        if small or self.posted or self._host.expects_anybody:
            return self._put_aside(key, fingerprint, nbytes)
        return None

    def block(self, connection: StalledMessage) -> None:
        """Store a connection that is stalled by a message without a posted receive."""
        self._stalled.append(connection)

    def purge(self, channel: bytes) -> None:
        """Discard the messages and receives of a group that has ended, by the first 8 bytes of their keys.

        Afterwards the connection does not use the memory of a call that was reading a message without a receive.
        """
        if self.source is not None:
            self.source.put_back()
        for key in [key for key in self.posted if key.startswith(channel)]:
            del self.posted[key]
        for key in [key for key in self.aside if key.startswith(channel)]:
            self.aside_nbytes -= sum(message.nbytes for message in self.aside.pop(key))
        for stalled in [stalled for stalled in self._stalled if stalled.key.startswith(channel)]:
            self._stalled.remove(stalled)
            stalled.resume(DiscardReceive(self.peer, stalled.key, stalled.nbytes))

    def has_arrived(self, key: bytes) -> bool:
        """Return whether a message with ``key`` is stored or stalled."""
        return key in self.aside or any(stalled.key == key for stalled in self._stalled)

    def claim(self, key: bytes, fingerprint: int, room: memoryview) -> bool:
        """Move the oldest unexpected message with ``key`` into ``room``, if it is whole and matches; return whether."""
        message = self.aside[key][0]
        if not (message.done and message.fingerprint == fingerprint and message.nbytes == len(room)):
            return False
        self._take_aside(key)
        room[:] = message.bytes
        return True

    def _put_aside(self, key: bytes, fingerprint: int, nbytes: int) -> Receive:
        """Store an unexpected message. A single one has no limit: its receive could not be posted otherwise."""
        most = max(_MOST_ASIDE * self._host.config.aside_nbytes, _LEAST_LIMIT)
        try:
            if self.aside_nbytes and self.aside_nbytes + nbytes > most:
                raise MemoryError
            message = UnexpectedMessage(self.peer, key, fingerprint, nbytes)
        except MemoryError:
            self._host.no_room(self.peer, key, nbytes, self.aside_nbytes)
            return DiscardReceive(self.peer, key, nbytes)
        self.aside_nbytes += nbytes
        self.aside.setdefault(key, deque()).append(message)
        return message

    def _take_aside(self, key: bytes) -> UnexpectedMessage:
        early = self.aside[key]
        message = early.popleft()
        self.aside_nbytes -= message.nbytes
        if not early:
            del self.aside[key]
        return message

    def _claim(self, receive: Receive) -> bool:
        message = self._take_aside(receive.key)
        if self._checked(receive, message.fingerprint, message.nbytes) is not receive:
            return False
        if not message.done:
            message.claimed = receive
            return False
        copy_into(message.bytes, receive)
        receive.done = True
        return True

    def _checked(self, receive: Receive, fingerprint: int, nbytes: int) -> Receive:
        """Return the receive if the message matches it, else a `DiscardReceive`."""
        matches = receive.nbytes == nbytes and receive.fingerprint == fingerprint
        return receive if matches else self._refuse(receive, fingerprint, nbytes)

    def _refuse(self, receive: Receive, fingerprint: int, nbytes: int) -> DiscardReceive:
        """Report a message that does not match its receive; return a receive that drops its bytes."""
        self._host.mismatch(self.peer, receive, fingerprint, nbytes)
        return DiscardReceive(self.peer, receive.key, nbytes)
