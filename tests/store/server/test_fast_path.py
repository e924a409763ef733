"""The sockets of torch's clients, read and answered without the loop's transports, or with them where there is no epoll."""

from __future__ import annotations

import contextlib
import select
import socket
import struct

import pytest

from asyncdist.base.background_loop import background_loop
from asyncdist.bench.store.c10d_peer import Peer, encode
from asyncdist.store import StoreServer
from asyncdist.store.protocol.c10d import Code
from asyncdist.store.server.c10d_session import C10dSession

pytestmark = pytest.mark.each_loop

LARGE = bytes(range(256)) * (32 << 10)


@pytest.fixture(params=["short", "through transports"])
def server(request, monkeypatch):
    if request.param != "short":
        monkeypatch.delattr(select, "epoll")
    server = background_loop().run(StoreServer.start("127.0.0.1", 0))
    yield server
    background_loop().run(server.close())
    assert server.num_connections == server.state.num_open == 0


@pytest.fixture
def peers(server):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Peer(server.port)) for _ in range(3)]


def on_server(function, *arguments):
    """Call something on the server's loop."""

    async def call():
        return function(*arguments)

    return background_loop().run(call())


def test_many_are_answered_in_one_turn(peers):
    for peer in peers:
        peer.send(Code.ADD, b"/n", 1)
    assert sorted(peer.reply(Code.ADD) for peer in peers) == [1, 2, 3]


def test_a_request_that_releases_others(peers):
    for peer in peers[1:]:
        peer.send(Code.WAIT, [b"/k"])
        assert peer.settle() == 0
    assert peers[0].ask(Code.ADD, b"/k", 1) == 1
    assert [peer.exactly(1) for peer in peers[1:]] == [b"\x00"] * 2


def test_what_can_be_answered_at_once_does_not_reach_the_session(server, peers, monkeypatch):
    peer, heard, take = peers[0], [], C10dSession.take
    peer.settle()

    def listen(session, data):
        heard.append(data)
        take(session, data)

    monkeypatch.setattr(C10dSession, "take", listen)
    before = server.num_requests
    assert [peer.ask(Code.ADD, b"/n", 1) for _ in range(3)] == [1, 2, 3]
    assert peer.ask(Code.CHECK, [b"/n"]) == 0
    assert len(heard) == (0 if hasattr(select, "epoll") else 4)
    assert on_server(lambda: server.num_requests) == before + 4  # counted after the replies, but in the same turn


def test_an_add_answered_at_once_releases_who_waits(peers):
    asking, waiting = peers[:2]
    for _ in range(3):
        waiting.send(Code.WAIT, [b"/k"])
        assert waiting.settle() == 0
        assert asking.ask(Code.ADD, b"/k", 1) == 1
        assert waiting.exactly(1) == b"\x00"
        assert asking.ask(Code.DELETE_KEY, b"/k") == 1


def test_a_reply_that_the_socket_does_not_take_at_once_and_those_after_it(server, peers):
    """The transport sends the rest of it; nothing overtakes that."""
    slow, other = peers[:2]
    slow.ask(Code.SET, b"/large", LARGE)
    for _ in range(3):
        slow.send(Code.GET, b"/large")
        slow.send(Code.ADD, b"/n", 1)
        other.settle()  # each comes in a read of its own
    for number in (1, 2, 3):
        assert slow.vector() == LARGE
        assert slow.number() == number
    assert slow.ask(Code.ADD, b"/n", 1) == 4  # directly again


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "is reset"])
def test_one_that_goes_is_forgotten_at_once(server, peers, reset):
    going, other = peers[:2]
    going.send(Code.BARRIER, b"/b", 2)
    going.settle()
    if reset:
        going.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    going.close()
    for _ in range(3):
        other.settle()
    assert server.state.num_open == 0
    assert server.num_connections == 2


def test_one_that_is_put_out_in_the_turn_in_which_it_speaks(server, peers):
    """Its socket's number may be another's before its words are read."""
    speaking, other = peers[:2]
    sessions = {session.peer: session for session in server.admission.connections}
    session = sessions["{}:{}".format(*speaking.sock.getsockname())]

    def put_out():
        speaking.send(Code.SET, b"/k", b"v")
        session.abort()
        session.abort()
        if server.fast_path._epoll is not None:
            server.fast_path._serve()

    on_server(put_out)
    assert other.ask(Code.CHECK, [b"/k"]) == 1
    with contextlib.suppress(ConnectionResetError):
        assert speaking.sock.recv(1) == b""


def test_nothing_is_read_while_reading_is_paused(server, peers):
    on_server(server.pause_reading)
    on_server(server.pause_reading)
    peers[0].send(Code.ADD, b"/n", 1)
    with Peer(server.port) as late:
        late.settle()
        assert late.ask(Code.CHECK, [b"/n"]) == 1
    on_server(server.resume_reading)
    on_server(server.resume_reading)
    assert peers[0].reply(Code.ADD) == 1


def test_a_request_that_is_none_ends_one_and_no_other(peers):
    peers[0].ask(Code.SET, b"/text", b"no number")
    peers[0].send(Code.ADD, b"/text", 1)
    assert peers[0].sock.recv(1) == b""
    assert peers[1].ask(Code.ADD, b"/n", 1) == 1


def test_a_mistake_of_ours_ends_one_and_no_other(server, peers, monkeypatch, caplog):
    def fail(key):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(server.state.keys, "peek", fail)
    peers[0].send(Code.GET, b"/k")
    assert peers[0].sock.recv(1) == b""
    assert "a mistake" in caplog.text
    assert peers[1].ask(Code.ADD, b"/n", 1) == 1


def test_requests_in_pieces_and_several_at_once(peers):
    peer, other = peers[:2]
    said = encode(Code.SET, b"/k", b"v") + encode(Code.GET, b"/k") + encode(Code.ADD, b"/n", 5)
    for place in range(0, len(said), 5):
        peer.sock.sendall(said[place : place + 5])
        other.settle()
    assert peer.vector() == b"v"
    assert peer.number() == 5
