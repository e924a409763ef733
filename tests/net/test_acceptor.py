"""Who is accepted while strangers hold connections, and after errors of ``accept``."""

from __future__ import annotations

import contextlib
import errno
import functools
import socket

import pytest

from asyncdist.net import listening
from asyncdist.net.admission import EvictingQueue
from asyncdist.net.connection import port as port_module
from asyncdist.net.security.auth import MAGIC, NONCE_NBYTES
from tests.support.channels import Recorder, port_of
from tests.support.ports import FailingListener


@contextlib.contextmanager
def strangers_at(where, count, says=b""):
    """Hold connections that have said ``says``."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(where)) for _ in range(count)]
        for each in held:
            # It may have been closed.
            with contextlib.suppress(OSError):
                each.sendall(says)
        yield held


@pytest.mark.each_loop
@pytest.mark.parametrize("says", [b"", MAGIC[:5], MAGIC + bytes(NONCE_NBYTES)], ids=["nothing", "half", "a hello"])
async def test_strangers_that_hold_connections_give_way_to_a_peer(monkeypatch, caplog, says):
    monkeypatch.setattr(port_module, "_MOST_HANDSHAKES", 8)
    async with port_of(Recorder(), host="here") as accepting, port_of(Recorder(), host="there") as dialling:
        with strangers_at(accepting.address.tcp, 40, says):
            assert (await dialling.connect(accepting.address)).is_open
    refused = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(refused) == 2
    assert "it had not proven the token, and too many connections had not (" in refused[1]


async def test_peer_whose_handshake_was_evicted_connects_again(monkeypatch):
    monkeypatch.setattr(port_module, "_MOST_HANDSHAKES", 1)
    async with port_of(Recorder(), host="here") as accepting, port_of(Recorder(), host="there") as dialling:
        add, strangers = EvictingQueue.add, contextlib.ExitStack()

        def interrupted(queue, handshake):
            """Let a stranger come in the middle of the first handshake."""
            monkeypatch.setattr(EvictingQueue, "add", add)
            add(queue, handshake)
            strangers.enter_context(socket.create_connection(accepting.address.tcp))

        monkeypatch.setattr(EvictingQueue, "add", interrupted)
        with strangers:
            assert (await dialling.connect(accepting.address)).is_open


@pytest.fixture
def fail(monkeypatch):
    """Let the next accepts of all ports fail: ``fail(*codes)``."""
    listening = []

    def listen(plain, *args):
        listening.append(FailingListener(plain(*args)))
        return listening[-1]

    for name in ("listen", "listen_tcp"):
        monkeypatch.setattr(port_module, name, functools.partial(listen, getattr(port_module, name)))

    def fail(*codes):
        for sock in listening:
            sock.codes = iter(codes)

    return fail


@pytest.fixture
def accepted(monkeypatch):
    """The handshakes of the accepted connections."""
    handshakes, add = [], EvictingQueue.add
    monkeypatch.setattr(EvictingQueue, "add", lambda queue, each: handshakes.append(each) or add(queue, each))
    return handshakes


async def test_aborted_connection_delays_no_other(fail, monkeypatch, caplog):
    monkeypatch.setattr(listening, "ACCEPT_AGAIN", 1000.0)
    async with port_of(Recorder(), host="here") as accepting, port_of(Recorder(), host="there") as dialling:
        fail(errno.ECONNABORTED, errno.ECONNABORTED)
        assert (await dialling.connect(accepting.address)).is_open
    assert "cannot accept" not in caplog.text


async def test_port_without_descriptors_tries_again_and_says_so_once(fail, monkeypatch, caplog):
    monkeypatch.setattr(listening, "ACCEPT_AGAIN", 0.01)
    async with port_of(Recorder(), host="here") as accepting, port_of(Recorder(), host="there") as dialling:
        fail(*[errno.EMFILE] * 5)
        assert (await dialling.connect(accepting.address)).is_open
    assert caplog.text.count("cannot accept connections") == 1


async def test_port_without_descriptors_closes_connections_of_strangers(
    fail, accepted, monkeypatch, caplog, eventually
):
    monkeypatch.setattr(listening, "ACCEPT_AGAIN", 0.0)
    async with port_of(Recorder(), host="here") as accepting, port_of(Recorder(), host="there") as dialling:
        with strangers_at(accepting.address.tcp, 2) as held:
            await eventually(lambda: len(accepted) == 2)
            fail(errno.EMFILE)
            assert (await dialling.connect(accepting.address)).is_open
            assert held[0].recv(1) == b""
    assert "cannot accept" not in caplog.text
