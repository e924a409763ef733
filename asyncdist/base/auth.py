"""Both ends of a connection prove that they hold the job's token before anything else is said.

Each side is a generator that a driver runs over any byte stream: it yields ``bytes`` to be written, or an ``int`` for
that many bytes to be read and sent back in. Everything read here has a fixed length, so nothing from an unproven
side is ever interpreted. The store and the mesh use the same exchange, with another ``purpose``::

    dialler                                    acceptor
    MAGIC, nonce_d                       →
                                         ←     MAGIC, nonce_a
    HMAC(token, "d", purpose, nonces)    →
                                         ←     status, HMAC(token, "a", purpose, nonces)

An absent token is the empty key: the exchange is the same, and proves only that both sides speak our protocol. An
acceptor that wants TLS says so to a dialler without, instead of its greeting.

Who dials a port of its own host at which nobody listens may reach itself: one connection in some ten thousands is made
from the very port that it goes to, and TCP then joins the socket with itself. That is a refusal, if a strange one.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
from collections.abc import Callable, Generator

from asyncdist.errors import AuthenticationError, ProtocolError

MAGIC = b"asyncdist/1\n"
NONCE_NBYTES = 32
PROOF_NBYTES = hashlib.sha256().digest_size
ACCEPTED, REFUSED = b"\x01", b"\x00"
WANTS_TLS = b"asyncdist/tls\n".ljust(len(MAGIC) + NONCE_NBYTES, b"\0")

Handshake = Generator[bytes | int, bytes, None]


def dial(token: str | None, purpose: str, nonce: bytes) -> Handshake:
    """Prove ourselves to an acceptor, and have it prove itself.

    Raises AuthenticationError if it refuses our token or cannot prove its own, ProtocolError if it is not ours at all,
    or wants TLS, and ConnectionRefusedError if it is ourselves.
    """
    yield MAGIC + nonce
    greeting = yield len(MAGIC) + NONCE_NBYTES
    if greeting == MAGIC + nonce:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there: what we said came back to us")
    if greeting == WANTS_TLS:
        raise ProtocolError(f"the {purpose} wants TLS: set ASYNCDIST_TLS_CA to who has signed its certificate")
    if not greeting.startswith(MAGIC):
        raise ProtocolError(
            f"what answers there is no asyncdist {purpose} (it said {greeting[:12]!r}); check host and port"
        )
    nonces = nonce + greeting[len(MAGIC) :]
    yield _proof(token, b"d", purpose, nonces)
    answer = yield 1 + PROOF_NBYTES
    if answer[:1] != ACCEPTED:
        refused = "refused our token" if token else "wants a token, and we have none"
        raise AuthenticationError(f"the {purpose} {refused}")
    if not hmac.compare_digest(answer[1:], _proof(token, b"a", purpose, nonces)):
        raise AuthenticationError(f"the {purpose} could not prove that it holds our token")


def accept(token: str | None, purpose: str, nonce: bytes) -> Handshake:
    """Make a dialler prove itself, then prove ourselves.

    Raises ProtocolError for bytes that are not ours and AuthenticationError for a wrong token (the dialler is told).
    """
    greeting = yield len(MAGIC) + NONCE_NBYTES
    if not greeting.startswith(MAGIC):
        raise ProtocolError(f"a connection that does not speak our protocol (it began with {greeting[:12]!r})")
    nonces = greeting[len(MAGIC) :] + nonce
    yield MAGIC + nonce
    proof = yield PROOF_NBYTES
    if not hmac.compare_digest(proof, _proof(token, b"d", purpose, nonces)):
        yield REFUSED + bytes(PROOF_NBYTES)
        raise AuthenticationError("a connection did not hold our token")
    yield ACCEPTED + _proof(token, b"a", purpose, nonces)


def _proof(token: str | None, side: bytes, purpose: str, nonces: bytes) -> bytes:
    return hmac.digest((token or "").encode(), b"|".join((side, purpose.encode(), nonces)), "sha256")


class Pushed:
    """Runs a handshake over bytes that are pushed in, as an event loop's protocol gets them.

    ``write`` is called with the bytes to be sent, the first of them at once. A handshake that fails does so in `feed`.
    """

    def __init__(self, handshake: Handshake, write: Callable[[bytes], object]) -> None:
        self._handshake = handshake
        self._write = write
        self._buffer = bytearray()
        self._wanted = 0
        self.done = False
        self._go_on(next(handshake))

    @property
    def missing(self) -> int:
        """How many bytes it needs before it can go on, 0 once `done`: who reads no more leaves what follows unread."""
        return self._wanted - len(self._buffer)

    def feed(self, data: bytes) -> bytes:
        """Take bytes that arrived; once `done`, return those that follow the handshake."""
        self._buffer += data
        while not self.done and len(self._buffer) >= self._wanted:
            piece = bytes(self._buffer[: self._wanted])
            del self._buffer[: self._wanted]
            self._go_on(None, piece)
        if not self.done:
            return b""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def _go_on(self, step: bytes | int | None, piece: bytes = b"") -> None:
        try:
            step = self._handshake.send(piece) if step is None else step
            while isinstance(step, bytes):
                self._write(step)
                step = next(self._handshake)
            self._wanted = step
        except StopIteration:
            self.done, self._wanted = True, 0
