"""TLS for the store and between ranks: contexts from the settings, and a socket that is driven as a plain one is.

A certificate and its key (ASYNCDIST_TLS_CERT, ASYNCDIST_TLS_KEY) say who we are, and make what we serve TLS; the
certificates of ASYNCDIST_TLS_CA say whom we believe. A server that has both lets nobody in without a certificate of its
own; ranks, who are all both, use TLS between them where all three are given. The token is asked for as ever.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncdist.base import lifecycle
from asyncdist.config import Config
from asyncdist.errors import CertificateError, UsageError

RECORD_NBYTES = 16 << 10
"""What goes into one record at most."""


def server_context(config: Config) -> ssl.SSLContext | None:
    """Return what a server needs, None where there is to be no TLS. Raises UsageError for files that are none."""
    if not config.tls_cert:
        if config.tls_ca:
            raise UsageError(
                "ASYNCDIST_TLS_CA is set, and what is served here has no certificate of its own: set ASYNCDIST_TLS_CERT "
                "and ASYNCDIST_TLS_KEY too, or unset it"
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, config)
    if config.tls_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # connections stay: there is nothing to resume
    return context


def client_context(config: Config) -> ssl.SSLContext | None:
    """Return what a store's client needs, None where there is to be no TLS. Raises UsageError for files that are none."""
    if not config.tls_ca and not config.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = config.tls_check_hostname
    _load(context, config)
    if not config.tls_ca:
        context.load_default_certs()
    return context


def rank_contexts(config: Config) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Return what a rank needs to accept and to dial its peers, None where there is to be no TLS between ranks.

    Peers are believed for their certificates, which only members of the job have; for their addresses too, by who dials,
    where ``tls_check_ranks`` says so.
    """
    if not (config.tls_cert and config.tls_ca):
        return None
    serving = server_context(config)
    dialling = client_context(config.with_(tls_check_hostname=config.tls_check_ranks))
    assert serving is not None
    assert dialling is not None
    return serving, dialling


def _load(context: ssl.SSLContext, config: Config) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if config.tls_cert:
            context.load_cert_chain(config.tls_cert, config.tls_key or None, password=_no_password)
    except (OSError, ValueError) as error:
        names = f"{config.tls_cert} (ASYNCDIST_TLS_CERT) with {config.tls_key or 'its own key'} (ASYNCDIST_TLS_KEY)"
        raise UsageError(f"cannot use the certificate {names}: {_why(error)}") from error
    try:
        if config.tls_ca:
            where = {"capath": config.tls_ca} if Path(config.tls_ca).is_dir() else {"cafile": config.tls_ca}
            context.load_verify_locations(**where)
    except OSError as error:
        raise UsageError(f"cannot use {config.tls_ca} (ASYNCDIST_TLS_CA): {_why(error)}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody is there to ask for its password")


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or getattr(error, "reason", None) or error)


def refused(error: ssl.SSLError) -> CertificateError:
    """Return the error of a handshake that failed."""
    return CertificateError(getattr(error, "verify_message", "") or error.reason or str(error))


class TlsSocket:
    """A non-blocking socket with TLS, and the methods of a plain one; BlockingIOError where it cannot go on.

    It is plain until `secure` has returned. Bytes that were taken from the caller may be kept (`unsent`): who polls waits
    for room then and calls `flush`. Bytes may be there that no poll tells of (`unread`).
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, serves: bool, name: str | None = None) -> None:
        self.secured = False
        self.wants_room = False
        """Whether the handshake waits to write rather than to read."""
        self._sock = sock
        self._context, self._serves, self._name = context, serves, name
        self._tls: ssl.SSLSocket | None = None
        self._kept = b""
        self._lock = threading.Lock()  # of one connection, OpenSSL takes one call at a time

    # -- the handshake ----------------------------------------------------------------------------

    def secure(self) -> None:
        """Go on with the handshake of a connected socket. Raises BlockingIOError, CertificateError, OSError."""
        if self._tls is None:
            self._tls = self._context.wrap_socket(
                self._sock, server_side=self._serves, do_handshake_on_connect=False, server_hostname=self._name
            )
            self._sock = self._tls
            lifecycle.close_in_children(self._tls)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self.wants_room = False
            raise BlockingIOError from None
        except ssl.SSLWantWriteError:
            self.wants_room = True
            raise BlockingIOError from None
        except ssl.SSLEOFError as error:
            raise ConnectionResetError("it hung up during the TLS handshake: see its log") from error
        except ssl.SSLError as error:
            raise refused(error) from error
        self.secured = True

    # -- reading ----------------------------------------------------------------------------------

    @property
    def unread(self) -> bool:
        """Whether there are bytes that no poll tells of."""
        return self._tls is not None and self._tls.pending() > 0

    def recv_into(self, buffer: Any, nbytes: int = 0) -> int:
        assert self._tls is not None
        try:
            with self._lock:
                return self._tls.recv_into(buffer, nbytes or len(buffer))
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recvmsg_into(self, buffers: Sequence[Any]) -> tuple[int]:
        first, *others = buffers
        count = self.recv_into(first)
        if count == len(first) and others and len(others[0]) and self.unread:
            count += self.recv_into(others[0])
        return (count,)

    def recv(self, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        return bytes(buffer[: self.recv_into(buffer, nbytes)])

    # -- writing ----------------------------------------------------------------------------------

    @property
    def unsent(self) -> bool:
        """Whether bytes that were taken are still here."""
        return bool(self._kept)

    def flush(self) -> None:
        """Send what was kept. Raises BlockingIOError while there is no room."""
        assert self._tls is not None
        with self._lock:
            while self._kept:
                try:
                    # A record that was begun must be offered again as it was.
                    self._kept = self._kept[self._tls.send(self._kept) :]
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    raise BlockingIOError from None

    def finish(self, timeout: float) -> None:
        """Wait, for no longer than ``timeout`` seconds, until everything that was taken has been sent."""
        poll, until = select.poll(), time.monotonic() + timeout
        poll.register(self._sock, select.POLLOUT)
        while self.unsent and (left := until - time.monotonic()) > 0:
            poll.poll(left * 1000)
            with contextlib.suppress(BlockingIOError):
                self.flush()

    def send(self, data: Any) -> int:
        """Take bytes, and return how many."""
        self.flush()
        assert self._tls is not None
        record = data[:RECORD_NBYTES]
        with self._lock:
            try:
                return self._tls.send(record)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._kept = bytes(record)
                return len(self._kept)

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        whole, left = bytearray(), RECORD_NBYTES
        for buffer in buffers:
            whole += memoryview(buffer)[:left]
            left = RECORD_NBYTES - len(whole)
        return self.send(bytes(whole))

    def sendall(self, data: bytes) -> None:
        """Send a few bytes, as a handshake has them: all of it is taken."""
        self.flush()
        with self._lock:
            self._kept = data
        with contextlib.suppress(BlockingIOError):
            self.flush()

    # -- as of any socket -------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._sock.fileno()

    def setblocking(self, blocking: bool) -> None:
        self._sock.setblocking(blocking)

    def getsockopt(self, level: int, option: int) -> int:
        return self._sock.getsockopt(level, option)

    def connect_ex(self, where: Any) -> int:
        return self._sock.connect_ex(where)

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._sock, how)  # SSLSocket's would go on without TLS

    def close(self) -> None:
        self._sock.close()
