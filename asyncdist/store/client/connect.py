"""How a client, awaited or blocking, gets at a store: how often it tries, what it gives up on, what it says then."""

from __future__ import annotations

import logging
import math
import socket
import ssl
import time

from asyncdist.base import lifecycle
from asyncdist.base.backoff import Backoff
from asyncdist.base.deadline import Deadline, Timeout
from asyncdist.base.error_text import describe_error
from asyncdist.base.tls import handshake_error
from asyncdist.errors import AddressError, AsyncdistError, CertificateError, StoreConnectionError
from asyncdist.store.protocol.client_protocol import ClientProtocol

log = logging.getLogger("asyncdist")

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
NAME_GRACE = 30.0
"""Seconds within which a host's name may begin to resolve: a scheduler may start a worker before another one's name is
known, and name servers remember for as long that it was not."""
HANDSHAKE_TIMEOUT = 20.0
"""Seconds that something which takes our connection has to prove itself before we try again."""
STEADY = 5.0
"""Seconds after which a connection that breaks is not one that broke at once."""

_DISBELIEVED = 8
"""How often in a row a store may hang up right after the TLS handshake: one that ends does so once or twice."""


class RejectedAfterTls(ConnectionResetError):
    """It hung up after the TLS handshake and before it said anything.

    With TLS 1.3 our side of the handshake is over before the store has looked at our certificate, and no more than this
    is to be seen of its not believing it.
    """

    def __str__(self) -> str:
        return (
            "it hung up after the TLS handshake: it may want a certificate signed by its ASYNCDIST_TLS_CA; see its log"
        )


class ClosedByServer(ConnectionResetError):
    """It hung up before it said anything: a store that has too many connections, or is ending, cannot say more."""

    def __str__(self) -> str:
        return "it hung up before it said anything"


class ConnectRetry:
    """Trying again and again until a deadline, with pauses that double and are never equal for two ranks."""

    def __init__(self, host: str, port: int, timeout: Timeout) -> None:
        self.where = f"{host}:{port}"
        self.host, self.port = host, port
        self.deadline = Deadline.after(timeout)
        self._begun = time.monotonic()
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, self.deadline)
        self._reason: OSError | None = None
        self._turned_away = 0

    def attempt(self) -> Deadline:
        """Return until when the attempt that begins now may go on."""
        return Deadline(min(self.deadline.at, time.monotonic() + HANDSHAKE_TIMEOUT))

    def pause_after(self, error: OSError) -> float:
        """Return how many seconds to pause before the next attempt, or raise what the user gets to see."""
        now = time.monotonic()
        spent = now - self._begun
        if isinstance(error, socket.gaierror) and not isinstance(self._reason, socket.gaierror):
            # At once, so that who has misspelled it need not wait until we give up.
            grace = f"trying on for up to {NAME_GRACE:.0f} s"
            log.warning("host %r does not resolve (%s): %s", self.host, describe_error(error), grace)
        self._turned_away = self._turned_away + 1 if isinstance(error, RejectedAfterTls) else 0
        if self._turned_away == _DISBELIEVED:
            times = f"{_DISBELIEVED} times in a row"
            raise CertificateError(f"it hung up after the handshake, {times}: see its log") from error
        if not isinstance(error, TimeoutError):
            self._reason = error
        error = self._reason or error  # that the time ran out in the middle of an attempt explains little
        if isinstance(error, socket.gaierror) and (spent >= NAME_GRACE or self.deadline.expired(now=now)):
            raise unresolved(self.host, error) from error
        left = self.deadline.remaining(now=now)
        if left <= 0:
            advice = (
                "it may have as many connections as its ASYNCDIST_STORE_MAX_CONNECTIONS allows; see its log"
                if isinstance(error, ClosedByServer)
                else "see whether it was started, whether host and port are right, and whether a firewall is between"
            )
            raise StoreConnectionError(
                f"no store answered at {self.where} within {spent:.1f} s ({describe_error(error)}): {advice}"
            ) from error
        return self._backoff.next_pause()


class ReconnectPolicy:
    """Another connection where one has broken: whether there is a point in it, and when to try.

    Each is tried for ``patience`` seconds. One that breaks at once was made in vain, as what we ask for may be what breaks
    it: the next one takes what patience was left.
    """

    def __init__(self, conversation: ClientProtocol, host: str, port: int, patience: float) -> None:
        self._conversation = conversation
        self._host, self._port, self._patience = host, port, patience
        self._why = ""
        self._made = -math.inf
        self._persistence: ConnectRetry | None = None
        self.due = Deadline.never()
        """When the next attempt is to begin."""

    def lost(self, why: str, *, for_good: bool = False) -> StoreConnectionError | None:
        """Note that the connection broke. Return what to end with where there is no point in another."""
        self._why = why
        if for_good or self._patience <= 0 or not self._conversation.resumable:
            return self._conversation.lost or broken(self._conversation.where, why)
        if time.monotonic() < self._made + STEADY:
            return self.failed(ConnectionResetError(why))
        self._persistence = None
        self.due = Deadline.after(0)
        return None

    @property
    def persistence(self) -> ConnectRetry:
        """That of the attempts. It begins with the first: threads may not need the store for long."""
        if self._persistence is None:
            self._persistence = ConnectRetry(self._host, self._port, self._patience)
        return self._persistence

    def succeeded(self) -> None:
        """Note that an attempt has made a connection."""
        self._made = time.monotonic()

    def failed(self, error: OSError | AsyncdistError) -> StoreConnectionError | None:
        """Note that an attempt has failed. Return what to end with where there is no point in another."""
        where, why = self._conversation.where, self._why
        if isinstance(error, ConnectionRefusedError) and not self._conversation.stays:
            return broken(where, why)  # it ended with the program that served it
        if not isinstance(error, OSError):  # it answered, and will not say anything else
            return broken(where, f"{why}; then: {error}")
        try:
            self.due = Deadline.after(self.persistence.pause_after(error))
        except AsyncdistError as given_up:
            return broken(where, f"{why}; then: {given_up}")
        return None


def unknown(error: OSError | UnicodeError) -> socket.gaierror:
    """Return the error of a look-up: also one that took too long, or of a label that no name can have."""
    return error if isinstance(error, socket.gaierror) else socket.gaierror(socket.EAI_NONAME, describe_error(error))


def unresolved(host: str, error: OSError | UnicodeError) -> AddressError:
    """Return what the user gets to see of a look-up that failed."""
    return AddressError(
        f"host {host!r} does not resolve ({describe_error(error)}): check its spelling, or give an address"
    )


def hung_up(error: Exception | None, *, secured: bool) -> Exception:
    """Return the error of those on whom a store hung up before it said anything, or after no more than TLS."""
    if not secured:
        return ClosedByServer()
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return handshake_error(error)
    return RejectedAfterTls()


def broken(where: str, why: str) -> StoreConnectionError:
    """Return the error of a call whose connection to the store has broken."""
    return StoreConnectionError(
        f"the connection to the store at {where} broke ({why}): see the log of the process that serves it"
    )


def closed(where: str) -> StoreConnectionError:
    """Return the error of a call on a closed connection."""
    return StoreConnectionError(f"the connection to the store at {where} was closed by this process: connect again")


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """Connect, to a socket file if ``host`` is an absolute path. Raises OSError, and UnicodeError for what is no name."""
    if not host.startswith("/"):
        sock = socket.create_connection((host, port), timeout=timeout)
        lifecycle.close_in_children(sock)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lifecycle.close_in_children(sock)
    try:
        sock.settimeout(timeout)
        sock.connect(host)
    except BaseException:
        sock.close()
        raise
    return sock


KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""Idle seconds before the first probe, seconds between probes, and the number of lost probes that end the connection."""


def tune(sock: socket.socket) -> None:
    """Send small requests at once, and have the kernel notice within two minutes that the other host is gone."""
    if sock.family == socket.AF_UNIX:  # which has none of this
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
