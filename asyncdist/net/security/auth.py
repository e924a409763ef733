"""Mutual authentication of the two ends of a connection: each proves that it holds the job's token.

The store and the transports run this exchange on every connection, each with its own ``purpose``, before they interpret
any other byte. Each side is a generator without I/O, which a driver runs over a byte stream: it yields ``bytes`` to
write, or an ``int``, the number of bytes that the driver reads and sends into it. All messages have a fixed length, so
neither side trusts a length that an unauthenticated peer sent::

    dialler                                    acceptor
    MAGIC, nonce_d                       →
                                         ←     MAGIC, nonce_a
    HMAC(token, "d", purpose, nonces)    →
                                         ←     status, HMAC(token, "a", purpose, nonces)

Without a token the key is empty: the exchange is the same and proves only that both sides speak this protocol. An
acceptor that requires TLS answers a dialler without TLS with `WANTS_TLS` instead of its greeting.

TCP can connect a socket to itself, if it dials a port of its own host on which nothing listens and gets that port as its
local port. The dialler detects its own greeting and reports a refused connection.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
from collections.abc import Callable, Generator
from typing import Self

from asyncdist.errors import AuthenticationError, ProtocolError

MAGIC = b"asyncdist/1\n"
NONCE_NBYTES = 32
PROOF_NBYTES = hashlib.sha256().digest_size
ACCEPTED, REFUSED = b"\x01", b"\x00"
WANTS_TLS = b"asyncdist/tls\n".ljust(len(MAGIC) + NONCE_NBYTES, b"\0")

Handshake = Generator[bytes | int, bytes, None]


def dial(token: str | None, purpose: str, nonce: bytes) -> Handshake:
    """Authenticate the dialling side to an acceptor, and the acceptor to the dialling side.

    Raises:
        AuthenticationError: The acceptor refuses the token or cannot prove that it holds the token.
        ProtocolError: The acceptor speaks another protocol, or requires TLS.
        ConnectionRefusedError: The socket is connected to itself.
    """
    yield MAGIC + nonce
    greeting = yield len(MAGIC) + NONCE_NBYTES
    if greeting == MAGIC + nonce:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nothing listens there: the socket was connected to itself")
    if greeting == WANTS_TLS:
        raise ProtocolError(
            f"the {purpose} requires TLS: set ASYNCDIST_TLS_CA to the certificate authority that signed its certificate"
        )
    if not greeting.startswith(MAGIC):
        raise ProtocolError(
            f"the answer did not come from an asyncdist {purpose} (it began with {greeting[:12]!r}); check host and port"
        )
    nonces = nonce + greeting[len(MAGIC) :]
    yield proof(token, b"d", purpose, nonces)
    answer = yield 1 + PROOF_NBYTES
    if answer[:1] != ACCEPTED:
        refused = "refused the token of this process" if token else "requires a token, and this process has none"
        raise AuthenticationError(f"the {purpose} {refused}")
    if not hmac.compare_digest(answer[1:], proof(token, b"a", purpose, nonces)):
        raise AuthenticationError(f"the {purpose} could not prove that it holds the same token")


def accept(token: str | None, purpose: str, nonce: bytes) -> Handshake:
    """Authenticate a dialler, then the accepting side to it.

    Raises:
        ProtocolError: The dialler speaks another protocol.
        AuthenticationError: The dialler does not hold the token. It has been sent `REFUSED`.
    """
    greeting = yield len(MAGIC) + NONCE_NBYTES
    if not greeting.startswith(MAGIC):
        raise ProtocolError(f"a connection speaks another protocol (it began with {greeting[:12]!r})")
    nonces = greeting[len(MAGIC) :] + nonce
    yield MAGIC + nonce
    received = yield PROOF_NBYTES
    if not hmac.compare_digest(received, proof(token, b"d", purpose, nonces)):
        yield REFUSED + bytes(PROOF_NBYTES)
        raise AuthenticationError("a connection did not hold the token of this process")
    yield ACCEPTED + proof(token, b"a", purpose, nonces)


def proof(token: str | None, side: bytes, purpose: str, nonces: bytes) -> bytes:
    """Return the HMAC by which one side (``b"d"`` or ``b"a"``) proves that it holds the token."""
    return hmac.digest((token or "").encode(), b"|".join((side, purpose.encode(), nonces)), "sha256")


Write = Callable[[bytes], object]
"""Sends bytes to the peer."""


class HandshakeDriver:
    """Runs `dial` or `accept`: over bytes that the caller passes to `feed`, or reads with `pump`. Both raise its errors.

    ``write`` is called with the bytes to send, the first time by the constructor.
    """

    def __init__(self, handshake: Handshake, write: Write) -> None:
        self._handshake = handshake
        self._write = write
        self._buffer = bytearray()
        self._wanted = 0
        self.done = False
        self._handle(next(handshake))

    @classmethod
    def dialling(cls, token: str | None, purpose: str, write: Write) -> Self:
        return cls(dial(token, purpose, os.urandom(NONCE_NBYTES)), write)

    @classmethod
    def accepting(cls, token: str | None, purpose: str, write: Write) -> Self:
        return cls(accept(token, purpose, os.urandom(NONCE_NBYTES)), write)

    def pump(self, receive: Callable[[int], bytes]) -> None:
        """Read until the handshake is `done`, and leave later bytes unread.

        Args:
            receive: A ``recv`` of at most so many bytes. If it raises BlockingIOError, call again when there is more.

        Raises:
            EOFError: The other side has closed the connection.
        """
        while not self.done:
            data = receive(self.missing)
            if not data:
                raise EOFError("the other side closed the connection during the handshake; see its log")
            self.feed(data)

    @property
    def missing(self) -> int:
        """Number of bytes until the next step; 0 once `done`."""
        return self._wanted - len(self._buffer)

    def feed(self, data: bytes) -> bytes:
        """Process bytes that arrived; once `done`, return the bytes that follow the handshake."""
        self._buffer += data
        while not self.done and len(self._buffer) >= self._wanted:
            piece = bytes(self._buffer[: self._wanted])
            del self._buffer[: self._wanted]
            try:
                self._handle(self._handshake.send(piece))
            except StopIteration:
                self.done, self._wanted = True, 0
        if not self.done:
            return b""
        following = bytes(self._buffer)
        self._buffer.clear()
        return following

    def _handle(self, step: bytes | int) -> None:
        while isinstance(step, bytes):
            self._write(step)
            step = next(self._handshake)
        self._wanted = step
