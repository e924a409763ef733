"""A listening socket that peeks at the first byte of a connection to choose TLS or plain TCP.

`accept` refuses a plain connection unless its client is torch's TCPStore, which has no TLS. The peeked byte stays in the
socket. Used by `server`, which this module does not import.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from asyncdist.base import lifecycle
from asyncdist.base.descriptors import is_transient
from asyncdist.net.security.tls import handshake_error
from asyncdist.store.server.accept import Admission
from asyncdist.store.server.connection import peer_name

logger = logging.getLogger("asyncdist.store.server.server")

_TLS_HANDSHAKE = b"\x16"
_ACCEPTS_PER_EVENT = 100


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
        self._admission = admission
        self._handshake_timeout = handshake_timeout
        self._sock = sock
        self._context = context
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._unclassified: dict[socket.socket, asyncio.TimerHandle] = {}
        self._handshaking: dict[asyncio.Task[None], None] = {}
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening, and drop the connections that have not been admitted."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        for sock in list(self._unclassified):
            self._drop(sock)
        for handshake in self._handshaking:
            handshake.cancel()

    async def wait_closed(self) -> None:
        """Return when no handshake is running."""
        await asyncio.gather(*self._handshaking, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_EVENT):
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if is_transient(error):
                    continue
                logger.error("store: cannot accept a connection: %s", error.strerror)
                # The process may have too many open descriptors for the moment.
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(1.0, self._accept_again)
                return
            admission = self._admission
            num_open = len(self._unclassified) + len(self._handshaking) + len(admission.connections)
            if num_open >= admission.max_connections:
                admission.refuse_overflow()
                if not self._make_room():
                    sock.close()
                    continue
            lifecycle.close_in_children(sock)
            sock.setblocking(False)
            self._unclassified[sock] = self._loop.call_later(self._handshake_timeout, self._drop, sock)
            self._loop.add_reader(sock.fileno(), self._peek, sock, peer)

    def _make_room(self) -> bool:
        """Drop the oldest connection of the phase that has the most unauthenticated ones; return whether there was one."""
        counts = (len(self._unclassified), len(self._handshaking), len(self._admission.unauthenticated))
        most = max(counts)
        if most == 0:
            return False
        if counts[0] == most:
            self._drop(next(iter(self._unclassified)))
        elif counts[1] == most:
            next(iter(self._handshaking)).cancel()
        else:
            self._admission.unauthenticated.evict_oldest()
        return True

    def _accept_again(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)
            self._accept()

    def _peek(self, sock: socket.socket, peer: object) -> None:
        try:
            first = sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        self._end_sniffing(sock)
        if not first:
            sock.close()
            return
        handshake = asyncio.ensure_future(self._handshake(sock, peer, tls=first == _TLS_HANDSHAKE))
        self._handshaking[handshake] = None
        handshake.add_done_callback(self._handshaking.pop)

    async def _handshake(self, sock: socket.socket, peer: object, *, tls: bool) -> None:
        timeout = self._handshake_timeout if tls else None
        try:
            await self._loop.connect_accepted_socket(
                self._make, sock, ssl=self._context if tls else None, ssl_handshake_timeout=timeout
            )
        except ssl.SSLError as error:
            self._admission.refused(peer_name(peer), handshake_error(error).summary)
        except OSError as error:
            self._admission.refused(peer_name(peer), f"it hung up during the TLS handshake ({error})")

    def _drop(self, sock: socket.socket) -> None:
        self._end_sniffing(sock)
        sock.close()

    def _end_sniffing(self, sock: socket.socket) -> None:
        self._unclassified.pop(sock).cancel()
        self._loop.remove_reader(sock.fileno())
