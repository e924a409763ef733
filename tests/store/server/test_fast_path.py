"""The epoll fast path for torch's clients, and the loop's transports where there is no epoll."""

import contextlib
import select
import socket
import struct

import pytest

from asyncdist.base.background_loop import background_loop
from asyncdist.store import StoreServer
from asyncdist.store.protocol.c10d import Code
from asyncdist.store.server.c10d_session import C10dSession
from tests.support.c10d_peer import Peer, encode

LARGE = bytes(range(256)) * (32 << 10)


@pytest.fixture(params=["epoll", "transports"])
def server(request, monkeypatch):
    if request.param != "epoll":
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


def test_requests_of_several_clients_in_one_iteration(peers):
    for peer in peers:
        peer.send(Code.ADD, b"/n", 1)
    assert sorted(peer.reply(Code.ADD) for peer in peers) == [1, 2, 3]


def test_cached_requests_do_not_reach_the_session(server, peers, monkeypatch):
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


def test_cached_add_releases_a_waiting_client(peers):
    asking, waiting = peers[:2]
    for _ in range(3):
        waiting.send(Code.WAIT, [b"/k"])
        assert waiting.settle() == 0
        assert asking.ask(Code.ADD, b"/k", 1) == 1
        assert waiting.exactly(1) == b"\x00"
        assert asking.ask(Code.DELETE_KEY, b"/k") == 1


def test_replies_keep_their_order_behind_a_partial_write(server, peers):
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
def test_client_that_ends_is_removed_in_the_same_iteration(server, peers, reset):
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


def test_requests_of_a_client_aborted_in_the_same_iteration_are_not_applied(server, peers):
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


def test_paused_server_reads_no_request(server, peers):
    on_server(server.pause_reading)
    on_server(server.pause_reading)
    peers[0].send(Code.ADD, b"/n", 1)
    with Peer(server.port) as late:
        late.settle()
        assert late.ask(Code.CHECK, [b"/n"]) == 1
    on_server(server.resume_reading)
    on_server(server.resume_reading)
    assert peers[0].reply(Code.ADD) == 1


def test_internal_error_closes_one_connection(server, peers, monkeypatch, caplog):
    def fail(key):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(server.state.keys, "peek", fail)
    peers[0].send(Code.GET, b"/k")
    assert peers[0].sock.recv(1) == b""
    assert "a mistake" in caplog.text
    assert peers[1].ask(Code.ADD, b"/n", 1) == 1


def test_requests_in_fragments_and_several_in_one_segment(peers):
    peer, other = peers[:2]
    said = encode(Code.SET, b"/k", b"v") + encode(Code.GET, b"/k") + encode(Code.ADD, b"/n", 5)
    for place in range(0, len(said), 5):
        peer.sock.sendall(said[place : place + 5])
        other.settle()
    assert peer.vector() == b"v"
    assert peer.number() == 5
