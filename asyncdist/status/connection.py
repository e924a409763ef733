"""Connections to the status port of a rank: authenticated by the job's token, inside TLS if the ranks use it.

The proof of the token is bound to the world of the rank: with one token for several jobs, a viewer that has found one of
them cannot ask another.

After the handshake of `net.security.auth` each side sends messages: their length as four bytes, little-endian, and a
msgpack value.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from typing import Any

import msgpack

from asyncdist.base import lifecycle
from asyncdist.errors import ProtocolError
from asyncdist.net import auth

PURPOSE = "status port"
MAX_QUESTION = 1 << 16
MAX_ANSWER = 256 << 20
_LENGTH = struct.Struct("<I")


class StatusConnection:
    """One end of an authenticated connection. Make it with `connect` or `accept`, on the running loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, message: Any) -> None:
        """Send a message of plain data."""
        packed = msgpack.packb(message)
        self._writer.write(_LENGTH.pack(len(packed)) + packed)
        await self._writer.drain()

    async def receive(self, most: int) -> Any:
        """Return the next message.

        Raises:
            EOFError: The other side has closed the connection.
            ProtocolError: The message is longer than ``most`` bytes, or is no msgpack value.
        """
        (nbytes,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if nbytes > most:
            raise ProtocolError(f"a message of {nbytes} bytes on the {PURPOSE}, which accepts {most}")
        packed = await self._reader.readexactly(nbytes)
        try:
            return msgpack.unpackb(packed, strict_map_key=False)
        except (ValueError, msgpack.UnpackException) as cause:
            raise ProtocolError(f"a message on the {PURPOSE} is not legible: {cause}") from cause

    async def ask(self, question: Any) -> Any:
        """Send a question and return the answer."""
        await self.send(question)
        return await self.receive(MAX_ANSWER)

    def close(self) -> None:
        """Close the connection at once."""
        # A TLS connection that is closed in order outlives the loop of a viewer that ends.
        self._writer.transport.abort()


def _purpose(world_id: str) -> str:
    """Return what the proof of a connection is bound to."""
    return f"{PURPOSE} of world {world_id}"


async def connect(
    host: str, port: int, world_id: str, token: str | None, tls: ssl.SSLContext | None
) -> StatusConnection:
    """Connect to the status port of a rank of a world.

    Raises:
        OSError: No rank answers there.
        EOFError: The rank closed the connection during the handshake.
        AuthenticationError: The rank does not accept the token, cannot prove that it holds it, or is in another world.
        ProtocolError: Another program answers.
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    lifecycle.close_in_children(sock)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, port))
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        name = host if tls is not None else None
        transport, _ = await loop.create_connection(lambda: protocol, sock=sock, ssl=tls, server_hostname=name)
    except BaseException:
        sock.close()
        raise
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    try:
        return await _authenticated(auth.dial(token, _purpose(world_id), os.urandom(auth.NONCE_NBYTES)), reader, writer)
    except BaseException:
        transport.abort()
        raise


async def accept(sock: socket.socket, world_id: str, token: str | None, tls: ssl.SSLContext | None) -> StatusConnection:
    """Authenticate the other side of an accepted socket. Raises the errors of `connect`."""
    loop = asyncio.get_running_loop()
    lifecycle.close_in_children(sock)
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    try:
        accepted = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=tls)
    except BaseException:
        sock.close()
        raise
    writer = asyncio.StreamWriter(accepted[0], protocol, reader, loop)
    try:
        return await _authenticated(
            auth.accept(token, _purpose(world_id), os.urandom(auth.NONCE_NBYTES)), reader, writer
        )
    except asyncio.CancelledError:
        accepted[0].abort()
        raise
    except BaseException:
        # The dialler shall learn that its token was refused.
        writer.close()
        raise


async def _authenticated(
    handshake: auth.Handshake, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> StatusConnection:
    try:
        step = next(handshake)
        while True:
            if isinstance(step, bytes):
                writer.write(step)
                step = next(handshake)
            else:
                step = handshake.send(await reader.readexactly(step))
    except StopIteration:
        return StatusConnection(reader, writer)
    except asyncio.IncompleteReadError as cause:
        raise EOFError("the other side closed the connection during the handshake; see its log") from cause
