"""Base of the connections of both protocols to a store server: queues replies and applies backpressure.

The event loop calls a connection, which awaits nothing and makes no task. The connection stops reading requests while
its client does not read replies. The server disconnects a subscriber that does not read published messages; replies to
the subscriber's own requests never cause that. `session`, `c10d_session` and `accept` derive from it.
`persistence.group_commit` holds its replies and releases them.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from asyncdist.base import lifecycle
from asyncdist.config import Config
from asyncdist.errors import AuthenticationError, ProtocolError
from asyncdist.net.connection.part_sender import descriptor_of
from asyncdist.net.refusals import RefusalLog
from asyncdist.store.persistence.group_commit import GroupCommit
from asyncdist.store.protocol.operations import Reply
from asyncdist.store.server.fast_path import EpollFastPath
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.model import MemoryQuota
from asyncdist.store.state.sessions import SessionTable

# The modules of the server share one logger.
logger = logging.getLogger("asyncdist.store.server.server")

BATCH_NBYTES = 256 << 10
"""Bytes of replies that are sent together at most, and that are held for the disk before execution pauses."""
BACKLOG_NBYTES = 64 << 20
"""Bytes that may wait for a client that does not read.

Above it, long replies pause execution. Published messages above it plus the longest message disconnect the client.
"""


Handler = Callable[..., bytes | None]
"""Executes a request of torch's format; returns its reply, or None if it has none or blocks."""


class ServerContext(Protocol):
    """What the connections need of their server. `StoreServer` documents the methods."""

    config: Config
    state: StoreState
    sessions: SessionTable
    quota: MemoryQuota
    durability: GroupCommit | None
    """Writes the log on disk; None if the store has none."""
    halted: bool
    """Whether the server reads from no connection and executes no request."""
    limit: int
    """The longest message in bytes."""
    refusals: RefusalLog
    """Counts and logs the connections that are refused or dropped."""
    fast_path: EpollFastPath
    c10d_handlers: dict[int, Handler]
    num_requests: int
    lineage: str
    stays: bool

    def heard(self, client: object) -> None: ...

    def dismiss(self, connection: ServerConnection) -> None: ...

    def deliver(self, replies: list[Reply], asking: ServerConnection | None) -> None: ...

    def pack(self, message: tuple[Any, ...], /) -> bytes: ...

    def status(self) -> dict[str, Any]: ...

    def open_scoped_store(self, connection: ServerConnection, identity: bytes, request: int, prefix: str) -> None: ...


class ServerConnection(asyncio.Protocol, ABC):
    """The connection of one client. It is hashed by identity, and the state machine identifies the client by it.

    ``transport`` is None until the event loop has connected it. While ``paused``, no further request is executed, for one
    of the reasons in `_must_pause`.
    """

    __slots__ = (
        "__weakref__", "_closing", "_held_nbytes", "_out", "_out_nbytes", "_server", "_transport", "_write_paused",
        "_yielding", "paused", "peer",
    )  # fmt: skip

    def __init__(self, server: ServerContext, transport: asyncio.Transport | None = None, peer: str = "?") -> None:
        self.peer = peer
        self._server = server
        self._transport = transport
        self._out: list[bytes] = []
        self._out_nbytes = 0
        self._held_nbytes = 0  # of replies that wait until the changes they show are on disk
        self._write_paused = False  # the transport's write buffer is full
        self._yielding = False  # the other connections run first
        self._closing = False  # the connection closes once the queued replies have been sent
        self.paused = False
        lifecycle.close_in_children(self)

    def fileno(self) -> int:
        return -1 if self._transport is None else descriptor_of(self._transport)

    # -- implemented by each format ---------------------------------------------------------------

    @abstractmethod
    def receive(self, data: bytes) -> None:
        """Execute the requests in the bytes that arrived. Raises ProtocolError and AuthenticationError."""

    @abstractmethod
    def answer(self, reply: Reply) -> None:
        """Queue a reply that is due to this client."""

    def joined(self, pieces: list[bytes]) -> bytes:
        """Return the queued pieces as they are sent."""
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    @abstractmethod
    def unfinished(self) -> bool:
        """Whether a request has arrived in part or has not been executed."""

    # -- called by the event loop -----------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.take(data)
        self._server.heard(self)

    def take(self, data: bytes) -> None:
        """Execute the requests in ``data``. Refuse a client that breaks the protocol; abort on any other error."""
        try:
            self.receive(data)
        except (ProtocolError, AuthenticationError) as error:
            self.refuse(error.summary)
        except Exception:
            self.fail()
        except BaseException:  # the rest of the bytes is lost; an asyncdist client repeats its requests
            self.abort()
            raise

    def pause_writing(self) -> None:
        self._write_paused = self.paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._resume_execution()

    def _resume_execution(self) -> None:
        """Resume execution unless a reason to pause still applies."""
        if self._must_pause:
            return
        self.paused = False
        if self._transport is not None:
            self._transport.resume_reading()
            # Requests that arrived earlier are executed without new bytes.
            self.data_received(b"")

    def _yield_turn(self) -> None:
        """Pause execution until the other connections have had a turn."""
        self._yielding = self.paused = True
        asyncio.get_running_loop().call_soon(self._end_yield)

    def _end_yield(self) -> None:
        self._yielding = False
        self._resume_execution()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.unfinished:
            logger.info("store: the connection of %s ended in the middle of a request", self.peer)
        self._transport = None
        self._out.clear()
        self._server.dismiss(self)

    # -- replies ----------------------------------------------------------------------------------

    def put(self, piece: bytes) -> None:
        if self._transport is not None:
            self._out.append(piece)
            self._out_nbytes += len(piece)

    def flush(self) -> None:
        if not self._out or self._transport is None:
            return
        out, self._out, self._out_nbytes = self._out, [], 0
        data = self.joined(out)
        self._send_when_durable(data)

    def _send_when_durable(self, data: Any) -> None:
        """Send data, or hold it until the changes that it may show are on disk."""
        durability = self._server.durability
        if durability is None or not durability.holding:
            self._write(data)
        else:
            durability.hold(self, data)
            self._held_nbytes += len(data)
            self.paused = self._must_pause

    def release(self, data: Any) -> None:
        """Send held data. `GroupCommit` calls `settle` after it has released all data that waited for one commit."""
        self._held_nbytes -= len(data)
        self._write(data)

    def settle(self) -> None:
        """Close the connection if it waited only for data that has now been sent, else resume execution."""
        if self._closing:
            self._close_if_sent()
        elif self.paused:
            self._resume_execution()

    def _close_if_sent(self) -> None:
        """Close the transport, which first sends its buffer, unless further data has to be passed to it."""
        if self._transport is not None and not self._held_nbytes:
            self._transport.close()

    def _write(self, data: Any) -> None:
        if self._transport is not None:
            self._transport.write(data)

    @property
    def _must_pause(self) -> bool:
        """Whether execution must pause: too many bytes wait to be sent, other connections run first, or an end is near."""
        return (
            self._write_paused
            or self._held_nbytes >= BATCH_NBYTES
            or self._yielding
            or self._closing
            or self._server.halted
        )

    @property
    def waiting_nbytes(self) -> int:
        return self._held_nbytes + (0 if self._transport is None else self._transport.get_write_buffer_size())

    @property
    def _published_waiting_nbytes(self) -> int:
        """How many of the waiting bytes are messages that other clients published."""
        return 0

    def drop_slow_reader(self) -> None:
        """Disconnect a client that does not read and has too many published bytes waiting."""
        waiting = self._published_waiting_nbytes
        if waiting > self._server.limit + BACKLOG_NBYTES:
            logger.warning(
                "store: the server disconnects %s, which does not read: %d published bytes wait for it",
                self.peer,
                waiting,
            )
            self._server.refusals.count += 1
            self.abort()

    # -- ends -------------------------------------------------------------------------------------

    def end_if_vanished(self) -> None:
        """Disconnect a client whose host has vanished. Called several times within the limit."""

    def refuse(self, why: str) -> None:
        """Tell the log the reason, and close the connection once the queued replies have been sent."""
        self._server.refusals.add(why, self.peer)
        self.finish()

    def fail(self) -> None:
        """Log the current exception, which is an internal error, and disconnect the client."""
        logger.exception("store: a request of %s could not be served; the server disconnects the client", self.peer)
        self.abort()

    def finish(self) -> None:
        """Execute nothing more, and close the connection once the queued replies have been sent."""
        self.flush()
        if self._transport is None or self._closing:
            return
        self._closing = self.paused = True
        self._transport.pause_reading()
        self._close_if_sent()

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read from the socket again, unless this client's execution must pause."""
        if self.paused:
            self._resume_execution()
        elif self._transport is not None:
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
