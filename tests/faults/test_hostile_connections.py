"""Connections of other programs to a rank, and authenticated peers that send damaged data."""

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import secrets
import socket
import time

import pytest
import torch

from asyncdist.config import Config
from asyncdist.errors import AuthenticationError, PeerLostError
from asyncdist.kernel.transport.wire_format import DATA, HEADER_NBYTES, pack_header, pack_key
from asyncdist.net.security.auth import MAGIC, NONCE_NBYTES, dial
from asyncdist.testing.cluster import world_of
from tests.support.faults import greet, impostor, proxied_world
from tests.support.ports import FailingListener
from tests.support.ranks import sums

TOKEN = "the token of this job"


def address(world, rank):
    """Return the address of a rank itself, behind its proxies."""
    return world.proxies[1 - rank, rank].target


def connect(where):
    sock = socket.create_connection(where, 10)
    sock.settimeout(10)
    return sock


def tcp_of(endpoint):
    return endpoint.transport_selector.transports[0]


def num_connections(world):
    return [len(tcp_of(endpoint).connections) for endpoint in world.endpoints]


@contextlib.asynccontextmanager
async def connected_pair(**settings):
    """A world of two ranks with some settings, after a first all-reduce. In the end they still have their connections."""
    config = Config(token=TOKEN).with_(**settings)
    with proxied_world(2, home=asyncio.get_running_loop(), config=config, timeout=10) as world:
        assert await sums(world.groups, 1000) == [1.0, 1.0]
        world.num_connections = num_connections(world)
        yield world
        async with asyncio.timeout(60):
            while num_connections(world) != world.num_connections:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert await sums(world.groups, 1000) == [1.0, 1.0]


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
async def test_garbage_on_the_listener_is_refused_and_logged(eventually, caplog, bytes_):
    async with connected_pair() as world:
        with connect(address(world, 0)) as stranger:
            stranger.sendall(bytes_)
            assert await sums(world.groups, 1000) == [1.0, 1.0]
            # The rank may have closed the connection already.
            with contextlib.suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
        await eventually(lambda: "refused a connection" in caplog.text)
        assert {record.levelno for record in caplog.records if record.name == "asyncdist.tcp"} == {logging.WARNING}


@pytest.mark.parametrize(("token", "world_id"), [("another token", None), (None, None), (TOKEN, "another world")])
async def test_connection_without_valid_proof_is_refused(caplog, eventually, token, world_id):
    async with connected_pair() as world:
        purpose = f"peer of world {world_id or world.endpoints[0].world_id}"

        refused = "refused the token of this process" if token else "requires a token, and this process has none"

        def try_it():
            with connect(address(world, 0)) as stranger, pytest.raises(AuthenticationError, match=refused):
                greet(stranger, dial(token, purpose, secrets.token_bytes(NONCE_NBYTES)))

        await asyncio.to_thread(try_it)
        await eventually(lambda: "did not hold the token of this process" in caplog.text)


@pytest.mark.parametrize("rank", [0, 2, 65535])
async def test_connection_with_impossible_rank_is_refused(caplog, eventually, rank):
    async with connected_pair() as world:
        where, world_id = address(world, 0), world.endpoints[0].world_id
        with await asyncio.to_thread(impostor, where, world_id, rank, TOKEN):
            await eventually(lambda: f"claims to come from rank {rank}" in caplog.text)
            await eventually(lambda: num_connections(world) == world.num_connections)


async def test_unfinished_handshake_is_closed_after_timeout(caplog, eventually):
    async with connected_pair(handshake_timeout=0.1) as world:
        # The timeout may have been too short for the ranks themselves, which have reconnected.
        caplog.clear()
        with connect(address(world, 0)) as silent, connect(address(world, 0)) as half:
            half.sendall(MAGIC)
            for stranger in (silent, half):
                assert await asyncio.to_thread(stranger.recv, 1) == b""
            assert "did not authenticate in time" in caplog.text


async def test_ranks_with_timed_out_handshakes_reconnect():
    config = Config(token=TOKEN).with_(handshake_timeout=0.02)
    async with world_of(2, transport="tcp", config=config) as groups:
        talking = asyncio.create_task(sums(groups, 1000))
        for _ in range(10):
            await asyncio.sleep(0)
            # No handshake proceeds while the loop is blocked.
            time.sleep(0.03)  # noqa: ASYNC251
        assert await talking == [1.0, 1.0]


async def test_hundreds_of_silent_connections_do_not_block_peers(eventually):
    async with connected_pair() as world:
        where, world_id = address(world, 0), world.endpoints[0].world_id
        strangers = []
        try:
            strangers.extend(connect(where) for _ in range(600))
            await eventually(lambda: num_connections(world)[0] > 100)
            # The rank closes the oldest unauthenticated connections.
            assert num_connections(world)[0] < world.num_connections[0] + 300
            assert await sums(world.groups, 1000) == [1.0, 1.0]
            with await asyncio.to_thread(impostor, where, world_id, 1, TOKEN):
                connections = tcp_of(world.endpoints[0]).connections
                await eventually(
                    lambda: any(
                        each.peer is not None for each in list(connections.values())[world.num_connections[0] :]
                    )
                )
        finally:
            for stranger in strangers:
                stranger.close()


async def test_refused_connections_do_not_flood_the_log(caplog, eventually):
    async with connected_pair() as world:
        for _ in range(50):
            with connect(address(world, 0)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 100)
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.to_thread(stranger.recv, 1) == b""
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(lines) == 2
    assert "rank 0 refused 49 connections in" in lines[1]


@pytest.mark.parametrize("says", [b"", MAGIC[:5], MAGIC + bytes(NONCE_NBYTES)], ids=["nothing", "half", "a hello"])
async def test_strangers_do_not_delay_the_loss_of_a_peer(monkeypatch, eventually, says):
    with proxied_world(3, home=asyncio.get_running_loop(), config=Config(token=TOKEN)) as world:
        where, endpoint = world.proxies[1, 0].target, world.endpoints[0]
        with connect(where) as stranger:
            stranger.sendall(says)
            with await asyncio.to_thread(impostor, where, endpoint.world_id, 2, TOKEN):
                await eventually(lambda: tcp_of(endpoint).may_receive_from(2))
                receiving = world.groups[0].recv(torch.zeros(2), 2)
                suspected = []
                monkeypatch.setattr(endpoint, "suspect", lambda *args: suspected.append(args))
            with pytest.raises(PeerLostError, match="connection closed"):
                await receiving
        assert suspected == []


def failing_listener(world, monkeypatch, codes):
    listener = tcp_of(world.endpoints[0])._listener
    failing = FailingListener(listener.listening.sock, codes)
    monkeypatch.setattr(listener.listening, "sock", failing)
    return listener, failing


@pytest.mark.parametrize(
    "code",
    [
        errno.ENOMEM,
        *(pytest.param(code, marks=pytest.mark.exhaustive) for code in (errno.ENOBUFS, errno.EPERM, errno.EINVAL)),
    ],
)
async def test_listener_pauses_after_an_accept_error_and_reports_it(caplog, eventually, monkeypatch, code):
    async with connected_pair() as world:
        listener, failing = failing_listener(world, monkeypatch, itertools.repeat(code))
        with connect(address(world, 0)):
            await eventually(lambda: failing.calls)
            assert listener.paused
            assert listener.fileno() not in [descriptor for descriptor, _ in tcp_of(world.endpoints[0]).waits()]
            assert await sums(world.groups, 1000) == [1.0, 1.0]
            assert caplog.text.count(f"cannot accept connections at port {listener.port}: [Errno {code}]") == 1
            failing.codes = iter(())
            await eventually(lambda: num_connections(world)[0] == world.num_connections[0] + 1)
            assert not listener.paused
        monkeypatch.undo()


async def test_process_without_descriptors_refuses_connections_without_busy_loop(caplog, eventually):
    resource = pytest.importorskip("resource")
    async with connected_pair() as world:
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
            assert await sums(world.groups, 1000) == [1.0, 1.0]
            for stranger in strangers:
                assert stranger.recv(1) == b""
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in fill:
                os.close(descriptor)
            for stranger in strangers:
                stranger.close()


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (pack_header(pack_key(1, 2, 3), 4, 1 << 60), "claims 1152921504606846976 bytes"),
        (pack_header(pack_key(1, 2, 3), 4, (1 << 64) - 1), "claims"),
        (pack_header(pack_key(1, 2, 3), 4, 10, kind=77), "kind 77"),
        (pack_header(pack_key(1, 2, 3), 4, 1 << 20, kind=2), "kind 2"),
        (b"\xff" * HEADER_NBYTES, "the stream is damaged"),
        *[((pack_header(pack_key(1, 2, 3), 4, 8) + bytes(8))[:nbytes], "connection closed")
          for nbytes in (HEADER_NBYTES - 1, HEADER_NBYTES, HEADER_NBYTES + 3)],
    ],
)  # fmt: skip
async def test_authenticated_peer_that_sends_damaged_frames_or_disconnects_in_one_is_lost(frame, says):
    """Ranks 0 and 1 lose rank 2, and their own group continues."""
    with proxied_world(3, home=asyncio.get_running_loop(), config=Config(token=TOKEN)) as world:
        pair = world.new_group([0, 1])
        receiving = world.groups[0].recv(torch.zeros(2), 2)
        where, world_id = world.proxies[1, 0].target, world.endpoints[0].world_id
        # A dead rank's listener refuses connections too: only the end of its connection to rank 0 reports the death.
        world.proxies[0, 2].refuse()
        with await asyncio.to_thread(impostor, where, world_id, 2, TOKEN) as peer:
            peer.sendall(frame)
            if says == "connection closed":
                peer.close()
            with pytest.raises(PeerLostError, match=says) as lost:
                await receiving
            assert lost.value.peer == 2
        results = await asyncio.gather(*(group.all_reduce(torch.ones(10)) for group in pair.values()))
        assert [tensor[0].item() for tensor in results] == [2.0, 2.0]


async def test_authenticated_peer_may_send_unexpected_messages(eventually):
    """A rank stores messages for unknown groups up to the limit, and drops them when the world closes."""
    config = Config(token=TOKEN, aside_nbytes=1 << 18)
    with proxied_world(3, home=asyncio.get_running_loop(), config=config) as world:
        where, world_id = world.proxies[1, 0].target, world.endpoints[0].world_id
        with await asyncio.to_thread(impostor, where, world_id, 2, TOKEN) as peer:
            peer.setblocking(False)
            frame = pack_header(pack_key(99, 1, 0), 7, 1 << 14, DATA) + bytes(1 << 14)
            flooding = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(peer, frame * 200))
            inbox = world.endpoints[0].inbox(2)
            await eventually(lambda: inbox.aside_nbytes >= (1 << 18) - (1 << 14))
            assert inbox.aside_nbytes <= 1 << 18
            pair = world.new_group([0, 1])
            await asyncio.gather(*(group.all_reduce(torch.ones(10)) for group in pair.values()))
            flooding.cancel()
            await asyncio.wait([flooding])


async def test_rank_evicted_as_unauthenticated_reconnects(caplog, eventually):
    """For example a rank that computes for minutes between connecting and its next call."""
    config = Config(token=TOKEN, handshake_timeout=1.1)
    with proxied_world(2, home=asyncio.get_running_loop(), config=config) as world:
        world.proxies[0, 1].clog()
        summing = asyncio.ensure_future(sums(world.groups, 1000))
        await eventually(lambda: "did not authenticate in time" in caplog.text)
        world.proxies[0, 1].unclog()
        assert await summing == [1.0, 1.0]
        assert await sums(world.groups, 1000) == [1.0, 1.0]
