"""The authentication handshake, run without sockets."""

import pytest

from asyncdist.errors import AuthenticationError, ProtocolError
from asyncdist.net.security import auth
from asyncdist.net.security.auth import ACCEPTED, MAGIC, NONCE_NBYTES, PROOF_NBYTES, accept, dial

D_NONCE, A_NONCE = b"d" * NONCE_NBYTES, b"a" * NONCE_NBYTES


def run(dialler, acceptor):
    """Run two sides against each other; return the outcome of each (None or its error), and the bytes that each sent."""
    sent = {dialler: bytearray(), acceptor: bytearray()}
    outcomes, wanted, num_read = {}, {}, dict.fromkeys(sent, 0)

    def resume(side, data=None):
        try:
            step = side.send(data)
            while isinstance(step, bytes):
                sent[side] += step
                step = side.send(None)
            wanted[side] = step
        except StopIteration:
            outcomes[side] = None
        except (AuthenticationError, ProtocolError) as error:
            outcomes[side] = error

    resume(dialler)
    resume(acceptor)
    moved = True
    while moved:
        moved = False
        for side, peer in ((dialler, acceptor), (acceptor, dialler)):
            if side not in outcomes and len(sent[peer]) >= num_read[side] + wanted[side]:
                data = bytes(sent[peer][num_read[side] :][: wanted[side]])
                num_read[side] += wanted[side]
                resume(side, data)
                moved = True
    return outcomes.get(dialler), outcomes.get(acceptor), bytes(sent[dialler]), bytes(sent[acceptor])


@pytest.mark.parametrize("token", [None, "secret"])
def test_equal_tokens_authenticate_both_sides(token):
    dial_error, accept_error, *_ = run(dial(token, "store", D_NONCE), accept(token, "store", A_NONCE))
    assert dial_error is accept_error is None


@pytest.mark.parametrize(
    "answer",
    [
        lambda greeting, proof: ACCEPTED + bytes(PROOF_NBYTES),
        lambda greeting, proof: ACCEPTED + proof,
        lambda greeting, proof: ACCEPTED + auth.proof("wrong", b"a", "store", greeting[len(MAGIC) :] + A_NONCE),
        lambda greeting, proof: ACCEPTED + auth.proof("secret", b"a", "store", D_NONCE[1:] + b"?" + A_NONCE),
    ],
    ids=["nothing", "the dialler's own proof", "proof of another token", "proof of another connection"],
)
def test_dialler_refuses_an_acceptor_without_the_token(answer):
    def impostor():
        greeting = yield len(MAGIC) + NONCE_NBYTES
        yield MAGIC + A_NONCE
        proof = yield PROOF_NBYTES
        yield answer(greeting, proof)

    error, *_ = run(dial("secret", "store", D_NONCE), impostor())
    assert isinstance(error, AuthenticationError)
    assert "could not prove" in str(error)


def test_replayed_handshake_is_refused():
    """A proof covers the nonces of its connection, and the acceptor's nonce is new for each connection."""
    *_, recorded, _ = run(dial("secret", "store", D_NONCE), accept("secret", "store", A_NONCE))

    def replay():
        yield recorded[: len(MAGIC) + NONCE_NBYTES]
        yield len(MAGIC) + NONCE_NBYTES
        yield recorded[len(MAGIC) + NONCE_NBYTES :]

    _, error, *_ = run(replay(), accept("secret", "store", b"b" * NONCE_NBYTES))
    assert isinstance(error, AuthenticationError)


def test_dialler_without_tls_is_told_to_use_tls():
    def tls_only():
        yield len(MAGIC) + NONCE_NBYTES
        yield auth.WANTS_TLS

    error, _, sent, _ = run(dial("secret", "store", D_NONCE), tls_only())
    assert isinstance(error, ProtocolError)
    reason = "the store requires TLS: set ASYNCDIST_TLS_CA to the certificate authority that signed its certificate"
    assert error.summary == reason
    assert sent == MAGIC + D_NONCE


def test_other_protocol_is_detected_before_any_proof():
    def http_client():
        yield b"GET / HTTP/1.1\r\n".ljust(len(MAGIC) + NONCE_NBYTES)

    _, error, _, sent = run(http_client(), accept("secret", "store", A_NONCE))
    assert isinstance(error, ProtocolError)
    assert sent == b""
