"""A connected socket, plain or TLS, whose bytes a coroutine awaits: a channel before it begins, or a short conversation.

A message of a conversation is plain data: the length as four bytes, little-endian, and a msgpack value.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

import msgpack

from asyncdist.errors import ProtocolError
from asyncdist.net.security.auth import HandshakeDriver
from asyncdist.net.security.tls import TlsSocket

AnySocket = socket.socket | TlsSocket

_LENGTH = struct.Struct("<I")
_READ_NBYTES = 64 << 10
_MOST_NBYTES = 256 << 20


async def ready(*socks: AnySocket, writable: bool = False, waiter: asyncio.Future[None] | None = None) -> None:
    """Return when one of the sockets is ready to be read, or written, and ``waiter`` is done.

    Code that closes one of them ends its watch and ``waiter`` before.
    """
    loop = asyncio.get_running_loop()
    done = loop.create_future() if waiter is None else waiter

    def resolve() -> None:
        if not done.done():
            done.set_result(None)

    try:
        for sock in socks:
            (loop.add_writer if writable else loop.add_reader)(sock.fileno(), resolve)
        await done
    finally:
        for sock in socks:
            if sock.fileno() >= 0:
                (loop.remove_writer if writable else loop.remove_reader)(sock.fileno())


async def prove(sock: AnySocket, handshake: HandshakeDriver) -> None:
    """Run a handshake over a non-blocking socket."""
    while not handshake.done:
        try:
            handshake.pump(sock.recv)
        except BlockingIOError:
            await ready(sock)


class LoopSocket:
    """A non-blocking socket on the running loop. One coroutine at a time uses it; `close` ends its waiting."""

    def __init__(self, sock: AnySocket) -> None:
        self.sock = sock
        """The socket, which TLS may have replaced."""
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    async def secure(self, tls: TlsSocket) -> None:
        """Go on inside TLS. Raises CertificateError and OSError."""
        self.sock = tls
        while not tls.secured:
            try:
                tls.secure()
            except BlockingIOError:
                await self._ready(writable=tls.wants_write)

    async def send(self, data: bytes) -> None:
        """Send all bytes. Raises OSError."""
        left = memoryview(data)
        while left.nbytes or (isinstance(self.sock, TlsSocket) and self.sock.unsent):
            try:
                if left.nbytes:
                    left = left[self.sock.send(left) :]
                elif isinstance(self.sock, TlsSocket):
                    self.sock.flush()
            except BlockingIOError:
                await self._ready(writable=True)

    async def receive(self, nbytes: int) -> bytearray:
        """Return so many bytes. Raises OSError, and EOFError if the connection has ended."""
        data = bytearray()
        while len(data) < nbytes:
            try:
                piece = self.sock.recv(min(nbytes - len(data), _READ_NBYTES))
            except BlockingIOError:
                await self._ready()
                continue
            if not piece:
                raise EOFError("the other side closed the connection; see its log")
            data += piece
        return data

    async def send_message(self, message: Any, most: int = _MOST_NBYTES) -> None:
        """Send plain data. Raises ProtocolError if it has more than ``most`` bytes."""
        packed = msgpack.packb(message)
        if len(packed) > most:
            raise ProtocolError(f"a message of this process has {len(packed)} bytes, of at most {most}")
        await self.send(_LENGTH.pack(len(packed)) + packed)

    async def receive_message(self, most: int) -> Any:
        """Return the next message, of at most ``most`` bytes. Raises EOFError, and ProtocolError for other bytes."""
        (nbytes,) = _LENGTH.unpack(await self.receive(_LENGTH.size))
        if nbytes > most:
            raise ProtocolError(f"a message of {nbytes} bytes where at most {most} are accepted")
        packed = await self.receive(nbytes)
        try:
            return msgpack.unpackb(packed, strict_map_key=False)
        except (ValueError, msgpack.UnpackException) as cause:
            raise ProtocolError(f"a message that is not legible: {cause}") from cause

    async def ask(self, question: Any) -> Any:
        await self.send_message(question)
        return await self.receive_message(_MOST_NBYTES)

    async def _ready(self, *, writable: bool = False) -> None:
        self._waiter = self._loop.create_future()
        await ready(self.sock, writable=writable, waiter=self._waiter)

    def close(self) -> None:
        """Close the connection at once. A coroutine that waits for it gets EOFError. Idempotent."""
        if self._waiter is not None and self.sock.fileno() >= 0:
            self._loop.remove_reader(self.sock.fileno())
            self._loop.remove_writer(self.sock.fileno())
            if not self._waiter.done():
                self._waiter.set_exception(EOFError("this process has closed the connection"))
        # A peer that has ended learns nothing of it.
        with contextlib.suppress(OSError):
            self.sock.close()
