"""What a transport is: how messages get from one rank to another, and how they find who waits for them.

A world has one `Transport` of each usable kind. It listens, and makes a `Link` to each peer that is written to. Links
carry *messages*: a header (`framing`) and a run of bytes, taken straight from the sender's memory. On the other side
each peer has an `Inbox`, shared by whatever connections that peer has opened to us, in which messages meet the
*receives* that were posted for them:

* posted before the message comes: the bytes go straight into the posted memory;
* not yet posted, and small: the message is put aside and copied when somebody asks for it;
* not yet posted, and large, or too much put aside already: it stays on the wire, which is back-pressure on the sender.
  Only when something else is posted that may lie behind it (a deadlock otherwise) is it put aside after all.

Everything here is called under the lock of the world's `progress.Progress`; nothing here blocks. A transport reports to
its `Host`, the mesh. To write one: implement `Transport` and `Link`, announce the class under the entry-point group
``asyncdist.transports``, and run `asyncdist.testing.conformance` on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from asyncdist.config import Config
from asyncdist.framing import pack_header
from asyncdist.reminders import Reminders

if TYPE_CHECKING:
    import socket

Address = Mapping[str, Any]
Wait = tuple[int, int]


# -- what is moved --------------------------------------------------------------------------------


class Owner(Protocol):
    """Who is told that a transfer is over."""

    def transferred(self) -> None: ...


class Outgoing:
    """One message on its way out: header and body, and how many of their bytes have left."""

    __slots__ = ("body", "done", "header", "owner", "peer", "sent")

    def __init__(
        self, peer: int, key: bytes, fingerprint: int, body: memoryview, owner: Owner | None, kind: int = 1
    ) -> None:
        self.peer = peer
        self.header = pack_header(key, fingerprint, len(body), kind)
        self.body = body
        self.owner = owner
        self.sent = 0
        self.done = False

    def finish(self) -> None:
        self.done = True
        if self.owner is not None:
            self.owner.transferred()


class Receive:
    """A posted receive of exactly ``nbytes`` bytes; ``room`` is where the next of them go.

    When ``room`` has been filled whole, `filled` gives the next room, or None if that was all. This one receives in one
    piece; `operation.FoldingReceive` folds piece after piece into its accumulator.
    """

    __slots__ = ("done", "fingerprint", "key", "nbytes", "owner", "peer", "room")

    def __init__(self, peer: int, key: bytes, fingerprint: int, room: memoryview, owner: Owner | None) -> None:
        self.peer = peer
        self.key = key
        self.fingerprint = fingerprint
        self.nbytes = len(room)
        self.room = room
        self.owner = owner
        self.done = False

    def filled(self) -> memoryview | None:
        return None

    def finish(self) -> None:
        self.done = True
        if self.owner is not None:
            self.owner.transferred()


class PutAside(Receive):
    """An early message, received into memory of its own until somebody posts for it."""

    __slots__ = ("bytes", "claimed")

    def __init__(self, peer: int, key: bytes, fingerprint: int, nbytes: int) -> None:
        self.bytes = memoryview(bytearray(nbytes))
        self.claimed: Receive | None = None
        super().__init__(peer, key, fingerprint, self.bytes, None)

    def finish(self) -> None:
        self.done = True
        if self.claimed is not None and not self.claimed.done:
            pour(self.bytes, self.claimed)
            self.claimed.finish()


class Discard(Receive):
    """The bin: takes the bytes of a message that nobody wants any more."""

    __slots__ = ("_left",)

    def __init__(self, peer: int, key: bytes, nbytes: int) -> None:
        super().__init__(peer, key, 0, memoryview(bytearray(min(nbytes, 1 << 16))), None)
        self.nbytes = nbytes
        self._left = nbytes - len(self.room)

    def filled(self) -> memoryview | None:
        room = self.room[: self._left]
        self._left -= len(room)
        return room if room else None


def pour(source: memoryview, receive: Receive) -> None:
    """Fill a receive from memory."""
    at, room = 0, receive.room if receive.nbytes else None
    while room is not None:
        room[:] = source[at : at + len(room)]
        at += len(room)
        room = receive.filled()


# -- where messages meet receives -----------------------------------------------------------------


class Blocked(Protocol):
    """A connection that has read a header nobody has posted for, and waits with the body on the wire."""

    key: bytes
    fingerprint: int
    nbytes: int

    def resume(self, receive: Receive) -> None:
        """Go on, with the body into ``receive``."""


class Inbox:
    """The messages from one peer that wait for a receive, and the receives that wait for a message."""

    __slots__ = ("_aside", "_aside_nbytes", "_blocked", "_host", "peer", "posted")

    def __init__(self, peer: int, host: Host) -> None:
        self.peer = peer
        self.posted: dict[bytes, deque[Receive]] = {}
        self._aside: dict[bytes, deque[PutAside]] = {}
        self._aside_nbytes = 0
        self._blocked: list[Blocked] = []
        self._host = host

    def first(self) -> Receive | None:
        """Return the receive that was posted first: most likely the next message is for it."""
        for queue in self.posted.values():
            return queue[0]
        return None

    def post(self, receive: Receive) -> bool:
        """Post a receive; True if an early message has filled it on the spot, and nobody will be told that it is done.

        Else its owner is told, perhaps before this returns.
        """
        key = receive.key
        if self._aside:
            early = self._aside.get(key)
            if early:
                return self._claim(early, receive)
        for blocked in self._blocked:
            if blocked.key == key:
                self._blocked.remove(blocked)
                blocked.resume(self._checked(receive, blocked.fingerprint, blocked.nbytes))
                return False
        queue = self.posted.get(key)
        if queue is None:
            self.posted[key] = deque((receive,))
        else:
            queue.append(receive)
        self.unblock()
        return False

    def unblock(self) -> None:
        """Put aside what waits on the wire: what somebody waits for may lie behind it."""
        while self._blocked:
            blocked = self._blocked.pop()
            blocked.resume(self._put_aside(blocked.key, blocked.fingerprint, blocked.nbytes))

    def arrive(self, key: bytes, fingerprint: int, nbytes: int) -> Receive | None:
        """Return what receives the message whose header has come; None if its body is to wait on the wire.

        In that case the connection calls `block` and reads no further until it is resumed.
        """
        queue = self.posted.get(key)
        if queue is not None:
            receive = queue.popleft()
            if not queue:
                del self.posted[key]
            return self._checked(receive, fingerprint, nbytes)
        taken = self._host.unclaimed(self.peer, key, fingerprint, nbytes)
        if taken is not None:
            return taken
        config = self._host.config
        small = nbytes <= config.eager_nbytes and self._aside_nbytes + nbytes <= config.aside_nbytes
        if small or self.posted or self._host.expects_anybody:
            return self._put_aside(key, fingerprint, nbytes)
        return None

    def block(self, connection: Blocked) -> None:
        """Remember a connection that waits with a message nobody has posted for."""
        self._blocked.append(connection)

    def purge(self, channel: bytes) -> None:
        """Forget everything of a channel (the first 8 bytes of its keys) whose group has ended."""
        for key in [key for key in self.posted if key.startswith(channel)]:
            del self.posted[key]
        for key in [key for key in self._aside if key.startswith(channel)]:
            self._aside_nbytes -= sum(message.nbytes for message in self._aside.pop(key))
        for blocked in [blocked for blocked in self._blocked if blocked.key.startswith(channel)]:
            self._blocked.remove(blocked)
            blocked.resume(Discard(self.peer, blocked.key, blocked.nbytes))

    def early(self, operation: bytes) -> list[tuple[int, int]]:
        """Return (fingerprint, nbytes) of messages that came early for an operation (12 bytes of its keys)."""
        aside = [
            (m.fingerprint, m.nbytes) for key, queue in self._aside.items() if key.startswith(operation) for m in queue
        ]
        return aside + [(b.fingerprint, b.nbytes) for b in self._blocked if b.key.startswith(operation)]

    def first_early(self, key: bytes) -> PutAside | Blocked | None:
        """Return the message that waits under ``key``, if one does."""
        queue = self._aside.get(key)
        return queue[0] if queue else next((blocked for blocked in self._blocked if blocked.key == key), None)

    def _put_aside(self, key: bytes, fingerprint: int, nbytes: int) -> PutAside:
        message = PutAside(self.peer, key, fingerprint, nbytes)
        self._aside_nbytes += nbytes
        self._aside.setdefault(key, deque()).append(message)
        return message

    def _claim(self, early: deque[PutAside], receive: Receive) -> bool:
        message = early.popleft()
        self._aside_nbytes -= message.nbytes
        if not early:
            del self._aside[receive.key]
        if self._checked(receive, message.fingerprint, message.nbytes) is not receive:
            return False
        if not message.done:
            message.claimed = receive
            return False
        pour(message.bytes, receive)
        receive.done = True
        return True

    def _checked(self, receive: Receive, fingerprint: int, nbytes: int) -> Receive:
        """Return the receive if the message is what it expects; else report the mismatch and have it discarded."""
        if receive.nbytes == nbytes and receive.fingerprint == fingerprint:
            return receive
        self._host.mismatch(self.peer, receive, fingerprint, nbytes)
        return Discard(self.peer, receive.key, nbytes)


# -- the two classes that a transport writes --------------------------------------------------------


class Link(ABC):
    """The way to one peer: carries our messages there. What the peer sends us comes to its `Inbox`."""

    def __init__(self, peer: int) -> None:
        self.peer = peer

    @abstractmethod
    def send(self, message: Outgoing) -> bool:
        """Send a message, after those sent before in its lane; return True if it has left already.

        Else it is finished later with ``message.finish()``. The body's memory is read until then.
        """

    @abstractmethod
    def open(self) -> None:
        """Begin to connect if we have not, so that a dead peer is noticed even by who only receives."""

    @abstractmethod
    def close(self) -> None:
        """Say goodbye if the peer still listens, and let go of every connection with it."""


class Transport(ABC):
    """One way of reaching peers.

    ``name`` is what users select it by; ``preference`` orders automatic choice; ``same_thread`` says that peers may be
    driven by the very thread that waits for them.
    """

    name: ClassVar[str]
    preference: ClassVar[int] = 0
    same_thread: ClassVar[bool] = False

    def __init__(self, host: Host) -> None:
        self.host = host

    @classmethod
    @abstractmethod
    def probe(cls) -> str | None:
        """Return None if this transport can be used here, else the reason in words."""

    @abstractmethod
    def listen(self, where: str) -> dict[str, Any]:
        """Start to take connections at the address ``where`` of this machine; return what peers need to reach us."""

    @abstractmethod
    def reaches(self, address: Address) -> bool:
        """Return whether a peer that published ``address`` can be reached from here by this transport."""

    @abstractmethod
    def link(self, peer: int, address: Address) -> Link:
        """Make the link to a peer. It connects when it is first used."""

    @abstractmethod
    def advance(self, ready: Iterable[int] | None) -> bool:
        """Move what can be moved: on the given descriptors, or on all that have something to do."""

    @abstractmethod
    def waits(self) -> list[Wait]:
        """Return the descriptors and poll events to wait for."""

    @abstractmethod
    def busy(self) -> bool:
        """Return whether messages are queued that nobody else drives out."""

    @abstractmethod
    def hears(self, peer: int) -> bool:
        """Return whether the peer can still send us something, be it only what it sent before it left."""

    @abstractmethod
    def forget(self, peer: int) -> None:
        """Close whatever goes to or comes from a peer that is lost to us, so that it learns so if it is alive."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening and close every link; nothing is left behind."""


class Host(Protocol):
    """What a transport sees of the mesh that it serves."""

    rank: int
    world_size: int
    world_id: str
    config: Config
    reminders: Reminders  # of what is to be done under the lock at a time

    @property
    def expects_anybody(self) -> bool:
        """Whether a receive from any rank is posted, so that no message may hold up those behind it."""

    def inbox(self, peer: int) -> Inbox:
        """Return the inbox of a peer."""

    def unclaimed(self, peer: int, key: bytes, fingerprint: int, nbytes: int) -> Receive | None:
        """Return what takes a message that nobody posted for (a receive from any rank; the bin), or None."""

    def mismatch(self, peer: int, receive: Receive, fingerprint: int, nbytes: int) -> None:
        """Fail the operation whose receive met a message of another kind or size."""

    def control(self, peer: int, kind: int, key: bytes, body: bytes) -> None:
        """Take a message about the peer or a group rather than for one."""

    def gone(self, peer: int) -> Exception | None:
        """Return what a peer was lost with; no connection of its is to be taken any more. None if it is not lost."""

    def lost(self, peer: int, reason: str) -> None:
        """Fail every group with a peer whose connection ended without goodbye."""

    def doubt(self, peer: int, reason: str) -> None:
        """Call a peer lost unless what it still has to say explains the end of a connection to it soon."""

    @property
    def last_words(self) -> bytes:
        """The notices to write at the end of a connection that is closed in order: failures, then goodbye."""

    def post(self, action: Callable[[], None]) -> None:
        """Have ``action`` done soon under this host's lock; callable from any thread and under any other lock."""

    def retire(self, sock: socket.socket) -> None:
        """Close a socket once no event loop watches it."""
