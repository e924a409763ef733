"""One awaited connection to a store: bytes between a transport and a `ClientProtocol`, and how it comes about.

Used by `aio`.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from typing import cast

from asyncdist.base import lifecycle
from asyncdist.base.auth import NONCE_NBYTES, HandshakeDriver, dial
from asyncdist.base.error_text import describe_error
from asyncdist.base.tls import handshake_error
from asyncdist.errors import AuthenticationError, ProtocolError
from asyncdist.store.client.connect import ConnectRetry, hung_up, tune, unknown
from asyncdist.store.protocol.chunk_sender import ChunkSender
from asyncdist.store.protocol.chunking import ChunkedMessage
from asyncdist.store.protocol.client_protocol import ClientProtocol
from asyncdist.store.protocol.codec import framed
from asyncdist.store.server.connection import descriptor_of

_CLOSE_TIMEOUT = 5.0
"""Seconds that a store may take to accept our last bytes before we hang up all the same."""
_BATCH_NBYTES = 8 << 10
"""Requests go to the socket at the latest when there are so many bytes of them: the store is to begin meanwhile."""


async def reach(
    conversation: ClientProtocol,
    token: str | None,
    retry: ConnectRetry,
    lost: Callable[[StoreConnection, str, bool], None],
    tls: ssl.SSLContext | None = None,
) -> StoreConnection:
    """Make one attempt to go on with a conversation. Raises OSError where another attempt may do better.

    ``lost(link, why, for_good)`` is called when the connection that was made is over, not for one that was not.
    """
    loop = asyncio.get_running_loop()
    link = StoreConnection(conversation, token)
    try:
        async with asyncio.timeout(retry.attempt_deadline().remaining_or_none()):
            if retry.host.startswith("/"):
                await loop.create_unix_connection(lambda: link, retry.host)
            else:
                await loop.create_connection(lambda: link, retry.host, retry.port, ssl=tls)
            await asyncio.wait([link.greeted])  # shield() would log what becomes of it after a cancellation
            link.greeted.result()
    except ssl.SSLError as error:
        link.abort()
        raise handshake_error(error) from error
    except UnicodeError as error:
        raise unknown(error) from None
    except BaseException:
        link.abort()
        raise
    link.begin(lost)
    return link


class StoreConnection(asyncio.Protocol):
    """A connection to the store."""

    def __init__(self, conversation: ClientProtocol, token: str | None) -> None:
        loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.greeted.add_done_callback(lambda greeted: greeted.cancelled() or greeted.exception())
        self._token = token
        self._loop = loop
        self._gone: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._greeting: HandshakeDriver | None = None
        self._secured = False
        self._unheard = True  # nothing has come yet but TLS
        self._conversation = conversation
        self._tell: Callable[[StoreConnection, str, bool], None] | None = None
        self._why: str | None = None
        self._corked = False
        self._out: list[bytes] = []
        self._out_nbytes = 0

    def begin(self, lost: Callable[[StoreConnection, str, bool], None]) -> None:
        """Say who we are, and go on from there."""
        if self._transport is None:
            raise ConnectionResetError("it hung up after it had said hello")
        self._tell = lost
        self._transport.write(framed([self._conversation.introduce()]))

    # -- what the loop calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # which uvloop's is in all but its bases
        self._transport = transport
        lifecycle.close_in_children(self)
        self._carrier = ChunkSender(transport.write, self._conversation.is_open, asyncio.get_running_loop().call_soon)
        self._secured = transport.get_extra_info("sslcontext") is not None
        tune(transport.get_extra_info("socket"))
        self._greeting = HandshakeDriver(dial(self._token, "store", os.urandom(NONCE_NBYTES)), transport.write)
        self._conversation.interrupted()

    def data_received(self, data: bytes) -> None:
        conversation = self._conversation
        try:
            if self._greeting is not None:
                self._unheard = False
                data = self._greeting.feed(data)
                if not self._greeting.done:
                    return
                self._greeting = None
            conversation.receive(data)
        except (ProtocolError, AuthenticationError, ConnectionRefusedError) as error:
            self._why = str(error)
            if not self.greeted.done():
                self.greeted.set_exception(error)
            self.abort()
            return
        if conversation.has_more:
            for message in conversation.data_to_send():
                self.send(message)
        elif conversation.lost is not None:
            self.abort()
        elif conversation.greeted and not self.greeted.done():
            self.greeted.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._carrier.drop()
        if not self.greeted.done():
            why = f": {describe_error(exc)}" if exc else ""
            halfway = ConnectionResetError(f"it hung up while we said hello{why}")
            self.greeted.set_exception(hung_up(exc, secured=self._secured) if self._unheard else halfway)
        if not self._gone.done():
            self._gone.set_result(None)
        if self._tell is not None:
            self._conversation.interrupted()
            self._tell(self, self._why or (describe_error(exc) if exc else "it hung up"), self._why is not None)

    def pause_writing(self) -> None:
        self._carrier.pause()

    def resume_writing(self) -> None:
        self._carrier.resume()

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket, or -1 if that is closed."""
        return -1 if self._transport is None else descriptor_of(self._transport)

    # -- what the store calls ---------------------------------------------------------------------

    def send(self, message: bytes | ChunkedMessage) -> None:
        """Send at once what comes first in an iteration of the loop, the rest of it together, in pieces what is long."""
        if self._transport is None or not message:
            return
        if isinstance(message, ChunkedMessage):
            self._carrier.send(message)
            return
        if not self._corked:
            self._corked = True
            self._loop.call_soon(self._uncork)
            self._transport.write(framed([message]))
            return
        self._out.append(message)
        self._out_nbytes += len(message)
        if self._out_nbytes >= _BATCH_NBYTES:
            self._flush()

    def _uncork(self) -> None:
        self._corked = False
        self._flush()

    def _flush(self) -> None:
        out, self._out, self._out_nbytes = self._out, [], 0
        if out and self._transport is not None:
            self._transport.write(framed(out))

    async def close(self) -> None:
        """Send what is still to be sent, and hang up."""
        self._tell = None
        if self._transport is None:
            return
        self._flush()
        self._transport.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await asyncio.shield(self._gone)
        except TimeoutError:
            self.abort()
            await asyncio.shield(self._gone)

    def abort(self) -> None:
        """Hang up at once."""
        if self._transport is not None:
            self._transport.abort()
