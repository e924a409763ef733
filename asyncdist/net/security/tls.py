"""TLS for the store and between ranks: contexts from the settings, and a non-blocking TLS socket.

The store's server and clients and the tcp transport use it. A certificate with its key (ASYNCDIST_TLS_CERT,
ASYNCDIST_TLS_KEY) identifies this process and switches TLS on for the ports that it serves. ASYNCDIST_TLS_CA names the
certificate authorities that it trusts. A server with both requires a certificate of every client. Ranks are servers and
clients at once, and use TLS among each other if all three settings are given. TLS does not replace the token.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncdist.base import lifecycle
from asyncdist.base.error_text import describe_error
from asyncdist.config import Config
from asyncdist.errors import CertificateError, UsageError

RECORD_NBYTES = 16 << 10
"""The longest payload of a TLS record."""
_WOULD_BLOCK = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


def server_context(config: Config) -> ssl.SSLContext | None:
    """Return a server's context; None without TLS. Raises UsageError for a file that cannot be used."""
    if not config.tls_cert:
        if config.tls_ca:
            raise UsageError(
                "ASYNCDIST_TLS_CA is set, and this server has no certificate: set ASYNCDIST_TLS_CERT and ASYNCDIST_TLS_KEY "
                "too, or unset ASYNCDIST_TLS_CA"
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, config)
    if config.tls_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    # Connections are long-lived: no session is resumed.
    context.num_tickets = 0
    return context


def client_context(config: Config) -> ssl.SSLContext | None:
    """Return a store client's context; None without TLS. Raises UsageError for a file that cannot be used."""
    if not config.tls_ca and not config.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = config.tls_check_hostname
    _load(context, config)
    if not config.tls_ca:
        context.load_default_certs()
    return context


def rank_contexts(config: Config) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Return a rank's contexts for accepting and for dialling peers; None without TLS between ranks.

    A rank trusts every peer with a certificate of the authority, because only members of the job hold one. With
    ``tls_check_ranks`` the dialling rank also checks the certificate against the peer's address.
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
        raise UsageError(f"cannot use the certificate {names}: {describe_error(error)}") from error
    try:
        if config.tls_ca:
            where = {"capath": config.tls_ca} if Path(config.tls_ca).is_dir() else {"cafile": config.tls_ca}
            context.load_verify_locations(**where)
    except OSError as error:
        raise UsageError(f"cannot use {config.tls_ca} (ASYNCDIST_TLS_CA): {describe_error(error)}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted: use a key without a password")


def handshake_error(error: ssl.SSLError) -> CertificateError:
    """Return the error to raise for a TLS handshake that failed."""
    return CertificateError(getattr(error, "verify_message", "") or error.reason or str(error))


class TlsSocket:
    """A non-blocking TLS socket with the methods of a plain one, which raise BlockingIOError where they would block.

    It is a plain socket until `secure` has returned. It may hold bytes that it accepted from the caller and has not sent
    (`unsent`): the caller then waits until the socket is writable and calls `flush`. It may hold received bytes that no
    poll reports (`unread`).
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, serves: bool, name: str | None = None) -> None:
        self.secured = False
        self.wants_write = False
        """Whether the handshake waits for the socket to become writable rather than readable."""
        self._sock = sock
        self._context, self._serves, self._name = context, serves, name
        self._tls: ssl.SSLSocket | None = None
        self._unsent_bytes = b""
        # OpenSSL allows one call at a time per connection.
        self._lock = threading.Lock()

    # -- the handshake ----------------------------------------------------------------------------

    def secure(self) -> None:
        """Continue the handshake of a connected socket. Raises BlockingIOError, CertificateError, OSError."""
        if self._tls is None:
            self._tls = self._context.wrap_socket(
                self._sock, server_side=self._serves, do_handshake_on_connect=False, server_hostname=self._name
            )
            self._sock = self._tls
            lifecycle.close_in_children(self._tls)
        try:
            self._tls.do_handshake()
        except _WOULD_BLOCK as error:
            self.wants_write = isinstance(error, ssl.SSLWantWriteError)
            raise BlockingIOError from None
        except ssl.SSLEOFError as error:
            raise ConnectionResetError(
                "the peer closed the connection during the TLS handshake: see its log"
            ) from error
        except ssl.SSLError as error:
            raise handshake_error(error) from error
        self.secured = True

    # -- reading ----------------------------------------------------------------------------------

    @property
    def unread(self) -> bool:
        """Whether received bytes are buffered that no poll reports."""
        return self._tls is not None and self._tls.pending() > 0

    def recv_into(self, buffer: Any, nbytes: int = 0) -> int:
        assert self._tls is not None
        try:
            with self._lock:
                return self._tls.recv_into(buffer, nbytes or len(buffer))
        except _WOULD_BLOCK:
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
        """Whether it holds bytes that it has accepted and not sent."""
        return bool(self._unsent_bytes)

    def flush(self) -> None:
        """Send the unsent bytes. Raises BlockingIOError while the socket is not writable."""
        assert self._tls is not None
        with self._lock:
            while self._unsent_bytes:
                try:
                    # OpenSSL requires a retry with the same bytes.
                    self._unsent_bytes = self._unsent_bytes[self._tls.send(self._unsent_bytes) :]
                except _WOULD_BLOCK:
                    raise BlockingIOError from None

    def send(self, data: Any) -> int:
        """Accept up to one record of bytes for sending; return their number."""
        self.flush()
        assert self._tls is not None
        record = data[:RECORD_NBYTES]
        with self._lock:
            try:
                return self._tls.send(record)
            except _WOULD_BLOCK:
                self._unsent_bytes = bytes(record)
                return len(self._unsent_bytes)

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        whole, left = bytearray(), RECORD_NBYTES
        for buffer in buffers:
            whole += memoryview(buffer)[:left]
            left = RECORD_NBYTES - len(whole)
        return self.send(bytes(whole))

    def sendall(self, data: bytes) -> None:
        """Accept all of a few bytes, such as those of a handshake."""
        self.flush()
        with self._lock:
            self._unsent_bytes = data
        with contextlib.suppress(BlockingIOError):
            self.flush()

    # -- as a plain socket ------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._sock.fileno()

    def setblocking(self, blocking: bool) -> None:
        self._sock.setblocking(blocking)

    def getsockopt(self, level: int, option: int, *length: int) -> Any:
        return self._sock.getsockopt(level, option, *length)

    def connect_ex(self, where: Any) -> int:
        return self._sock.connect_ex(where)

    def shutdown(self, how: int) -> None:
        # SSLSocket.shutdown would continue the connection without TLS.
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        self._sock.close()
