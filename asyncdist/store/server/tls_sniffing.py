"""A listening socket that peeks at the first byte of a connection to choose TLS or plain TCP.

`accept` refuses a plain connection unless its client is torch's TCPStore, which has no TLS. The peeked byte stays in the
socket. Used by `server`, which this module does not import.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from asyncdist.net.acceptor import Acceptor
from asyncdist.net.loop_socket import ready
from asyncdist.net.security.tls import handshake_error
from asyncdist.store.server.accept import Admission

_TLS_HANDSHAKE = b"\x16"


class SniffingListener:
    """Accepts connections as an `asyncio.Server` does, and closes like one."""

    def __init__(
        self,
        admission: Admission,
        sock: socket.socket,
        context: ssl.SSLContext,
        make: Callable[[], asyncio.Protocol],
        handshake_timeout: float,
    ) -> None:
        self._admission, self._context, self._make = admission, context, make
        self._handshake_timeout = handshake_timeout
        self._loop = asyncio.get_running_loop()
        self._ending: list[asyncio.Task[None]] = []
        self._acceptor = Acceptor(
            sock, self._begin, what="the store", most=admission.max_connections, timeout=handshake_timeout,
            loop=self._loop, refusals=admission.refusals,
        )  # fmt: skip

    def close(self) -> None:
        """Stop listening, and drop the connections that have not been admitted."""
        self._ending += self._acceptor.stop()

    async def wait_closed(self) -> None:
        """Return when no handshake is running."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _begin(self, sock: socket.socket) -> None:
        """Give the connection to the server, inside TLS if it begins so."""
        first = b""
        try:
            if self._admission.is_full:
                self._admission.refuse_overflow()
            else:
                await ready(sock)
                first = sock.recv(1, socket.MSG_PEEK)
        finally:
            if not first:
                sock.close()
        if not first:
            return
        tls = first == _TLS_HANDSHAKE
        timeout = self._handshake_timeout if tls else None
        try:
            await self._loop.connect_accepted_socket(
                self._make, sock, ssl=self._context if tls else None, ssl_handshake_timeout=timeout
            )
        except ssl.SSLError as error:
            raise handshake_error(error) from error
        except OSError as error:
            raise ConnectionResetError(f"it hung up during the TLS handshake ({error})") from error
