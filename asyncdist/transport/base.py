"""What a transport is: how messages get from one rank to another, and how they find who waits for them.

A world has one `Transport` of each usable kind. It listens, and makes a `Link` to each peer that is written to. Links
carry *messages*: a header (`framing`) and a run of bytes, taken straight from the sender's memory. On the other side
each peer has an `MatchingQueue`, shared by whatever connections that peer has opened to us, in which messages meet the
*receives* that were posted for them:

* posted before the message comes: the bytes go straight into the posted memory;
* not yet posted, and small: the message is put aside and copied when somebody asks for it;
* not yet posted, and large, or too much put aside already: it stays on the wire, which is back-pressure on the sender.
  Only when something else is posted that may lie behind it (a deadlock otherwise) is it put aside after all.

Everything here is called under the lock of the world's `progress.Progress`; nothing here blocks. A transport reports to
its `Host`, the mesh. To write one: implement `Transport` and `Link`, announce the class under the entry-point group
``asyncdist.transports``, and run the drills and the promises of `asyncdist.testing` over it.

A transport that reaches some peers only by trying (shared memory) says so in `Transport.probe_peers`, before the world is
complete; one that can do better than messages where it reaches a whole group offers a `native.Native`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from asyncdist.base.timers import TimerTable
from asyncdist.transport.matching import (
    DiscardReceive,
    MatchingHost,
    MatchingQueue,
    Outgoing,
    Owner,
    Receive,
    StalledMessage,
    UnexpectedMessage,
    copy_into,
)

if TYPE_CHECKING:
    import socket

    from asyncdist.transport.native import Native

__all__ = [
    "Address",
    "DiscardReceive",
    "Host",
    "Link",
    "MatchingQueue",
    "Outgoing",
    "Owner",
    "Receive",
    "StalledMessage",
    "Transport",
    "UnexpectedMessage",
    "Wait",
    "copy_into",
]  # fmt: skip

Address = Mapping[str, Any]
Wait = tuple[int, int]


# -- the two classes that a transport writes --------------------------------------------------------


class Link(ABC):
    """The way to one peer: carries our messages there. What the peer sends us comes to its `MatchingQueue`."""

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

    def connectivity_problem(self) -> str:
        """Say in words that the network, and not the peer, lets nothing through to it yet; empty if it does."""
        return ""

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

    async def probe_peers(self, addresses: Sequence[Address | None], timeout: float) -> list[int] | None:
        """Try, for ``timeout`` seconds at most, whom of all ranks (None: it does not use this transport) we reach.

        Returns their ranks, which every rank learns of all others; None if `reaches` says it all. Never raises because
        of a peer: who cannot be reached so will be by another transport.
        """
        return None

    def native(self, number: int, members: Sequence[int]) -> Native | None:
        """Return the native collectives of a group whose members all reach each other by this transport, if any.

        ``number`` is the same on every member and no other group's. Any thread; messages go on over links.
        """
        return None

    def spin(self, here: int) -> tuple[float, bool]:
        """Return for how many seconds one who waits had better try on than sleep, and whether peers need our core.

        ``here`` is how many ranks there are on this host. Waking a sleeper takes longer than a short message.
        """
        crowded = here > (os.cpu_count() or 1)
        return (0.0 if crowded or self.same_thread else self.host.config.spin_us * 1e-6), crowded

    def spread(self) -> None:  # noqa: B027 - which transports need not do
        """Move this thread to another core if too many peers crowd on its own. Called now and then by one who waits."""

    @abstractmethod
    def link(self, peer: int, address: Address) -> Link:
        """Make the link to a peer. It connects when it is first used."""

    @abstractmethod
    def advance(self, ready: Iterable[int] | None) -> bool:
        """Move what can be moved: on the given descriptors, or on all that have something to do."""

    @abstractmethod
    def waits(self) -> list[Wait] | None:
        """Return the descriptors and poll events to sleep on; from now until `advance` peers must wake us there.

        None if something has moved meanwhile: who wanted to sleep looks again first.
        """

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


class Host(MatchingHost, Protocol):
    """What a transport sees of the mesh that it serves."""

    rank: int
    world_size: int
    world_id: str
    timers: TimerTable
    """Timers that the endpoint runs under its lock."""

    def inbox(self, peer: int) -> MatchingQueue:
        """Return the inbox of a peer."""

    def difference(self, peer: int, ours: int, theirs: int) -> Exception:
        """Return the error to raise where a peer's fingerprint of a collective is not ours."""

    def control(self, peer: int, kind: int, key: bytes, body: bytes) -> None:
        """Take a message about the peer or a group rather than for one."""

    def gone(self, peer: int) -> Exception | None:
        """Return what a peer was lost with; no connection of its is to be taken any more. None if it is not lost."""

    def lost(self, peer: int, reason: str) -> None:
        """Fail every group with a peer whose connection ended without goodbye."""

    def suspect(self, peer: int, reason: str) -> None:
        """Call a peer lost unless what it still has to say explains the end of a connection to it soon."""

    @property
    def closing_frames(self) -> bytes:
        """The notices to write at the end of a connection that is closed in order: failures, then goodbye."""

    def post(self, action: Callable[[], None]) -> None:
        """Have ``action`` done soon under this host's lock; callable from any thread and under any other lock."""

    def retire(self, sock: socket.socket) -> None:
        """Close a socket once no event loop watches it."""
