"""The handshake over each kind of driver: a blocking thread, an event loop, an inline poll, and bytes that are pushed."""

from __future__ import annotations

import asyncio
import select
import socket

import pytest

from asyncdist.base.deadline import Deadline
from asyncdist.errors import AuthenticationError, ProtocolError
from asyncdist.net.loop_socket import prove
from asyncdist.net.security import auth
from asyncdist.net.security.auth import ACCEPTED, MAGIC, NONCE_NBYTES, PROOF_NBYTES, HandshakeDriver, accept, dial
from asyncdist.store.client.blocking_socket import BlockingSocket

TOKEN, PURPOSE = "the token", "test"
D_NONCE, A_NONCE = b"d" * NONCE_NBYTES, b"a" * NONCE_NBYTES
LATER = b"what follows the handshake"


def blocking(sock, make):
    channel = BlockingSocket(sock, None)
    deadline = Deadline.after(60)
    make(lambda data: channel.send(data, deadline)).pump(lambda nbytes: channel.receive(deadline, nbytes))


def on_loop(sock, make):
    sock.setblocking(False)
    asyncio.run(prove(sock, make(sock.sendall)))


def inline(sock, make):
    sock.setblocking(False)
    handshake, poll = make(sock.sendall), select.poll()
    poll.register(sock, select.POLLIN)
    while not handshake.done:
        poll.poll()
        try:
            handshake.pump(sock.recv)
        except BlockingIOError:
            continue


def pushed(sock, make):
    """As an `asyncio.Protocol` gets them: also bytes that belong to what follows."""
    handshake = make(sock.sendall)
    while not handshake.done:
        data = sock.recv(1 << 16)
        if not data:
            raise EOFError
        following = handshake.feed(data)
    return following


each_driver = pytest.mark.parametrize("drive", [blocking, on_loop, inline, pushed])
each_side = pytest.mark.parametrize("side", ["dialling", "accepting"])


async def outcomes(drive, side, token=TOKEN, purpose=PURPOSE, step=1 << 16):
    """Run one side with a driver, and the other one so that its bytes arrive ``step`` at a time; return what each got."""
    near, far = socket.socketpair()
    other = {"dialling": "accepting", "accepting": "dialling"}[side]

    def write(data):
        for start in range(0, len(data), step):
            far.sendall(data[start : start + step])

    def oppose():
        try:
            getattr(HandshakeDriver, other)(TOKEN, PURPOSE, write).pump(far.recv)
            far.sendall(LATER)
        finally:
            far.shutdown(socket.SHUT_WR)

    def run():
        rest = drive(near, lambda send: getattr(HandshakeDriver, side)(token, purpose, send)) or b""
        near.setblocking(True)
        while data := near.recv(1 << 16):
            rest += data
        return rest

    with near, far:
        return await asyncio.gather(asyncio.to_thread(run), asyncio.to_thread(oppose), return_exceptions=True)


@each_driver
@each_side
@pytest.mark.parametrize("step", [1, 1 << 16], ids=["by the byte", "at once"])
async def test_both_sides_are_authenticated_and_later_bytes_are_left(drive, side, step):
    assert await outcomes(drive, side, step=step) == [LATER, None]


@each_driver
@pytest.mark.parametrize(("token", "purpose"), [("a guess", PURPOSE), (None, PURPOSE), (TOKEN, "another")])
async def test_both_sides_learn_of_a_wrong_token_or_purpose(drive, token, purpose):
    for side in ("dialling", "accepting"):
        assert [type(error) for error in await outcomes(drive, side, token, purpose)] == [AuthenticationError] * 2


@each_driver
@each_side
@pytest.mark.parametrize(
    ("says", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: somebody\r\nAccept: everything\r\n\r\n", ProtocolError),
        (b"", (EOFError, ConnectionError)),
        (MAGIC + bytes(NONCE_NBYTES), (EOFError, ConnectionError)),
    ],
    ids=["another protocol", "nothing", "half"],
)
async def test_stranger_is_refused(drive, side, says, error):
    near, far = socket.socketpair()
    with near, far:
        far.sendall(says)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(error):
            await asyncio.to_thread(drive, near, lambda send: getattr(HandshakeDriver, side)(TOKEN, PURPOSE, send))


# -- without sockets --------------------------------------------------------------------------------


@pytest.fixture
def dialling():
    """A dialling side, and the list of what it has sent."""
    sent: list[bytes] = []
    return HandshakeDriver(dial(TOKEN, PURPOSE, D_NONCE), sent.append), sent


@pytest.mark.parametrize(
    "answer",
    [
        lambda proof: bytes(PROOF_NBYTES),
        lambda proof: proof,
        lambda proof: auth.proof("wrong", b"a", PURPOSE, D_NONCE + A_NONCE),
        lambda proof: auth.proof(TOKEN, b"a", PURPOSE, D_NONCE[1:] + b"?" + A_NONCE),
    ],
    ids=["nothing", "the dialler's own proof", "proof of another token", "proof of another connection"],
)
def test_dialler_refuses_an_acceptor_without_the_token(dialling, answer):
    dialler, sent = dialling
    dialler.feed(MAGIC + A_NONCE)
    with pytest.raises(AuthenticationError, match="could not prove"):
        dialler.feed(ACCEPTED + answer(sent[1]))


def test_replayed_handshake_is_refused(dialling):
    """A proof covers the nonces of its connection, and the acceptor's nonce is new for each connection."""
    dialler, recorded = dialling
    dialler.feed(MAGIC + A_NONCE)
    HandshakeDriver(accept(TOKEN, PURPOSE, A_NONCE), bytes).feed(b"".join(recorded))
    with pytest.raises(AuthenticationError):
        HandshakeDriver(accept(TOKEN, PURPOSE, b"b" * NONCE_NBYTES), bytes).feed(b"".join(recorded))


def test_dialler_without_tls_is_told_to_use_tls_before_it_sends_a_proof(dialling):
    dialler, sent = dialling
    with pytest.raises(ProtocolError, match="the test requires TLS: set ASYNCDIST_TLS_CA to the certificate authority"):
        dialler.feed(auth.WANTS_TLS)
    assert sent == [MAGIC + D_NONCE]


def test_other_protocol_is_detected_before_any_proof():
    sent: list[bytes] = []
    with pytest.raises(ProtocolError):
        HandshakeDriver(accept(TOKEN, PURPOSE, A_NONCE), sent.append).feed(b"GET / HTTP/1.1\r\n".ljust(44))
    assert sent == []
