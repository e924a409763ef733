"""Sends long messages over an asyncio transport, one part in a turn of the loop, so that short messages pass between."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from asyncdist.base.callables import Callback
from asyncdist.net.connection.messages import OutgoingMessage
from asyncdist.net.connection.outbox import Flushed, Outbox


class _TransportSocket:
    __slots__ = ("_transport", "is_full")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_full = False

    def send(self, data: bytes) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        if self.is_full:
            raise BlockingIOError
        self._transport.writelines(buffers)
        return sum(map(len, buffers))

    def shutdown(self, how: int) -> None:
        self._transport.abort()


class PartSender:
    """The long messages of one connection, which leave in the order in which they were added.

    Short ones are written to the transport at any time. The owner of the transport passes `pause` and `resume` on.
    ``schedule`` calls a function in a later turn of the loop.
    """

    __slots__ = ("_is_scheduled", "_outbox", "_schedule", "_sock")

    def __init__(self, transport: asyncio.Transport, schedule: Callable[[Callback], object]) -> None:
        self._sock, self._schedule = _TransportSocket(transport), schedule
        self._outbox: Outbox | None = None
        """None until there is a long message: a server has many connections without one."""
        self._is_scheduled = False

    @property
    def first(self) -> OutgoingMessage | None:
        """The message that is being sent, or is the next one."""
        return None if self._outbox is None else self._outbox.first_long

    def add(self, message: OutgoingMessage) -> None:
        if self._outbox is None:
            self._outbox = Outbox(self._sock, in_order=True)
        self._outbox.enqueue(message)
        self._schedule_flush()

    def pause(self) -> None:
        """Send nothing until `resume`, because the socket is full."""
        self._sock.is_full = True

    def resume(self) -> None:
        self._sock.is_full = False
        if self._outbox is not None and not self._outbox.is_empty:
            self._schedule_flush()

    def drop(self) -> None:
        """Send nothing more, because the connection is lost. Nothing is told of the messages."""
        self._outbox = None

    def _schedule_flush(self) -> None:
        if not self._sock.is_full and not self._is_scheduled:
            self._is_scheduled = True
            self._schedule(self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False
        try:
            if self._outbox is not None and self._outbox.flush() is Flushed.MORE:
                self._schedule_flush()
        # A KeyboardInterrupt, for example, may have come in the middle of a frame.
        except BaseException:
            self._sock.shutdown(socket.SHUT_RDWR)
            raise


def descriptor_of(transport: asyncio.Transport) -> int:
    """Return the descriptor of a transport's socket, or -1 if that is closed."""
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())
