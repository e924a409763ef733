"""A connection to a store server for tests that choose its bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from asyncdist.net.security.auth import HandshakeDriver
from tests.support.received_messages import ReceivedMessages

LIMIT = 60.0
"""Seconds for a reply that the server sends immediately."""


class RawConnection:
    """Reads and writes bytes; `leave` resets the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, port: int, host: str = "127.0.0.1", *, token: str | None = None) -> RawConnection:
        """Connect, and authenticate if there is a token."""
        connection = cls(*await asyncio.open_connection(host, port))
        if token is not None:
            handshake = HandshakeDriver.dialling(token, "store", connection.writer.write)
            while not handshake.done:
                handshake.feed(await connection.reader.read(1))
        return connection

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self, nbytes: int) -> bytes:
        async with asyncio.timeout(LIMIT):
            return await self.reader.readexactly(nbytes)

    async def messages(self) -> AsyncIterator[list[Any]]:
        """Yield the messages that the server sends, long ones as a whole."""
        found = ReceivedMessages()
        while data := await self.reader.read(1 << 20):
            found.inbox.feed(data)
            while found.messages:
                yield found.messages.pop(0)

    async def ended(self) -> bool:
        """Read until the server has closed the connection, and return True."""
        async with asyncio.timeout(LIMIT):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(1 << 16):
                    pass
        return True

    async def leave(self) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()
