"""The store as an asyncio server: any loop, no task per connection, no torch.

Every connection first proves that it holds the token; then each read is taken apart into requests, all of them are
executed by the state machine, and each connection concerned is written to once. Whoever misbehaves is logged and
dropped, and harms nobody else: garbage, a wrong token or none in time, a frame that claims too much, a reader too slow
for what it asked for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from typing import Any, cast

from asyncdist.config import Config
from asyncdist.errors import AuthenticationError, ProtocolError
from asyncdist.handshake import NONCE_NBYTES, Pushed, accept
from asyncdist.store import listen
from asyncdist.store.dialling import tune
from asyncdist.store.messages import LENGTH, Encoder, FrameParser, decode_request, frame_limit, hello
from asyncdist.store.operations import Kind, Reason, Reply
from asyncdist.store.state import StoreState

logger = logging.getLogger(__name__)

_BATCH_NBYTES = 256 << 10
"""Replies are handed to the socket at the latest when there are so many bytes of them."""
_BACKLOG_NBYTES = 64 << 20
"""What may wait for a reader, above one frame, before it is given up as too slow."""


class StoreServer:
    """A store that listens. Make one with `start`; ``host`` and ``port`` say where it is; `close` it.

    ``host`` is as it was given; ``address`` is the (first) address that it stood for.
    """

    def __init__(self, config: Config, token: str | None) -> None:
        self.host = ""
        self.address = ""
        self.port = 0
        self.config = config
        self.token = token
        self.state = StoreState(config.store_max_value_nbytes)
        self.limit = frame_limit(config.store_max_value_nbytes)
        self._loop = asyncio.get_running_loop()
        self._servers: list[asyncio.Server] = []
        self._connections: set[_Connection] = set()
        self._emptied: asyncio.Future[None] | None = None
        self._crowded = False
        self._encoder = Encoder()

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        *,
        token: str | None = None,
        config: Config | None = None,
        sock: socket.socket | None = None,
    ) -> StoreServer:
        """Listen at ``host`` ("" is every interface) and ``port`` (0 is any free one) on the running loop.

        ``sock`` is a bound socket to listen on instead; it is closed with the server. Raises AddressError when the port
        is in use or the host does not resolve, UsageError beyond loopback without a token. `close` it in the end.
        """
        server = cls(config or Config(), token)
        if sock is None:
            # Names are looked up in a thread only where a lookup could take time.
            addresses = await _resolve(host, port)
            listen.check_guarded(addresses, token, server.config)
            sockets = listen.listening_sockets(host, port, addresses)
        else:
            sock.setblocking(False)
            listen.check_guarded([(sock.family, sock.getsockname()[0])], token, server.config)
            sockets = [sock]
        server.address, server.port = sockets[0].getsockname()[:2]
        server.host = host or server.address
        try:
            for each in sockets:
                made = await server._loop.create_server(lambda: _Connection(server), sock=each, backlog=listen.BACKLOG)
                server._servers.append(made)
        except BaseException:
            await server.close()
            for each in sockets:
                each.close()
            raise
        logger.info("store listens at %s:%d%s", server.host, server.port, "" if token else " without a token")
        return server

    async def close(self) -> None:
        """Stop listening and drop every connection; returns when they are gone. May be called again."""
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.abort()
        if self._connections:
            self._emptied = self._emptied or self._loop.create_future()
            await asyncio.shield(self._emptied)
        servers, self._servers = self._servers, []
        for server in servers:
            await server.wait_closed()

    async def __aenter__(self) -> StoreServer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    # -- for connections --------------------------------------------------------------------------

    def admit(self, connection: _Connection) -> bool:
        """Take a new connection in, or say that there are too many."""
        most = self.config.store_max_connections
        if len(self._connections) >= most:
            if not self._crowded:
                logger.warning(
                    "the store has %d connections and refuses more: ASYNCDIST_STORE_MAX_CONNECTIONS raises the limit",
                    most,
                )
            self._crowded = True
            return False
        self._crowded = False
        self._connections.add(connection)
        return True

    def dismiss(self, connection: _Connection) -> None:
        """A connection is gone: give up what it had open."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self.deliver(self.state.leave(connection), None)
        if not self._connections and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def deliver(self, replies: list[Reply], asking: _Connection | None) -> None:
        """Put replies into the connections they are for; all but ``asking``, which has more to do, send at once."""
        others = set()
        for reply in replies:
            connection: _Connection = reply.client
            connection.put(self._encode(reply))
            if connection is not asking:
                others.add(connection)
        for connection in others:
            connection.flush()

    def _encode(self, reply: Reply) -> bytes:
        value = reply.value
        # Lists are measured before they are packed: one value may have been asked for a million times over.
        if type(value) is not list or sum(map(len, value)) <= self.limit:
            frame = self._encoder.frame(reply.request, reply.kind, value)
            if len(frame) - LENGTH.size <= self.limit:
                return frame
        text = f"the reply would exceed the store's {self.limit} bytes: ask for fewer keys at a time"
        return self._encoder.frame(reply.request, Kind.REFUSED, (Reason.TOO_LARGE, text))


async def _resolve(host: str, port: int) -> list[Any]:
    literal = not host or listen.is_address(host)
    return listen.resolve(host, port) if literal else await asyncio.to_thread(listen.resolve, host, port)


class _Connection(asyncio.Protocol):
    """One client. Hashable by identity: it is the client that the state machine knows."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._peer = "?"
        self._greeting: Pushed | None = None
        self._hurry: asyncio.TimerHandle | None = None
        self._parser = FrameParser(server.limit)
        self._todo: deque[bytes | bytearray] = deque()
        self._out: list[bytes] = []
        self._out_nbytes = 0
        self._paused = False

    # -- what the loop calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # which uvloop's is in all but its bases
        self._transport = transport
        self._peer = _name(transport.get_extra_info("peername"))
        if not self._server.admit(self):
            self.abort()
            return
        tune(transport.get_extra_info("socket"))
        timeout = self._server.config.handshake_timeout
        self._hurry = asyncio.get_running_loop().call_later(timeout, self._too_late, timeout)
        self._greeting = Pushed(accept(self._server.token, "store", os.urandom(NONCE_NBYTES)), transport.write)

    def data_received(self, data: bytes) -> None:
        try:
            if self._greeting is not None:
                data = self._greet(self._greeting, data)
            if data:
                self._todo.extend(self._parser.feed(data))
            if self._greeting is None:
                self._work()
        except (ProtocolError, AuthenticationError) as error:
            self._refuse(str(error))
        except Exception:
            logger.exception("store: a request of %s could not be served; it is disconnected", self._peer)
            self.abort()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport is not None:
            self._transport.resume_reading()
            self.data_received(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._hurry is not None:
            self._hurry.cancel()
        if self._parser.pending or self._todo:
            logger.info("store: %s vanished in the middle of a request", self._peer)
        self._transport = None
        self._todo.clear()
        self._out.clear()
        self._server.dismiss(self)

    # -- requests ---------------------------------------------------------------------------------

    def _greet(self, greeting: Pushed, data: bytes) -> bytes:
        rest = greeting.feed(data)
        if not greeting.done:
            return b""
        self._greeting = None
        if self._hurry is not None:
            self._hurry.cancel()
        if self._transport is not None:
            self._transport.write(hello(self._server.limit))
        return rest

    def _work(self) -> None:
        """Execute what has been read, as long as the client takes the replies."""
        server, execute = self._server, self._server.state.execute
        while self._todo and not self._paused and self._transport is not None:
            request, op, args = decode_request(self._todo.popleft())
            server.deliver(execute(self, request, op, args), self)
            if self._out_nbytes >= _BATCH_NBYTES:
                self.flush()
        self.flush()
        if self._todo and self._transport is not None:
            self._transport.pause_reading()

    def put(self, frame: bytes) -> None:
        """Add a frame to what is sent with the next flush."""
        if self._transport is not None:
            self._out.append(frame)
            self._out_nbytes += len(frame)

    def flush(self) -> None:
        """Send what has been put."""
        if not self._out or self._transport is None:
            return
        out, self._out, self._out_nbytes = self._out, [], 0
        self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        waiting = self._transport.get_write_buffer_size()
        if waiting > self._server.limit + _BACKLOG_NBYTES:
            logger.warning("store: %s does not read (%d bytes wait for it); it is disconnected", self._peer, waiting)
            self.abort()

    # -- ends -------------------------------------------------------------------------------------

    def _too_late(self, timeout: float) -> None:
        self._refuse(f"no proof of the token within {timeout:g} s")

    def _refuse(self, why: str) -> None:
        logger.warning("store: refused %s: %s", self._peer, why)
        self._todo.clear()
        self.flush()
        if self._transport is not None:
            # What is on its way (the word that the token is wrong) is sent first; it is short.
            self._transport.close()

    def abort(self) -> None:
        """Drop the connection with whatever waits in it."""
        if self._transport is not None:
            self._transport.abort()


def _name(address: Any) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address or "a local client")
