"""The contract of a transport: how messages get from one rank to another, and how they are matched with receives.

A world has one `Transport` of each usable kind. A transport listens, and makes a `Link` to each peer that this rank
sends to. Links carry *messages*: a header (`wire_format`) and a body, read directly from the sender's memory. The
receiving rank has one `MatchingQueue` for each peer, shared by all connections of that peer. It matches each message with
the *receive* that is posted for it:

* A receive is posted before the message arrives: the bytes go directly into the posted memory.
* No receive is posted and the message is small: it is stored as an `UnexpectedMessage` and copied when a receive is posted.
* No receive is posted and the message is large, or too many bytes are stored already: the body stays on the wire, which is
  back-pressure on the sender. If another receive is posted whose message may be behind it, the message is stored after
  all, because waiting would be a deadlock.

Every method here is called under the lock of the world's `Progress`; no method blocks. A transport reports to its
`Host`, the rank's endpoint. To write a transport, implement `Transport` and `Link`, announce the class under the
entry-point group ``asyncdist.transports``, and run the conformance tests of `asyncdist.testing` over it.

A transport that must probe which peers it reaches (shared memory) implements `Transport.probe_peers`, which runs before
the world is complete. A transport with faster collectives for a whole group than messages offers a `native.Native`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from asyncdist.base.callables import Callback
from asyncdist.base.timers import TimerTable
from asyncdist.kernel.transport.matching import (
    DiscardReceive,
    MatchingHost,
    MatchingQueue,
    MessageSource,
    Outgoing,
    Owner,
    Receive,
    StalledMessage,
    UnexpectedMessage,
    copy_into,
)

if TYPE_CHECKING:
    import socket

    from asyncdist.kernel.transport.native import Native

__all__ = [
    "Address", "Advance", "DiscardReceive", "Host", "Link", "MatchingQueue", "MessageSource", "Outgoing", "Owner",
    "Receive", "Sleep", "StalledMessage", "Transport", "UnexpectedMessage", "Wait", "copy_into",
]  # fmt: skip

Address = Mapping[str, Any]
Wait = tuple[int, int]
"""A file descriptor and the poll events to sleep on."""
Advance = Callable[[Iterable[int] | None], bool]
"""Makes progress on the given descriptors, or on all; returns whether anything moved."""


class Sleep(NamedTuple):
    """How a thread sleeps for a peer.

    Attributes:
        waits: The descriptors and poll events to sleep on.
        advance: Reads what has arrived on the descriptors, under the lock; None if a schedule reads it itself.
    """

    waits: Sequence[Wait]
    advance: Advance | None


# -- the two classes that a transport implements --------------------------------------------------------


class Link(ABC):
    """Carries the messages of this rank to one peer. Messages from the peer arrive at its `MatchingQueue`.

    Attributes:
        peer: The peer.
        is_direct: Whether a small message usually leaves at once, so that `send_now` is worth its copy if it does not.
        has_lanes: Whether it sends the parts of a tensor over as many connections as the setting `lanes` says.
    """

    is_direct = False
    has_lanes = False

    def __init__(self, peer: int) -> None:
        self.peer = peer

    @abstractmethod
    def send(self, message: Outgoing) -> bool:
        """Send a message after the earlier messages of its lane.

        Returns:
            True if the message has left already. Otherwise the link calls ``message.finish()`` later and reads the memory
            of the body until then.
        """

    def send_now(self, header: bytes, body: memoryview) -> Outgoing | None:
        """Send a small message of part 0 after the earlier ones of its lane, without an `Outgoing` if it leaves at once.

        Returns:
            None if the message has left; otherwise the message, which the link sends later, from a copy.
        """
        message = Outgoing.copied(self.peer, header, body)
        return None if self.send(message) else message

    def send_unordered(self, message: Outgoing) -> bool:
        """Send a control message as `send` does, but not behind data that the peer may leave on the wire."""
        return self.send(message)

    def open(self) -> None:  # noqa: B027 - a link that is always connected has nothing to do
        """Start to connect unless connected, so that a rank that only receives detects a dead peer too."""

    def connectivity_problem(self) -> str:
        """Describe a network problem that keeps messages from a peer that may be alive; empty if there is no problem."""
        return ""


class Transport(ABC):
    """One way of reaching peers."""

    name: ClassVar[str]
    """The name by which users select the transport."""
    preference: ClassVar[int] = 0
    """The order of automatic selection, highest first."""
    same_thread: ClassVar[bool] = False
    """Whether the thread that waits for a peer may also drive that peer, as with ranks in one process."""
    is_local: ClassVar[bool] = False
    """Whether it reaches only ranks of this machine. Its address is known to those alone."""
    beats: ClassVar[bool] = False
    """Whether the transport carries heartbeats: implements `beat`, and perhaps `pulse`."""

    def __init__(self, host: Host) -> None:
        self.host = host

    @classmethod
    def probe(cls) -> str | None:
        """Return None if this process can use the transport, else the reason as text."""
        return None

    @abstractmethod
    def listen(self, where: str) -> dict[str, Any]:
        """Start to listen at the address ``where`` of this host; return the address that peers need."""

    def end_listening(self) -> None:  # noqa: B027 - a transport without a listener has nothing to do
        """Stop listening, because every peer uses other transports. The default does nothing."""

    @abstractmethod
    def reaches(self, address: Address) -> bool:
        """Return whether a peer that published ``address`` can be reached from here by this transport."""

    async def probe_peers(self, addresses: Mapping[int, Address | None], timeout: float) -> list[int] | None:
        """Probe which ranks this rank reaches. An unreachable peer is not an error: another transport reaches it.

        It is called for local transports.

        Args:
            addresses: The address of each rank of this machine; None for a rank that does not use this transport.
            timeout: Limit in seconds.

        Returns:
            The ranks that were reached, which every rank then learns; None if `reaches` is sufficient.
        """
        return None

    def native(self, number: int, members: Sequence[int], waits: Sequence[int]) -> Native | None:
        """Return the native collectives of a group whose members all reach each other by this transport, if any.

        Any thread may call this. Point-to-point messages of the group still use links.

        Args:
            number: The channel number of the group: equal on every member, and unique to the group.
            members: The world ranks of the members.
            waits: The values that schedules yield to wait for each member: its rank in the group that runs them, which may
                have more members.
        """
        return None

    def spin_policy(self, local_size: int) -> tuple[float, bool]:
        """Return how long to spin before sleeping, because waking a thread takes longer than a short message.

        Args:
            local_size: The number of ranks on this host.

        Returns:
            The seconds to spin, and whether ranks outnumber cores.
        """
        crowded = local_size > (os.cpu_count() or 1)
        return (0.0 if crowded or self.same_thread else self.host.config.spin_us * 1e-6), crowded

    def peer_cores(self, core: int) -> Iterable[tuple[int, int, bool]]:
        """Publish the core of the calling thread, which waits, and return those of the peers on this host.

        Waiting threads call this at most about once in a millisecond.

        Returns:
            Rank, core and whether the rank sleeps, for each peer that this transport has memory in common with; the core is
            -1 if the peer has published none.
        """
        return ()

    @abstractmethod
    def link(self, peer: int, address: Address) -> Link:
        """Return a link to a peer. The link connects on first use."""

    @abstractmethod
    def advance(self, ready: Iterable[int] | None) -> bool:
        """Send and receive without waiting, on the given descriptors or on all; return whether any bytes moved."""

    @abstractmethod
    def waits(self) -> list[Wait] | None:
        """Return the descriptors and poll events to sleep on, or None if data has arrived and the caller must not sleep.

        From now until the next `advance`, peers signal new data on these descriptors.
        """

    def sleep(self, peer: int) -> Sleep | None:
        """Return how to sleep for what a peer does next in a native collective; None if `waits` alone reports it.

        From now until the call of `Sleep.advance`, the peer signals it.
        """
        return None

    def pulse(self) -> None:  # noqa: B027 - optional
        """Show the peers that this process runs. Called without the lock, on a thread that no driver delays."""

    def beat(self) -> Mapping[int, bool]:
        """Read what has arrived, and tell the connected peers that this rank is alive.

        Returns:
            Whether something has arrived since the last call from each peer whose heartbeats reach this rank as long as the
            peer lives. A peer whose messages this rank leaves on the wire counts as heard.
        """
        return {}

    def unanswered(self) -> Set[int]:
        """Return the peers whose hosts have not accepted a connection of this rank, although they had the time to do so."""
        return frozenset()

    def busy(self) -> bool:
        """Return whether messages are queued that only this rank's drivers can send."""
        return False

    def undelivered(self) -> Set[int]:
        """Return the peers for which bytes of messages wait on this host that are complete for the engine.

        A rank that leaves drives its transports for a limited time, until no such peer is left.
        """
        return frozenset()

    @abstractmethod
    def may_receive_from(self, peer: int) -> bool:
        """Return whether data from the peer may still arrive, including data that it sent before it left."""

    def disconnect(self, peer: int) -> None:  # noqa: B027 - a transport without connections has nothing to do
        """Close every connection to a lost peer, so that the peer detects the failure if it is alive."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening, close every link and release all resources."""


class Host(MatchingHost, Protocol):
    """The part of the endpoint that a transport uses."""

    rank: int
    world_size: int
    world_id: str
    timers: TimerTable
    """Timers that the endpoint runs under its lock."""

    def inbox(self, peer: int) -> MatchingQueue:
        """Return the matching queue of a peer."""

    def difference(self, peer: int, own: int, other: int) -> Exception:
        """Return the error for a collective whose fingerprint differs between this rank and a peer."""

    def control(self, peer: int, kind: int, key: bytes, body: bytes) -> None:
        """Handle a control message, of any kind but DATA."""

    def gone(self, peer: int) -> Exception | None:
        """Return the error of a lost peer, whose connections must be refused; None if the peer is not lost."""

    def accepts_notices(self, peer: int) -> bool:
        """Return whether a peer is neither lost nor leaving."""

    def lost(self, peer: int, reason: str) -> None:
        """Fail every group that contains a peer whose connection ended without goodbye."""

    def suspect(self, peer: int, reason: str) -> None:
        """Declare a peer lost after a grace period, unless a message of the peer explains the closed connection before."""

    def closing_frames(self, peer: int) -> bytes:
        """Return the frames to write before a connection to a peer is closed: the failures of groups, then goodbye."""

    def post(self, action: Callback) -> None:
        """Run ``action`` soon under this endpoint's lock. Any thread may call this, under any other lock."""

    def retire(self, sock: socket.socket) -> None:
        """Close a socket once no event loop watches it."""

    def others_compete(self) -> bool:
        """Return whether programs other than the ranks compete for the cores of this machine."""
