"""The authentication handshake, run without sockets."""

from __future__ import annotations

import pytest

from asyncdist.base import auth
from asyncdist.base.auth import ACCEPTED, MAGIC, NONCE_NBYTES, PROOF_NBYTES, HandshakeDriver, accept, dial
from asyncdist.errors import AuthenticationError, ProtocolError

D_NONCE, A_NONCE = b"d" * NONCE_NBYTES, b"a" * NONCE_NBYTES


def talk(dialler, acceptor):
    """Carry what two sides say to each other; return what came of each (None or its error), and what each said."""
    said = {dialler: bytearray(), acceptor: bytearray()}
    outcome, wants = {}, {}
    other = {dialler: acceptor, acceptor: dialler}
    heard = dict.fromkeys(said, 0)

    def go_on(side, data=None):
        try:
            step = side.send(data)
            while isinstance(step, bytes):
                said[side] += step
                step = side.send(None)
            wants[side] = step
        except StopIteration:
            outcome[side] = None
        except (AuthenticationError, ProtocolError) as error:
            outcome[side] = error

    go_on(dialler)
    go_on(acceptor)
    moved = True
    while moved and len(outcome) < 2:
        moved = False
        for side in set(said) - set(outcome):
            begin, end = heard[side], heard[side] + wants[side]
            if len(said[other[side]]) >= end:
                heard[side], moved = end, True
                go_on(side, bytes(said[other[side]][begin:end]))
    return outcome.get(dialler), outcome.get(acceptor), bytes(said[dialler]), bytes(said[acceptor])


def impostor(*answers):
    """An acceptor that sends a valid greeting, and then an answer computed from the dialler's messages."""
    greeting = yield len(MAGIC) + NONCE_NBYTES
    yield MAGIC + A_NONCE
    proof = yield PROOF_NBYTES
    yield answers[0](greeting, proof)


@pytest.mark.parametrize("token", [None, "secret"])
def test_equal_tokens_authenticate_both_sides(token):
    theirs, ours, *_ = talk(dial(token, "store", D_NONCE), accept(token, "store", A_NONCE))
    assert theirs is ours is None


@pytest.mark.parametrize(("one", "other"), [("secret", "wrong"), ("secret", None), (None, "secret")])
def test_different_token_is_refused_on_both_sides(one, other):
    told, noted, *_ = talk(dial(one, "store", D_NONCE), accept(other, "store", A_NONCE))
    assert isinstance(told, AuthenticationError)
    assert isinstance(noted, AuthenticationError)


def test_proof_for_one_purpose_is_refused_for_another():
    told, noted, *_ = talk(dial("secret", "store", D_NONCE), accept("secret", "rank", A_NONCE))
    assert isinstance(told, AuthenticationError)
    assert isinstance(noted, AuthenticationError)


@pytest.mark.parametrize(
    "answer",
    [
        lambda greeting, proof: ACCEPTED + bytes(PROOF_NBYTES),
        lambda greeting, proof: ACCEPTED + proof,
        lambda greeting, proof: ACCEPTED + auth.proof("wrong", b"a", "store", greeting[len(MAGIC) :] + A_NONCE),
        lambda greeting, proof: ACCEPTED + auth.proof("secret", b"a", "store", D_NONCE[1:] + b"?" + A_NONCE),
    ],
    ids=["nothing", "the dialler's own proof", "another token's", "that of another connection"],
)
def test_dialler_refuses_an_acceptor_without_the_token(answer):
    told, *_ = talk(dial("secret", "store", D_NONCE), impostor(answer))
    assert isinstance(told, AuthenticationError)
    assert "could not prove" in str(told)


def test_replayed_handshake_is_refused():
    """A proof holds for the numbers of its own connection: the acceptor's is new each time."""
    *_, said, _ = talk(dial("secret", "store", D_NONCE), accept("secret", "store", A_NONCE))

    def replayed():
        yield said[: len(MAGIC) + NONCE_NBYTES]
        yield len(MAGIC) + NONCE_NBYTES
        yield said[len(MAGIC) + NONCE_NBYTES :]

    _, noted, *_ = talk(replayed(), accept("secret", "store", b"b" * NONCE_NBYTES))
    assert isinstance(noted, AuthenticationError)


def test_dialler_without_tls_is_told_to_use_tls():
    def guarded():
        yield len(MAGIC) + NONCE_NBYTES
        yield auth.WANTS_TLS

    told, _, said, _ = talk(dial("secret", "store", D_NONCE), guarded())
    assert isinstance(told, ProtocolError)
    assert (
        str(told)
        == "the store requires TLS: set ASYNCDIST_TLS_CA to the certificate authority that signed its certificate"
    )
    assert said == MAGIC + D_NONCE


def test_other_protocol_is_detected_before_any_proof():
    def stranger():
        yield b"GET / HTTP/1.1\r\n".ljust(len(MAGIC) + NONCE_NBYTES)

    _, noted, _, said = talk(stranger(), accept("secret", "store", A_NONCE))
    assert isinstance(noted, ProtocolError)
    assert said == b""


@pytest.mark.parametrize("chunk", [1, 7, 1 << 10])
def test_driver_leaves_bytes_after_the_handshake_unread(chunk):
    def sides():
        return dial("secret", "store", D_NONCE), accept("secret", "store", A_NONCE)

    *_, dialled, accepted = talk(*sides())
    for side, says, hears in zip(sides(), (dialled, accepted), (accepted, dialled), strict=True):
        said, come = bytearray(), bytearray(hears + b"what follows")
        pushed = HandshakeDriver(side, said.extend)
        while not pushed.done:
            nbytes = min(chunk, pushed.missing)
            assert pushed.feed(bytes(come[:nbytes])) == b""
            del come[:nbytes]
        assert (said, come, pushed.missing) == (says, b"what follows", 0)
