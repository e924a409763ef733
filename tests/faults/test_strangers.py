"""Connections of other programs to a rank, and authenticated peers that send damaged data: the world continues."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import secrets
import socket
import time
from types import SimpleNamespace

import pytest
import torch

from asyncdist.base.auth import MAGIC, NONCE_NBYTES, dial
from asyncdist.config import Config
from asyncdist.errors import AuthenticationError, PeerLostError
from asyncdist.testing.cluster import world_of
from asyncdist.testing.faults import greet, impostor, proxied_world
from asyncdist.transport.wire_format import DATA, HEADER_NBYTES, pack_header, pack_key

TOKEN = "the token of this job"


def address(world, rank):
    """Where a rank listens, past its proxies."""
    return world.proxies[1 - rank, rank].target


def connect(where):
    sock = socket.create_connection(where, 10)
    sock.settimeout(10)
    return sock


async def sums(world, count=1000):
    tensors = [torch.full((count,), rank + 1.0) for rank in range(len(world.groups))]
    await asyncio.gather(*(group.all_reduce(tensor) for group, tensor in zip(world.groups, tensors, strict=True)))
    return [tensor[-1].item() for tensor in tensors]


def num_connections(world):
    return [len(mesh.transport_selector.transports[0].connections) for mesh in world.meshes]


@pytest.fixture
def a_world():
    """Make a world of two whose ranks already talk, with the settings given."""

    class Making:
        def __init__(self, **settings):
            self._making = proxied_world(
                2, home=asyncio.get_running_loop(), config=Config(token=TOKEN).with_(**settings), timeout=10
            )

        async def __aenter__(self):
            world = self._making.__enter__()
            assert await sums(world) == [3.0, 3.0]
            return world

        async def __aexit__(self, *error):
            self._making.__exit__(*error)

    return Making


GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b"x" * 100,
    "tls": bytes.fromhex("16030100c8010000c40303") + b"\x5a" * 100,
    "noise": secrets.token_bytes(4096),
    "half a greeting": MAGIC[:5],
    "a greeting and silence": MAGIC + bytes(NONCE_NBYTES),
    "a greeting and noise": MAGIC + bytes(NONCE_NBYTES) + secrets.token_bytes(200),
    "another version": b"asyncdist/2\n" + secrets.token_bytes(200),
}


@pytest.mark.parametrize("bytes_", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_on_the_listener_is_refused_and_logged(a_world, eventually, caplog, bytes_):
    async with a_world() as world:
        before = num_connections(world)
        with connect(address(world, 0)) as stranger:
            stranger.sendall(bytes_)
            assert await sums(world) == [3.0, 3.0]
            with contextlib.suppress(OSError):  # we may have hung up on it already
                stranger.shutdown(socket.SHUT_WR)
            await eventually(lambda: num_connections(world) == before)
        await eventually(lambda: "refused a connection" in caplog.text)
        assert {record.levelno for record in caplog.records if record.name == "asyncdist.tcp"} == {logging.WARNING}
        assert await sums(world) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("token", "world_id", "says"),
    [
        ("another token", None, "did not hold the token of this process"),
        (None, None, "did not hold the token of this process"),
        (TOKEN, "another world", "did not hold the token of this process"),
    ],
)
async def test_connection_without_valid_proof_is_refused(a_world, caplog, eventually, token, world_id, says):
    async with a_world() as world:
        before = num_connections(world)
        purpose = f"peer of world {world_id or world.meshes[0].world_id}"

        refused = "refused the token of this process" if token else "requires a token, and this process has none"

        def try_it():
            with connect(address(world, 0)) as stranger, pytest.raises(AuthenticationError, match=refused):
                greet(stranger, dial(token, purpose, secrets.token_bytes(NONCE_NBYTES)))

        await in_thread(try_it)
        await eventually(lambda: says in caplog.text)
        await eventually(lambda: num_connections(world) == before)
        assert await sums(world) == [3.0, 3.0]


async def in_thread(function):
    """Run what blocks in a thread that is gone afterwards."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        future = asyncio.get_running_loop().run_in_executor(threads, function)
        return await future


@pytest.mark.parametrize("rank", [0, 2, 65535])
async def test_connection_with_impossible_rank_is_refused(a_world, caplog, eventually, rank):
    async with a_world() as world:
        before = num_connections(world)
        where, world_id = address(world, 0), world.meshes[0].world_id
        with await in_thread(lambda: impostor(where, world_id, rank, TOKEN)):
            await eventually(lambda: f"claims to come from rank {rank}" in caplog.text)
            await eventually(lambda: num_connections(world) == before)
        assert await sums(world) == [3.0, 3.0]


async def test_unfinished_handshake_is_closed_after_timeout(a_world, caplog, eventually):
    async with a_world(handshake_timeout=0.1) as world:
        caplog.clear()  # the time may have been too short for the ranks themselves, which have reconnected
        before = num_connections(world)
        with connect(address(world, 0)) as silent, connect(address(world, 0)) as half:
            half.sendall(MAGIC)
            await eventually(lambda: caplog.text.count("did not prove itself in time") == 2)
            await eventually(lambda: num_connections(world) == before)
            assert silent.recv(1) == b""
        assert await sums(world) == [3.0, 3.0]


async def test_ranks_with_timed_out_handshakes_reconnect():
    config = Config(token=TOKEN).with_(handshake_timeout=0.02)
    async with world_of(2, transport="tcp", config=config) as groups:
        talking = asyncio.create_task(sums(SimpleNamespace(groups=groups)))
        for _ in range(10):
            await asyncio.sleep(0)
            time.sleep(0.03)  # noqa: ASYNC251  # the loop is blocked, and no handshake proceeds
        assert await talking == [3.0, 3.0]


async def test_hundreds_of_silent_connections_do_not_block_peers(a_world, eventually):
    async with a_world() as world:
        before = num_connections(world)
        where, world_id = address(world, 0), world.meshes[0].world_id
        strangers = []
        try:
            strangers.extend(connect(where) for _ in range(600))
            await eventually(lambda: num_connections(world)[0] > 100)
            assert num_connections(world)[0] < before[0] + 300  # the oldest have made room
            assert await sums(world) == [3.0, 3.0]
            with await in_thread(lambda: impostor(where, world_id, 1, TOKEN)):
                await eventually(lambda: any(_is_proven(c) for c in _connections(world.meshes[0])[before[0] :]))
        finally:
            for stranger in strangers:
                stranger.close()
        assert await sums(world) == [3.0, 3.0]


def _connections(mesh):
    return list(mesh.transport_selector.transports[0].connections.values())


def _is_proven(connection):
    return connection.peer is not None


class Failing:
    """A listening socket whose ``accept`` fails as often as it is told to, and counts its calls."""

    def __init__(self, sock, code, times):
        self._sock = sock
        self._code = code
        self.left = times
        self.calls = 0

    def accept(self):
        self.calls += 1
        assert self.calls < 1000, "the listener does not stop trying"
        if self.left:
            self.left -= 1
            raise OSError(self._code, os.strerror(self._code))
        return self._sock.accept()

    def __getattr__(self, name):
        return getattr(self._sock, name)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOBUFS, errno.EPERM, errno.EINVAL])
async def test_listener_pauses_after_an_accept_error_and_reports_it(a_world, caplog, eventually, monkeypatch, code):
    async with a_world() as world:
        mesh = world.meshes[0]
        listener = mesh.transport_selector.transports[0]._listener
        failing = Failing(listener.sock, code, math.inf)
        monkeypatch.setattr(listener, "sock", failing)
        with connect(address(world, 0)):
            await eventually(lambda: failing.calls)
            assert listener.paused
            assert listener.fileno() not in [
                descriptor for descriptor, _ in mesh.transport_selector.transports[0].waits()
            ]
            assert await sums(world) == [3.0, 3.0]
            assert caplog.text.count(f"cannot take connections at port {listener.port}: [Errno {code}]") == 1
            failing.left = 0
            before = num_connections(world)[0]
            await eventually(lambda: num_connections(world)[0] == before + 1)
            assert not listener.paused
        monkeypatch.undo()


async def test_listener_takes_the_next_connection_at_once_after_one_was_aborted(a_world, eventually, monkeypatch):
    async with a_world() as world:
        listener = world.meshes[0].transport_selector.transports[0]._listener
        failing = Failing(listener.sock, errno.ECONNABORTED, 3)
        monkeypatch.setattr(listener, "sock", failing)
        before = num_connections(world)[0]
        with connect(address(world, 0)):
            await eventually(lambda: num_connections(world)[0] == before + 1)
            assert not listener.paused
            assert failing.left == 0
        monkeypatch.undo()


async def test_process_without_descriptors_refuses_connections_without_busy_loop(a_world, caplog, eventually):
    resource = pytest.importorskip("resource")
    async with a_world() as world:
        where = address(world, 0)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        strangers = [socket.socket() for _ in range(3)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
            fill = []
            try:
                while True:
                    fill.append(os.dup(0))
            except OSError:
                pass
            for stranger in strangers:
                stranger.connect(where)
            await eventually(lambda: caplog.text.count("raise the limit on open files") == 3)
            assert await sums(world) == [3.0, 3.0]
            for stranger in strangers:
                assert stranger.recv(1) == b""
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in fill:
                os.close(descriptor)
            for stranger in strangers:
                stranger.close()
        assert await sums(world) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (pack_header(pack_key(1, 2, 3), 4, 1 << 60), "claims 1152921504606846976 bytes"),
        (pack_header(pack_key(1, 2, 3), 4, (1 << 64) - 1), "claims"),
        (pack_header(pack_key(1, 2, 3), 4, 10, kind=77), "kind 77"),
        (pack_header(pack_key(1, 2, 3), 4, 1 << 20, kind=2), "kind 2"),
        (b"\xff" * HEADER_NBYTES, "the stream is damaged"),
    ],
)
async def test_authenticated_peer_sending_damaged_frames_is_lost(eventually, caplog, frame, says):
    """A broken rank 2 of a world of three: the others lose it, and their own group goes on."""
    with proxied_world(3, home=asyncio.get_running_loop(), config=Config(token=TOKEN)) as world:
        pair = world.new_group([0, 1])
        room = torch.zeros(1)
        receiving = world.groups[0].recv(room, 2)
        where, world_id = world.proxies[1, 0].target, world.meshes[0].world_id
        with await in_thread(lambda: impostor(where, world_id, 2, TOKEN)) as mad:
            mad.sendall(frame)
            with pytest.raises(PeerLostError, match=says) as lost:
                await receiving
            assert lost.value.peer == 2
        tensors = [torch.ones(10), torch.ones(10)]
        await asyncio.gather(*(pair[rank].all_reduce(tensors[rank]) for rank in pair))
        assert [tensor[0].item() for tensor in tensors] == [2.0, 2.0]


async def test_authenticated_peer_may_send_unexpected_messages(eventually):
    """Messages of groups that do not exist here are put aside up to the limit, and thrown away with the world."""
    config = Config(token=TOKEN, aside_nbytes=1 << 18)
    with proxied_world(3, home=asyncio.get_running_loop(), config=config) as world:
        where, world_id = world.proxies[1, 0].target, world.meshes[0].world_id
        with await in_thread(lambda: impostor(where, world_id, 2, TOKEN)) as mad:
            mad.setblocking(False)
            frame = pack_header(pack_key(99, 1, 0), 7, 1 << 14, DATA) + bytes(1 << 14)
            flooding = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(mad, frame * 200))
            inbox = world.meshes[0].inbox(2)
            await eventually(lambda: inbox.aside_nbytes >= (1 << 18) - (1 << 14))
            assert inbox.aside_nbytes <= 1 << 18
            pair = world.new_group([0, 1])
            tensors = [torch.ones(10), torch.ones(10)]
            await asyncio.gather(*(pair[rank].all_reduce(tensors[rank]) for rank in pair))
            flooding.cancel()
            await asyncio.wait([flooding])


@pytest.mark.parametrize("nbytes", [HEADER_NBYTES - 1, HEADER_NBYTES, HEADER_NBYTES + 3])
async def test_authenticated_peer_that_disconnects_mid_message_is_lost(eventually, nbytes):
    with proxied_world(3, home=asyncio.get_running_loop(), config=Config(token=TOKEN)) as world:
        receiving = world.groups[0].recv(torch.zeros(2), 2)
        where, world_id = world.proxies[1, 0].target, world.meshes[0].world_id
        # Rank 2's own listener must be gone too, as a dead rank's is: only its connection to us tells of it.
        world.proxies[0, 2].refuse()
        with await in_thread(lambda: impostor(where, world_id, 2, TOKEN)) as mad:
            mad.sendall((pack_header(pack_key(1, 2, 3), 4, 8) + bytes(8))[:nbytes])
        with pytest.raises(PeerLostError) as lost:
            await receiving
        assert lost.value.peer == 2


async def test_rank_evicted_as_unauthenticated_reconnects(caplog, eventually):
    """As one does that computes for minutes between connecting and its next call."""
    config = Config(token=TOKEN, handshake_timeout=1.1)
    with proxied_world(2, home=asyncio.get_running_loop(), config=config) as world:
        world.proxies[0, 1].clog()
        summing = asyncio.ensure_future(sums(world))
        await eventually(lambda: "did not prove itself in time" in caplog.text)
        world.proxies[0, 1].unclog()
        assert await summing == [3.0, 3.0]
        assert await sums(world) == [3.0, 3.0]
