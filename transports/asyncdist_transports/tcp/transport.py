"""The TCP transport of one rank: its listener, and every connection that it has opened or accepted.

`asyncdist.kernel.transport.registry` loads `TcpTransport`; the engine's endpoint drives it through the `Transport`
contract.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import select
from collections.abc import Iterable
from time import monotonic
from typing import Any, ClassVar

from asyncdist.base.callables import Callback
from asyncdist.errors import AsyncdistError, PeerLostError
from asyncdist.kernel.transport.base import Address, Host, Link, Outgoing, Transport, Wait
from asyncdist.kernel.transport.wire_format import KEY
from asyncdist.net.admission import EvictingQueue
from asyncdist.net.refusals import RefusalLog
from asyncdist.net.security import tls
from asyncdist_transports.byte_stream import LENT_NBYTES, Ended
from asyncdist_transports.tcp.connection import Inbound, Outbound, Unreached
from asyncdist_transports.tcp.listener import Listener
from asyncdist_transports.tcp.sockets import READ, set_options
from asyncdist_transports.tcp.transfer_threads import TransferThreads

log = logging.getLogger("asyncdist.tcp")

# Seconds between two attempts to connect to a host that cannot be reached.
_TRY_AGAIN_AFTER = 0.1
# Seconds for which a host may be unreachable where no heartbeats say for how long.
_UNREACHED_FOR = 5.0
# The lane of messages that must not wait behind data.
_UNORDERED = (1 << 16) - 1
# Unauthenticated connections allowed in addition to those of all peers.
_MAX_UNAUTHENTICATED = 256


class TcpTransport(Transport):
    """Non-blocking TCP sockets, driven by the thread or loop that drives the world."""

    name: ClassVar[str] = "tcp"
    preference: ClassVar[int] = 10
    beats: ClassVar[bool] = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._listener: Listener | None = None
        self.connections: dict[int, Inbound | Outbound] = {}
        self._inbound, self._inbound_poll = 0, select.poll()
        """How many connections are inbound, and a poll object with all of them."""
        self._deaf_since: float | None = None
        """Since when none of the watched peers has been heard; None if one was heard at the last beat."""
        most = _MAX_UNAUTHENTICATED + host.world_size * host.config.lanes
        self._unauthenticated: EvictingQueue[Inbound] = EvictingQueue(most, self._evict)
        self._refusals = RefusalLog(log, f"rank {host.rank}")
        contexts = tls.rank_contexts(host.config)
        self._accepting = contexts[0] if contexts else None
        self._dialling = contexts[1] if contexts else None
        self.is_encrypted = contexts is not None
        """Whether the connections use TLS."""
        self.threads = TransferThreads(host)

    # -- opening and closing -------------------------------------------------------------------

    def listen(self, where: str) -> dict[str, Any]:
        self._listener = Listener(where, self.host)
        return {"host": where, "port": self._listener.port}

    def reaches(self, address: Address) -> bool:
        return True

    def link(self, peer: int, address: Address) -> TcpLink:
        return TcpLink(peer, (address["host"], address["port"]), self)

    def open(self, peer: int, lane: int, where: tuple[str, int]) -> Outbound:
        connection = Outbound(peer, lane, where, self, self._dialling)
        self.connections[connection.fileno()] = connection
        return connection

    def may_receive_from(self, peer: int) -> bool:
        """Return whether the peer has a connection to this rank, whose end would report the peer's death."""
        return any(c.peer == peer for c in self.connections.values() if isinstance(c, Inbound))

    def disconnect(self, peer: int) -> None:
        # A peer that reaches this rank, but is not reached by it, receives the reason over its own connection.
        unreached = isinstance(self.host.gone(peer), PeerLostError)
        for connection in [c for c in self.connections.values() if c.peer == peer]:
            self.drop(connection, say_goodbye=unreached and isinstance(connection, Inbound))

    def end_listening(self) -> None:
        if self._listener is not None:
            self._listener.close(self.host)
            self._listener = None

    def close(self) -> None:
        self.end_listening()
        for connection in list(self.connections.values()):
            self.drop(connection, say_goodbye=True)
        self.threads.close()
        self._refusals.flush()

    def drop(self, connection: Inbound | Outbound, *, say_goodbye: bool) -> None:
        """Close a connection and remove it."""
        known = self.connections.pop(connection.fileno(), None)
        if known is not None and isinstance(connection, Inbound):
            self._inbound -= 1
            self._inbound_poll.unregister(connection)
        connection.close(say_goodbye=say_goodbye)
        if isinstance(connection, Inbound):
            self.end_authentication(connection)
        else:
            self.host.timers.cancel(connection)

    # -- moving bytes --------------------------------------------------------------------------

    def advance(self, ready: Iterable[int] | None) -> bool:
        moved = False
        if ready is None:
            encrypted = self.is_encrypted
            # One poll costs less than a read from each of several sockets. It does not report decrypted bytes.
            polls = self._inbound > 1 and not encrypted
            for connection in list(self.connections.values()):
                # The usual case of a connection without work costs no call of `pump`.
                if isinstance(connection, Outbound):
                    works = encrypted or bool(connection.queue)
                else:
                    works = not polls or connection.backlogged
                if works:
                    moved = self._pump(connection, False) or moved
            if not polls:
                return moved
            ready = [descriptor for descriptor, _ in self._inbound_poll.poll(0)]
        for descriptor in ready:
            known = self.connections.get(descriptor)
            if known is not None:
                moved = self._pump(known, True) or moved
            elif self._listener is not None and self._listener.fileno() == descriptor:
                moved = self._accept() or moved
        return moved

    def waits(self) -> list[Wait]:
        waits = [(fd, events) for fd, c in self.connections.items() if (events := c.waits())]
        if self._listener is not None and not self._listener.paused:
            waits.append((self._listener.fileno(), READ))
        return waits

    def beat(self) -> dict[int, bool]:
        if self.advance(self._readable()):
            self.host.post(_nothing)
        by_peer: dict[int, list[Inbound | Outbound]] = {}
        for connection in self.connections.values():
            # A heartbeat to a peer that has left would let its system discard what it has not sent yet.
            if connection.peer is not None and connection.is_watched and self.host.accepts_notices(connection.peer):
                by_peer.setdefault(connection.peer, []).append(connection)
        heard = {peer: self._beat(connections) for peer, connections in by_peer.items()}
        if any(heard.values()):
            self._deaf_since = None
        elif heard and self._deaf_since is None:
            self._deaf_since = monotonic()
        return heard

    def unanswered(self) -> set[int]:
        outbound = [each for each in self.connections.values() if isinstance(each, Outbound)]
        return {connection.peer for connection in outbound if connection.is_unanswered()}

    def _readable(self) -> list[int]:
        """Return the descriptors that may have something to read.

        A poll reports neither a heartbeat on the way back nor a few bytes of a large message.
        """
        waits, poll = self.waits(), select.poll()
        for descriptor, events in waits:
            poll.register(descriptor, events)
        reported = {descriptor for descriptor, _ in poll.poll(0)}
        return [fd for fd, _ in waits if fd in reported or fd in self.connections]

    def _beat(self, connections: list[Inbound | Outbound]) -> bool:
        """Send a heartbeat to a peer with these connections, and return whether the peer was heard.

        A heartbeat travels on the way back of a connection, where nothing can stay on the wire before it. A peer that has
        opened no connection receives it on those of this rank. A peer that receives none is not heard either: so both know
        of a network that drops packets in one direction, although those of the other direction arrive for some time.
        """
        inbound = [connection for connection in connections if isinstance(connection, Inbound)]
        outbound = [connection for connection in connections if isinstance(connection, Outbound)]
        answers = all(connection.answers() for connection in inbound[:1])
        for connection in inbound[:1] or outbound:
            # The next read reports the end of a connection.
            with contextlib.suppress(Ended):
                connection.beat()
        heard = [connection.was_heard() for connection in connections]
        return answers and (any(heard) or (not outbound and all(connection.blocked for connection in inbound)))

    def busy(self) -> bool:
        # Called without the driver lock too, hence the copy.
        for connection in list(self.connections.values()):
            if type(connection) is Outbound and (connection.queue or (self.is_encrypted and connection.unsent)):
                return True
        return False

    def undelivered(self) -> set[int]:
        outbound = [each for each in list(self.connections.values()) if isinstance(each, Outbound)]
        return {connection.peer for connection in outbound if not connection.is_delivered()}

    def go_on(self, connection: Inbound | Outbound) -> None:
        """Go on with a connection after a thread has moved a message."""
        self._pump(connection, True)

    def _pump(self, connection: Inbound | Outbound, ready: bool) -> bool:
        # Another connection's error may have closed it.
        if connection.closed:
            return False
        try:
            return connection.pump(ready)
        except Unreached as end:
            if not (isinstance(connection, Outbound) and self._rest(connection)):
                self._ended(connection, str(end))
        except Ended as end:
            self._ended(connection, str(end))
        except AsyncdistError as error:
            self._ended(connection, error.summary, is_lost=True)
        except MemoryError:
            self._ended(connection, "it sent a message that does not fit into this rank's memory", is_lost=True)
        return True

    def _ended(self, connection: Inbound | Outbound, reason: str, *, is_lost: bool = False) -> None:
        if isinstance(connection, Outbound) and connection.handshake_stalled and not is_lost:
            self._open_again(connection, connection.reconnect)
            return
        self.drop(connection, say_goodbye=False)
        peer = connection.peer
        if peer is None:
            self._refusals.add(reason)
        elif is_lost or (connection.established and not self._has_other_connection(peer)):
            self.host.lost(peer, reason)
        # Another connection or another rank may deliver the reason.
        else:
            self.host.suspect(peer, reason)

    def _open_again(self, connection: Outbound, connect: Callback) -> None:
        self.connections.pop(connection.fileno(), None)
        try:
            connect()
        # Out of descriptors: the engine fails the groups.
        except OSError:
            connection.closed = True
            raise
        self.connections[connection.fileno()] = connection

    def _rest(self, connection: Outbound) -> bool:
        """Let a connection to an unreachable host try again later; return False after the limit.

        A link may be down for a moment. A rank that has heard no peer over the network for longer does not wait again.
        """
        since = connection.tried_since if self._deaf_since is None else min(connection.tried_since, self._deaf_since)
        if monotonic() - since >= (self.host.config.heartbeat or _UNREACHED_FOR):
            return False
        connection.rest()
        again = functools.partial(self._open_again, connection, connection.try_again)
        self.host.timers.schedule(connection, monotonic() + _TRY_AGAIN_AFTER, again)
        return True

    def _has_other_connection(self, peer: int) -> bool:
        """Return whether a connection is left that belongs to the peer, or to a rank that has not said yet which it is.

        A connection without the proof cannot carry the reason of an end: its rank sends nothing before the proof is
        accepted. So strangers delay no decision.
        """
        ranks_to_come = any(connection.is_proven for connection in self._unauthenticated)
        return ranks_to_come or any(c.peer == peer for c in self.connections.values())

    # -- unauthenticated connections -----------------------------------------------------------

    def _accept(self) -> bool:
        assert self._listener is not None
        moved = False
        for sock in self._listener.accept_pending(self.host):
            set_options(sock, self.host)
            connection = Inbound(sock, self, self._accepting)
            self.connections[connection.fileno()] = connection
            self._inbound += 1
            self._inbound_poll.register(connection, READ)
            until = monotonic() + self.host.config.handshake_timeout
            self.host.timers.schedule(connection, until, functools.partial(self._overdue, connection))
            self._unauthenticated.add(connection)
            self._pump(connection, True)
            moved = True
        return moved

    def _evict(self, connection: Inbound) -> None:
        self.host.timers.cancel(connection)
        self._ended(connection, "it had not authenticated, and too many connections had not")

    def _overdue(self, connection: Inbound) -> None:
        # The proof may have arrived since the last read.
        self._pump(connection, True)
        if connection in self._unauthenticated:
            self._ended(connection, "it did not authenticate in time")

    def end_authentication(self, connection: Inbound) -> None:
        """Stop the timer of a connection that has authenticated, or is closed."""
        if connection in self._unauthenticated:
            self._unauthenticated.discard(connection)
            self.host.timers.cancel(connection)


def _nothing() -> None:
    """Do nothing: the driver that runs this continues the operations that wait for what has arrived."""


class TcpLink(Link):
    """The lanes to one peer, opened when first used."""

    has_lanes = True

    def __init__(self, peer: int, where: tuple[str, int], transport: TcpTransport) -> None:
        super().__init__(peer)
        self._where = where
        self._transport = transport
        self.is_direct = not transport.is_encrypted
        self._lanes: dict[int, Outbound] = {}

    def send(self, message: Outgoing) -> bool:
        # The number of lanes changes while a world starts, between two messages.
        lanes = self._transport.host.config.lanes
        lane = KEY.unpack_from(message.header)[2] % lanes if lanes > 1 else 0
        connection = self._lanes.get(lane) or self._open(lane)
        if len(message.body) >= LENT_NBYTES:
            return connection.send(message)
        return connection.writer.send(message)

    def send_now(self, header: bytes, body: memoryview) -> Outgoing | None:
        connection = self._lanes.get(0) or self._open(0)
        return connection.writer.send_now(self.peer, header, body)

    def send_unordered(self, message: Outgoing) -> bool:
        connection = self._lanes.get(_UNORDERED) or self._open(_UNORDERED)
        return connection.writer.send(message)

    def open(self) -> None:
        if 0 not in self._lanes and not self._transport.may_receive_from(self.peer):
            self._open(0)

    def connectivity_problem(self) -> str:
        problems = (lane.connectivity_problem for number, lane in self._lanes.items() if number != _UNORDERED)
        return next(filter(None, problems), "")

    def _open(self, lane: int) -> Outbound:
        connection = self._lanes[lane] = self._transport.open(self.peer, lane, self._where)
        return connection
