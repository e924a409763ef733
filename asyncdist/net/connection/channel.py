"""One channel: an authenticated connection to one process, driven by an event loop.

It is made by `asyncdist.net.connection.port`. All methods are called on its loop.
"""

from __future__ import annotations

import array
import asyncio
import copy
import itertools
import logging
import select
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from asyncdist.base.descriptors import describe_exhaustion
from asyncdist.errors import PeerLostError, ProtocolError, UsageError
from asyncdist.net.connection.frames import GOODBYE, MOST_DESCRIPTORS, SLOTS_FREE, STAGING_READY
from asyncdist.net.connection.handshake import Greeting
from asyncdist.net.connection.inbox import Inbox, InboxOwner
from asyncdist.net.connection.messages import IncomingMessage, OutgoingMessage
from asyncdist.net.connection.outbox import Flushed, Outbox
from asyncdist.net.process_identity import has_ended, process_identity
from asyncdist.net.security.tls import TlsSocket

log = logging.getLogger("asyncdist")

HIGH_WATER_NBYTES = 1 << 20
"""Bytes of unsent frames at which `PeerChannel.is_congested`."""
_numbers = itertools.count()
_MOST_REASON_NBYTES = 1000
_LAST_BYTES_TIMEOUT = 2.0
"""Seconds that a closing channel takes to send what it has."""
_READ_NBYTES = 64 << 10
"""A read of this size has hundreds of short messages."""
_FIRST_NBYTES = 4 << 10
"""What is read while a long message is open: the header of its next part, whose rest is read into its memory."""
_ANCILLARY_NBYTES = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)


class StreamEnded(Exception):
    """The peer has closed the connection, or it broke; the message is the reason."""


class ChannelHandler(Protocol):
    """Receives the messages of the channels of one port, on its loop. No method may block.

    An exception of a method is a bug of the handler: it is logged, and ends the channel.
    """

    def connected(self, channel: PeerChannel) -> None:
        """Note that a channel is open, before any of its messages is handled.

        A handler that raises ProtocolError refuses the peer: the channel ends with this reason.
        """

    def received(
        self, channel: PeerChannel, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]
    ) -> None:
        """Handle a short message. Its buffers are read-only; the handler closes the descriptors that came with it."""

    def opened(self, channel: PeerChannel, message: IncomingMessage) -> None:
        """Note that a long message begins: this is its place in the order of the messages.

        The handler may set ``message.buffers`` to the memory into which the buffers are received; else they are received
        into new memory. It may `drop` the message.
        """

    def completed(self, channel: PeerChannel, message: IncomingMessage) -> None:
        """Handle a long message, all of whose bytes have arrived. If ``message.error`` is set, they were dropped."""

    def withdrawn(self, channel: PeerChannel, message: IncomingMessage) -> None:
        """Note that the sender has given up a long message. Its memory is written no more."""

    def closed(self, channel: PeerChannel, error: PeerLostError) -> None:
        """Note that a channel has ended, and with it the long messages of both directions."""


class ChannelOwner(Protocol):
    handler: ChannelHandler

    def heard(self, channel: PeerChannel) -> None: ...

    def forget(self, channel: PeerChannel) -> None: ...


class PeerChannel(InboxOwner):
    """An authenticated connection to one process. Messages arrive complete, once and in order, or the channel ends.

    Attributes:
        peer: The identity that the peer has sent.
        number: Unique among the channels of this process.
        error: Why the channel has ended; None while it is open.
        context: For the handler's own use.
    """

    def __init__(
        self, sock: socket.socket | TlsSocket, peer: Greeting, owner: ChannelOwner, *, most_nbytes: int
    ) -> None:
        self.peer, self.number = peer, next(_numbers)
        self.error: PeerLostError | None = None
        self.context: Any = None
        self._sock, self._owner = sock, owner
        self.is_local = is_unix = isinstance(sock, socket.socket) and sock.family == socket.AF_UNIX
        """Whether descriptors may come with messages, because both processes are on one host."""
        self._outbox = Outbox(sock, stages=is_unix and peer.stages, most_nbytes=most_nbytes)
        self._inbox = Inbox(self, most_nbytes=most_nbytes)
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self._loop = asyncio.get_running_loop()
        self._breaks: select.poll | None = None
        """Tells whether the connection is broken, where the loop then calls a reader only once more: uvloop does."""
        if type(self._loop).__module__.startswith("uvloop"):
            self._breaks = select.poll()
            self._breaks.register(sock.fileno(), 0)
        self._reads_rest = False
        self._is_reading = False
        self._flush_scheduled = False
        self._writes = False
        self._drained, self._over = asyncio.Event(), asyncio.Event()
        self._drained.set()
        self._goodbye = ""
        self._is_closing = self._has_said_goodbye = False

    def begin(self) -> None:
        """Begin to handle what arrives. The channel has ended if its handler has refused it."""
        try:
            self._owner.handler.connected(self)
        except Exception as error:
            self.fail_by(error)
        if not self.is_open:
            return
        self._loop.add_reader(self._sock.fileno(), self.read_now)
        if self._tls is not None and self._tls.unread:
            self._loop.call_soon(self.read_now)

    @property
    def is_open(self) -> bool:
        return self.error is None

    def __repr__(self) -> str:
        return f"<channel to {self.peer.name}{', closed' if self.error else ''}>"

    # -- sending -----------------------------------------------------------------------------------

    def send(
        self, head: bytes, buffers: Sequence[memoryview] = (), descriptors: Sequence[int] = ()
    ) -> OutgoingMessage | None:
        """Send a message after those sent before. It leaves at the end of the present turn of the loop.

        Args:
            head: Up to 32 KiB.
            buffers: Contiguous memories. Those of a short message, of up to 32 KiB with its head, are copied. Those of a
                long one must not change until it is ``done``.
            descriptors: Up to 16 file descriptors with a short message for a peer on this host. They are duplicated.

        Returns:
            The message if it is long; None if it is short.

        Raises:
            PeerLostError: The channel has ended.
            UsageError: The message is too long, or the peer is on another host and gets no descriptors.
        """
        if self.error is not None:
            raise copy.copy(self.error)
        try:
            message = self._outbox.add(head, buffers, descriptors if self.is_local else _none(descriptors))
            if not self._flush_scheduled:
                self._wake()
            return message
        except BaseException as error:
            self._interrupted(error)
            raise

    def withdraw(self, message: OutgoingMessage) -> None:
        """Give up a long message: its memory is read no more. The peer is told, unless it gets all of it. Idempotent."""
        try:
            self._outbox.withdraw(message)
            self._wake()
        except BaseException as error:
            self._interrupted(error)
            raise

    def drop(self, message: IncomingMessage, error: Exception) -> None:
        """Write no further byte of an arriving message into its memory. The handler gets it with this error."""
        self._inbox.drop(message, error)

    @property
    def is_congested(self) -> bool:
        """Whether the peer reads more slowly than this process sends; `drain` then waits."""
        return self._outbox.unsent_nbytes > HIGH_WATER_NBYTES

    async def drain(self) -> None:
        """Wait until the channel is not congested. Raises PeerLostError when it ends."""
        while self.is_congested and self.error is None:
            self._drained.clear()
            await self._drained.wait()
        if self.error is not None:
            raise copy.copy(self.error)

    async def deliver(self, head: bytes, buffers: Sequence[memoryview] = ()) -> None:
        """Send a message. Wait until the memory of a long one may change; after a short one, until there is no congestion.

        Long messages leave after the short ones before them, so a sender that awaits each delivery never has much unsent.
        If the caller is cancelled, a long message is withdrawn, and a short one is sent nevertheless.

        Raises:
            PeerLostError: The channel has ended. The peer may have received the message.
            UsageError: As in `send`.
        """
        message = self.send(head, buffers)
        if message is None or message.done:
            if self.is_congested:
                await self.drain()
            return
        done: asyncio.Future[None] = self._loop.create_future()
        message.on_done = lambda _: None if done.done() else done.set_result(None)
        try:
            await done
        except asyncio.CancelledError:
            self.withdraw(message)
            raise
        if message.error is not None:
            raise message.error

    def take_heard(self) -> bool:
        """Return whether bytes have arrived since the last call."""
        heard, self._inbox.heard = self._inbox.heard, False
        return heard

    def pulse(self) -> None:
        """Send a heartbeat. Any thread may call it."""
        self._outbox.pulse()

    def _wake(self) -> None:
        if not self._flush_scheduled and self.error is None:
            self._flush_scheduled = True
            if not self._is_reading:
                self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        try:
            self._flush_now()
        except BaseException as error:
            self._interrupted(error)
            raise

    def _flush_now(self) -> None:
        self._flush_scheduled = False
        if self.error is not None:
            return
        left = self._outbox.flush()
        # A message that was done may have made its sender close the channel.
        if not self.is_open:
            return
        if left is Flushed.MORE:
            self._wake()
        if (left is Flushed.BLOCKED) != self._writes:
            self._writes = not self._writes
            if self._writes:
                self._loop.add_writer(self._sock.fileno(), self._flush)
            else:
                self._loop.remove_writer(self._sock.fileno())
        if not self._drained.is_set() and not self.is_congested:
            self._drained.set()
        if self._is_closing and self._outbox.is_empty:
            self._say_goodbye()

    # -- receiving ---------------------------------------------------------------------------------

    def read_now(self) -> None:
        """Handle what has arrived. Called when the loop reports it, or before."""
        if self.error is not None:
            return
        try:
            # Frames that the handler sends leave together.
            self._is_reading = True
            try:
                self._read()
                self._owner.heard(self)
            except StreamEnded as end:
                self._ended(str(end))
            except Exception as error:
                self.fail_by(error)
            self._is_reading = False
            if self._flush_scheduled:
                self._flush()
            if self._breaks is not None and self.error is None and self._breaks.poll(0) and not self._reads_rest:
                # What the peer sent before its end is still there.
                self._reads_rest = True
                self._loop.call_soon(self._read_rest)
        except BaseException as error:
            self._interrupted(error)
            raise

    def _read_rest(self) -> None:
        self._reads_rest = False
        self.read_now()

    def _read(self) -> None:
        """Read what has arrived, once: long messages straight into their memory. Raises StreamEnded and ProtocolError."""
        try:
            self._receive()
            while self._tls is not None and self._tls.unread and not self._inbox.is_closed:
                self._receive()
        except BlockingIOError:
            return
        except OSError as cause:
            raise StreamEnded(cause.strerror or str(cause)) from cause
        finally:
            self._inbox.return_slots()

    def _receive(self) -> None:
        inbox = self._inbox
        if inbox.room:
            if self.is_local:
                assert isinstance(self._sock, socket.socket)
                count, ancillary, flags, _ = self._sock.recvmsg_into(
                    inbox.room, _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC
                )
                self._take_descriptors(ancillary, flags)
            else:
                count = self._sock.recvmsg_into(inbox.room)[0]
            if not count:
                raise StreamEnded("connection closed")
            inbox.filled(count)
            return
        nbytes = _FIRST_NBYTES if inbox.awaits_part else _READ_NBYTES
        if self.is_local:
            assert isinstance(self._sock, socket.socket)
            data, ancillary, flags, _ = self._sock.recvmsg(nbytes, _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
            self._take_descriptors(ancillary, flags)
        else:
            data = self._sock.recv(nbytes)
        if not data:
            raise StreamEnded("connection closed")
        inbox.feed(data)

    def _take_descriptors(self, ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self._inbox.add_descriptors(numbers)
        if flags & socket.MSG_CTRUNC:
            raise StreamEnded(f"descriptors of the peer were lost: this process {describe_exhaustion(OSError())}")

    def on_short(self, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]) -> None:
        self._owner.handler.received(self, head, buffers, descriptors)

    def on_opening(self, message: IncomingMessage) -> None:
        self._owner.handler.opened(self, message)

    def on_completed(self, message: IncomingMessage) -> None:
        self._owner.handler.completed(self, message)

    def on_withdrawn(self, message: IncomingMessage) -> None:
        self._owner.handler.withdrawn(self, message)

    def on_frame(self, kind: int, body: bytes) -> None:
        if kind == SLOTS_FREE:
            self._outbox.slots_returned(body)
        elif kind == STAGING_READY:
            self._outbox.staging_answered(is_ready=body == b"\x01")
        elif kind == GOODBYE:
            self._end(f"it has closed the channel: {body.decode(errors='replace')}")
            return
        else:
            super().on_frame(kind, body)
        self._wake()

    def reply(self, kind: int, body: bytes) -> None:
        self._outbox.add_frame(kind, body)
        self._wake()

    # -- the end -----------------------------------------------------------------------------------

    async def close(self, reason: str = "it is not needed any more") -> None:
        """Send what waits and a goodbye, and close the connection. Messages that have not arrived are lost. Idempotent.

        If the caller is cancelled, the connection is closed at once.
        """
        if self.is_open:
            if not self._is_closing:
                self._is_closing, self._goodbye = True, reason
                self._wake()
            try:
                async with asyncio.timeout(_LAST_BYTES_TIMEOUT):
                    await self._over.wait()
            except TimeoutError:
                pass
            finally:
                self.leave(reason)

    def leave(self, reason: str) -> None:
        """Close the connection at once: what has not been sent is lost. Idempotent."""
        if self.is_open:
            self._end(f"this process has closed the channel: {self._goodbye or reason}")

    def fail(self, reason: str, *, last_heard: float | None = None) -> None:
        """End the channel, because the peer is lost or cannot be understood. It is told why, if it still reads.

        ``reason`` is a clause about the peer, ``last_heard`` the seconds since a silent peer was last heard.
        """
        if self.error is None:
            self._outbox.add_frame(GOODBYE, f"this peer was given up: {reason}".encode()[:_MOST_REASON_NBYTES])
            self._outbox.flush()
            self._end(reason, last_heard=last_heard)

    def fail_by(self, error: Exception) -> None:
        """End the channel, because a message of the peer could not be handled. Called while the error is handled."""
        if isinstance(error, ProtocolError):
            log.error("the channel to %s ends: %s", self.peer.name, error.summary)
            self.fail(error.summary)
        else:
            log.exception("the handler of the channel to %s failed", self.peer.name)
            self.fail(f"this process could not handle a message of it: {type(error).__name__}: {error}")

    def _interrupted(self, error: BaseException) -> None:
        """End the channel after a KeyboardInterrupt, for example, which may have come in the middle of a frame.

        The peer gets no reason: bytes of another frame could complete the one that was sent in part.
        """
        if not isinstance(error, Exception):
            self._end(f"this process was interrupted by {type(error).__name__} in the middle of a transfer")

    def end_with_process(self) -> None:
        """Tell the peer that this process ends. Must not wait, and may be called by any thread."""
        if self.error is None:
            self._outbox.add_frame(GOODBYE, b"its process ends")
            self._outbox.flush()

    def _say_goodbye(self) -> None:
        """Say goodbye after the last message. The peer ends the connection when it has read that.

        Closing it here could lose what is on its way: a socket that is closed with unread bytes drops what it has not sent.
        """
        if not self._has_said_goodbye:
            self._has_said_goodbye = True
            self._outbox.add_frame(GOODBYE, self._goodbye.encode()[:_MOST_REASON_NBYTES])
            self._wake()

    def _ended(self, reason: str) -> None:
        if self._has_said_goodbye:
            self.leave(self._goodbye)
        elif has_ended(self.peer.identity, process_identity(self.peer.host_name)):
            reason = f"its process has ended ({reason})"
        self._end(reason)

    def _end(self, reason: str, *, last_heard: float | None = None) -> None:
        if self.error is not None:
            return
        error = self.error = PeerLostError(self.peer.name, reason)
        if last_heard is not None:
            error.noticed, error.last_heard = "heartbeat", last_heard
        descriptor = self._sock.fileno()
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        self._inbox.close()
        self._outbox.close(error)
        self._sock.close()
        self._drained.set()
        self._over.set()
        self._owner.forget(self)
        try:
            self._owner.handler.closed(self, error)
        except Exception:
            log.exception("the handler of the channel to %s failed", self.peer.name)


def _none(descriptors: Sequence[int]) -> Sequence[int]:
    if descriptors:
        raise UsageError("descriptors can be sent only to a process on this host: see PeerChannel.is_local")
    return descriptors
