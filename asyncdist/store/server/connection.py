"""Base of all connections to a store server: queues replies and applies backpressure, whatever the format.

The event loop calls in; nothing is awaited and no task is made. A connection stops reading requests while its client does
not read replies. A subscriber that does not read what other clients publish is disconnected; replies to its own requests
never cause that. Subclassed in `session`, `c10d_session` and `accept`; it does not import the server.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any, Protocol

from asyncdist.base import lifecycle
from asyncdist.errors import AuthenticationError, ProtocolError
from asyncdist.store.persistence.group_commit import GroupCommit
from asyncdist.store.protocol.operations import Reply

logger = logging.getLogger("asyncdist.store.server.server")

BATCH_NBYTES = 256 << 10
"""Bytes of replies that are sent together at most."""
BACKLOG_NBYTES = 64 << 20
"""Published bytes that may wait for a client, above one frame, before the server disconnects it."""


class ConnectionContext(Protocol):
    """What a connection needs of its server."""

    durability: GroupCommit | None
    halted: bool
    limit: int

    def heard(self, client: object) -> None:
        """Tell the busy poll that a client has sent something."""

    def dismiss(self, connection: ServerConnection) -> None:
        """Release everything that an ended connection has open."""

    def count_refusal(self) -> None:
        """Count a connection that is refused or dropped."""


class ServerConnection(asyncio.Protocol, ABC):
    """One client. Hashable by identity: it is the client that the state machine knows."""

    __slots__ = (
        "__weakref__",
        "_closing",
        "_held_nbytes",
        "_out",
        "_out_nbytes",
        "_server",
        "_transport",
        "_write_paused",
        "_yielding",
        "paused",
        "peer",
    )

    def __init__(self, server: ConnectionContext, transport: asyncio.Transport | None = None, peer: str = "?") -> None:
        self.peer = peer
        self._server = server
        self._transport = transport
        self._out: list[bytes] = []
        self._out_nbytes = 0
        self._held_nbytes = 0  # of replies that wait until the changes they show are on disk
        self._write_paused = False  # the socket takes no more
        self._yielding = False  # other connections have their turn first
        self.paused = False  # no further request is executed, for one of these reasons
        self._closing = False
        lifecycle.close_in_children(self)

    def fileno(self) -> int:
        """Return the descriptor of its socket, or -1 if that is closed."""
        return -1 if self._transport is None else descriptor_of(self._transport)

    # -- what each format implements --------------------------------------------------------------

    @abstractmethod
    def receive(self, data: bytes) -> None:
        """Execute the requests in the bytes that arrived.

        Raises:
            ProtocolError: The client breaks the protocol.
            AuthenticationError: The client cannot prove that it holds the token."""

    @abstractmethod
    def answer(self, reply: Reply) -> None:
        """Queue a reply that is due to this client."""

    def joined(self, pieces: list[bytes]) -> bytes:
        """Return the queued pieces in wire format."""
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    @abstractmethod
    def unfinished(self) -> bool:
        """Whether a request has arrived in part or has not been executed."""

    # -- what the loop calls ----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.take(data)
        self._server.heard(self)

    def take(self, data: bytes) -> None:
        """Execute the requests in ``data``; refuse a client that breaks the protocol, and drop it on an internal error."""
        try:
            self.receive(data)
        except (ProtocolError, AuthenticationError) as error:
            self.refuse(str(error))
        except Exception:
            self.fail()

    def pause_writing(self) -> None:
        self._write_paused = self.paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._go_on()

    def _go_on(self) -> None:
        """Resume execution unless backpressure still applies."""
        if self._backpressured:
            return
        self.paused = False
        if self._transport is not None and not self._closing:
            self._transport.resume_reading()
            self.data_received(b"")

    def _rest(self) -> None:
        """Pause execution until the other connections have had a turn."""
        self._yielding = self.paused = True
        asyncio.get_running_loop().call_soon(self._rested)

    def _rested(self) -> None:
        self._yielding = False
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.unfinished:
            logger.info("store: %s vanished in the middle of a request", self.peer)
        self._transport = None
        self._out.clear()
        self._server.dismiss(self)

    # -- replies ----------------------------------------------------------------------------------

    def put(self, piece: bytes) -> None:
        """Queue bytes for the next flush."""
        if self._transport is not None:
            self._out.append(piece)
            self._out_nbytes += len(piece)

    def flush(self) -> None:
        """Send the queued bytes."""
        if not self._out or self._transport is None:
            return
        out, self._out, self._out_nbytes = self._out, [], 0
        data = self.joined(out)
        self._pass_on(data)

    def _pass_on(self, data: Any) -> None:
        """Send something when the changes that it may show are on disk."""
        durability = self._server.durability
        if durability is None or not durability.holding:
            self._write(data)
        else:
            durability.hold(self, data)
            self._held_nbytes += len(data)
            self.paused = self._backpressured

    def release(self, data: Any) -> None:
        """Send held data. `settle` is called when all held data of this commit has been sent."""
        self._held_nbytes -= len(data)
        self._write(data)

    def settle(self) -> None:
        """Continue after data has been sent: close the connection if that is pending, else resume execution."""
        if self._closing and not self._held_nbytes:
            self._hang_up()
        elif self.paused:
            self._go_on()

    def _hang_up(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: Any) -> None:
        if self._transport is not None:
            self._transport.write(data)

    @property
    def _backpressured(self) -> bool:
        """Whether execution is paused: too many bytes wait to be sent, or other connections have their turn."""
        return self._write_paused or self._held_nbytes >= BATCH_NBYTES or self._yielding or self._server.halted

    @property
    def waiting_nbytes(self) -> int:
        """How many bytes wait to be sent."""
        return self._held_nbytes + (0 if self._transport is None else self._transport.get_write_buffer_size())

    @property
    def _unasked_nbytes(self) -> int:
        """How many bytes that other clients published to it wait to be sent."""
        return 0

    def drop_slow_reader(self) -> None:
        """Disconnect a client that does not read and has too many published bytes waiting."""
        waiting = self._unasked_nbytes
        if waiting > self._server.limit + BACKLOG_NBYTES:
            logger.warning("store: %s does not read (%d bytes wait for it); it is disconnected", self.peer, waiting)
            self._server.count_refusal()
            self.abort()

    # -- ends -------------------------------------------------------------------------------------

    def refuse(self, why: str) -> None:
        """Log the reason, and close the connection once the queued replies have been sent."""
        logger.warning("store: refused %s: %s", self.peer, why)
        self._server.count_refusal()
        self.finish()

    def fail(self) -> None:
        """Log the current exception, which is an internal error, and drop the connection."""
        logger.exception("store: a request of %s could not be served; it is disconnected", self.peer)
        self.abort()

    def finish(self) -> None:
        """Execute nothing more, and close the connection once the queued replies have been sent."""
        self.flush()
        if self._transport is None:
            return
        if self._held_nbytes:
            self._closing = self.paused = True
            self._transport.pause_reading()
        else:
            self._hang_up()

    def pause_reading(self) -> None:
        """Stop reading from the socket."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read from the socket again, unless backpressure from this client applies."""
        if self.paused:
            self._go_on()
        elif self._transport is not None:
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection at once and drop its queued replies."""
        if self._transport is not None:
            self._transport.abort()


def descriptor_of(transport: asyncio.Transport) -> int:
    """Return the descriptor of a transport's socket, or -1 if that is closed."""
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())


def peer_name(address: Any) -> str:
    """Return a peer's address in words."""
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address or "a local client")
