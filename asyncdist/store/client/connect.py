"""How a store client connects: attempts until a deadline, the reconnect policy, and the errors that the user gets."""

from __future__ import annotations

import logging
import math
import socket
import ssl
import time

from asyncdist.base import lifecycle
from asyncdist.base.backoff import Backoff, Sleep
from asyncdist.base.deadline import Deadline, Timeout
from asyncdist.base.descriptors import ClosingOnError
from asyncdist.base.error_text import describe_error
from asyncdist.errors import AddressError, AsyncdistError, CertificateError, LookUpTimeoutError, StoreConnectionError
from asyncdist.net.network import begin_look_up, is_address
from asyncdist.net.security.tls import handshake_error
from asyncdist.store.protocol.c10d import MAGIC, U32, Code
from asyncdist.store.protocol.client_protocol import ClientProtocol

log = logging.getLogger("asyncdist")

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
NAME_GRACE = 30.0
"""Seconds for which a host name that does not resolve is retried.

A scheduler may start a worker before the name exists, and name servers cache negative answers for about this long.
"""
CONNECT_TIMEOUT = 3.5
"""Seconds within which a server must accept a connection; then the client tries again.

The system asks after 1 s, 3 s, 7 s and so on. When a store with many clients returns, its queue is full for some seconds,
and would then be empty until all of them ask again.
"""
HANDSHAKE_TIMEOUT = 20.0
"""Seconds within which a server that accepts a connection must complete the handshake; then the client tries again."""
STEADY = 0.5
"""Seconds after which a connection that breaks counts as one over which the store has served the client."""

TELL_AFTER = 10.0
"""Seconds without a store after which a client that goes on trying logs it."""

_C10D_PING = bytes([Code.VALIDATE]) + U32.pack(MAGIC) + bytes([Code.PING]) + U32.pack(MAGIC)

_MAX_TLS_REJECTIONS = 8
"""How often in a row a store may hang up right after the TLS handshake. A store that is ending does so once or twice."""


class RejectedAfterTls(ConnectionResetError):
    """The store hung up after the TLS handshake, before it sent anything.

    With TLS 1.3 the client's side of the handshake ends before the store has checked the client's certificate. This may be
    all that a client with a rejected certificate sees.
    """


class ClosedByServer(ConnectionResetError):
    """The store hung up before it sent anything: it has too many connections, or it is ending."""


class SilentServer(TimeoutError):
    """A server accepted the connection and did not complete the handshake. torch's TCPStore waits for further bytes."""

    def __str__(self) -> str:
        return "it accepts connections and does not answer"


class ConnectRetry(Backoff):
    """The attempts to connect to one store: iterate, report each failure to `failed`, and raise `overdue` in the end."""

    __slots__ = ("_begun", "_has_told", "_num_tls_rejections", "_reason", "host", "port")

    def __init__(self, host: str, port: int, timeout: Timeout, *, sleep: Sleep | None = None) -> None:
        if not host.startswith("/") and not (hasattr(port, "__index__") and 0 <= port < 1 << 16):
            raise AddressError(f"a store cannot have the port {port!r}: ports go from 1 to 65535")
        super().__init__(FIRST_PAUSE, LONGEST_PAUSE, Deadline.after(timeout), sleep=sleep)
        self.host, self.port = host, port
        self._begun = time.monotonic()
        self._reason: OSError = TimeoutError()
        self._num_tls_rejections = 0
        self._has_told = False

    def attempt_deadline(self) -> Deadline:
        return Deadline(min(self.deadline.at, time.monotonic() + HANDSHAKE_TIMEOUT))

    def failed(self, error: OSError) -> None:
        """Record why an attempt failed. Raises AddressError or CertificateError if no further attempt can succeed."""
        if isinstance(error, socket.gaierror):
            if not isinstance(self._reason, socket.gaierror):
                log.warning(
                    "host %r does not resolve (%s): retrying for up to %.0f s",
                    self.host,
                    describe_error(error),
                    NAME_GRACE,
                )
            if self._spent() >= NAME_GRACE:
                raise unresolved(self.host, error) from error
        self._num_tls_rejections = self._num_tls_rejections + 1 if isinstance(error, RejectedAfterTls) else 0
        if self._num_tls_rejections == _MAX_TLS_REJECTIONS:
            times = f"{_MAX_TLS_REJECTIONS} times in a row"
            raise CertificateError(f"it hung up after the handshake, {times}: see its log") from error
        # The error of an earlier attempt explains more than that of a server that did not answer.
        is_silent = isinstance(error, TimeoutError) and not isinstance(error, LookUpTimeoutError)
        explains = isinstance(error, SilentServer) and isinstance(self._reason, TimeoutError | ConnectionRefusedError)
        if explains or not is_silent:
            self._reason = error
        if not self._has_told and self._spent() >= TELL_AFTER:
            self._has_told = True
            log.warning("%s", self._no_answer("answers", "yet; this process goes on trying"))

    def overdue(self) -> AddressError | StoreConnectionError:
        reason = self._reason
        if isinstance(reason, socket.gaierror):
            return unresolved(self.host, reason)
        if isinstance(reason, LookUpTimeoutError):
            return reason
        error = StoreConnectionError(self._no_answer("answered", f"within {self._spent():.1f} s"))
        # The rendezvous reads the cause, to make a longer attempt if the store is slow.
        error.__cause__ = reason
        return error

    def _no_answer(self, verb: str, when: str) -> str:
        advice = "check that it was started, that host and port are right, and that no firewall is in between"
        if isinstance(self._reason, ClosedByServer):
            advice = "it may have as many connections as its ASYNCDIST_STORE_MAX_CONNECTIONS allows; see its log"
        elif isinstance(self._reason, SilentServer):
            advice = (
                "another program may use the port, such as torchrun, whose TCPStore is no asyncdist store; or the process "
                "of the store is stopped"
            )
        return f"no store {verb} at {self.host}:{self.port} {when} ({describe_error(self._reason)}): {advice}"

    def _spent(self) -> float:
        return time.monotonic() - self._begun


class ReconnectPolicy:
    """Whether and for how long a client connects again when its connection has broken.

    It allows attempts for ``patience`` seconds after a connection over which the store has served this client: the store
    has answered a request, or the connection lasted for `STEADY` seconds. Connections that break earlier share the
    patience that was left, because a request of this client may be what breaks them.

    With a patience of 0 s a client never connects again. ``sleep`` is how a blocking client pauses; see `Backoff`.
    """

    def __init__(
        self, protocol: ClientProtocol, host: str, port: int, patience: float, sleep: Sleep | None = None
    ) -> None:
        self.patience = patience
        self._protocol = protocol
        self._host, self._port, self._sleep = host, port, sleep
        self._why = ""
        self._connected_at = -math.inf
        self._num_connections = 0
        self._retry: ConnectRetry | None = None

    @property
    def retry(self) -> ConnectRetry:
        """The attempts. The patience begins with the first one, because a blocking client reconnects at its next call."""
        if self._retry is None:
            self._retry = ConnectRetry(self._host, self._port, self.patience, sleep=self._sleep)
            self._num_connections = 0
        return self._retry

    def lost(self, why: str, *, for_good: bool = False) -> StoreConnectionError | None:
        """Record that the connection broke. Return an error, with which the client ends, if it must not connect again."""
        self._why = why
        if for_good or self.patience <= 0 or not self._protocol.resumable:
            return self._protocol.lost or broken(self._protocol.where, why)
        if self._protocol.answered or time.monotonic() >= self._connected_at + STEADY:
            self._retry = None
        return None

    def succeeded(self) -> None:
        self._connected_at = time.monotonic()
        self._num_connections += 1

    def failed(self, error: OSError | AsyncdistError) -> None:
        """Record that an attempt has failed. Raises StoreConnectionError if no further attempt can succeed."""
        if isinstance(error, ConnectionRefusedError) and not self._protocol.stays:
            raise broken(self._protocol.where, self._why)  # the store ended with the program that served it
        if not isinstance(error, OSError):  # an answer of the store, which a further attempt would get again
            raise self._broken_again(error)
        try:
            self.retry.failed(error)
        except AsyncdistError as final:
            raise self._broken_again(final) from None

    def overdue(self) -> StoreConnectionError:
        if not self._num_connections:
            return self._broken_again(self.retry.overdue())
        return broken(
            self._protocol.where,
            f"{self._why}, as did {self._num_connections} further connections within {self.patience:g} s, before the "
            "store had answered a request",
        )

    def _broken_again(self, error: AsyncdistError) -> StoreConnectionError:
        return broken(self._protocol.where, f"{self._why}; then: {error}")


def resolution_error(error: OSError | UnicodeError) -> socket.gaierror:
    """Return the error of a failed look-up as a gaierror: a timeout and an invalid label raise other errors."""
    return error if isinstance(error, socket.gaierror) else socket.gaierror(socket.EAI_NONAME, describe_error(error))


def unresolved(host: str, error: OSError | UnicodeError) -> AddressError:
    return AddressError(
        f"host {host!r} does not resolve ({describe_error(error)}): check its spelling, or give an address"
    )


def look_up_overdue(host: str) -> LookUpTimeoutError:
    return LookUpTimeoutError(
        f"the name server did not resolve host {host!r} in time; check that it answers, or give an address"
    )


def hung_up(error: Exception | None, *, secured: bool) -> Exception:
    """Return the error of a client on which a store hung up before it sent anything but TLS records."""
    if not secured:
        return ClosedByServer("it hung up before it sent anything")
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return handshake_error(error)
    return RejectedAfterTls(
        "it hung up after the TLS handshake: it may want a certificate signed by its ASYNCDIST_TLS_CA; see its log"
    )


def broken(where: str, why: str) -> StoreConnectionError:
    return StoreConnectionError(
        f"the connection to the store at {where} broke ({why}): see the log of the process that serves it"
    )


def closed(where: str) -> StoreConnectionError:
    return StoreConnectionError(f"the connection to the store at {where} was closed by this process: connect again")


def connect(host: str, port: int, timeout: float, longest_attempt: float = math.inf) -> socket.socket:
    """Connect, to a Unix socket if ``host`` is an absolute path. Raises OSError, and UnicodeError for an invalid name.

    The name server has ``timeout`` seconds, and then each address of the host, but at most ``longest_attempt``.
    """
    if not host.startswith("/"):
        return _connect_to_first(addresses_of(host, timeout), port, min(timeout, longest_attempt))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lifecycle.close_in_children(sock)
    with ClosingOnError(sock):
        sock.settimeout(timeout)
        sock.connect(host)
    return sock


def addresses_of(host: str, timeout: float) -> list[str]:
    """Return the addresses of a host. Raises OSError or UnicodeError, LookUpTimeoutError after ``timeout`` seconds."""
    if is_address(host):
        return [host]
    try:
        return begin_look_up(host).result(timeout)
    except TimeoutError:
        raise look_up_overdue(host) from None


def _connect_to_first(addresses: list[str], port: int, timeout: float) -> socket.socket:
    """Connect to the first address that accepts. Raises the error of the first one if none does."""
    first = OSError()
    for address in addresses:
        try:
            sock = socket.create_connection((address, port), timeout)
        except OSError as error:
            first = error if address == addresses[0] else first
        else:
            lifecycle.close_in_children(sock)
            return sock
    raise first


def accepts_c10d_clients(host: str, port: int, timeout: float) -> bool:
    """Return whether the server at a port answers a client of torch's TCPStore within ``timeout`` seconds.

    An asyncdist store that refuses such clients from this host closes the connection instead. Torch's own error message
    does not name the cause.
    """
    try:
        with connect(host, port, timeout) as sock:
            sock.sendall(_C10D_PING)
            return bool(sock.recv(U32.size))
    except OSError:
        return False
