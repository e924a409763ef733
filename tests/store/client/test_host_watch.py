"""Hosts that vanish without an end of their connections: each side of a store's connection notices within its limit."""

import asyncio
import contextlib
import math
import re
import socket

import pytest
import torch.distributed

from asyncdist.config import Config
from asyncdist.errors import StoreConnectionError
from asyncdist.net import host_watch
from asyncdist.net.host_watch import HostWatch, keepalive, tune
from asyncdist.store import AsyncStore, TCPStore
from asyncdist.store.protocol.operations import Op
from tests.support.packets import deafen, needs_packet_filters
from tests.support.received_messages import frame_of
from tests.support.stores import LONG, TOKEN

pytestmark = needs_packet_filters
LIMIT = 0.2
BOTH_KINDS = pytest.mark.parametrize("kind", [AsyncStore, TCPStore])


@pytest.fixture
def config():
    return Config(handshake_timeout=LONG, store_c10d="loopback", heartbeat=LIMIT)


def test_kernel_ends_idle_connections_within_the_limit():
    for limit in (2.0, 5.0, 30.0, 120.0):
        (_, idle), (_, interval), (_, count) = keepalive(limit)
        assert idle + interval * count <= limit, limit
    assert keepalive(0.5) == (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 1))


@pytest.mark.parametrize("limit", [1e6, math.inf])
def test_limit_is_longer_than_the_kernel_accepts(limit):
    with socket.socket() as sock:
        tune(sock, limit)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 16383


async def leased(raw, server):
    """Connect a client with an ephemeral key and a watch, and without a lease beyond its connection."""
    client = await raw(server, proven=True)
    await client.send(
        frame_of(3, Op.RESUME, bytes(16), 0)
        + frame_of(1, Op.SET_EPHEMERAL, "its", b"v")
        + frame_of(2, Op.WATCH, "watched")
    )
    return client


@pytest.mark.parametrize("told", [False, True], ids=["idle", "told of a change"])
async def test_names_of_a_client_whose_host_vanished_end(server, connect, eventually, raw, told):
    """While something waits to be acknowledged, keep-alive does not run."""
    store = await connect(heartbeat=LIMIT)
    gone = await leased(raw, server)
    assert await store.get("its") == b"v"
    await eventually(lambda: server.state.num_open == 1)
    deafen(gone.writer.get_extra_info("socket").fileno())
    if told:
        await store.set("watched", "changed")
    await eventually(lambda: server.state.keys.peek("its") is None)
    assert server.state.num_open == 0


def deafen_the_server(server):
    """Let the server vanish for the clients that are connected now."""
    for connection in server.admission.connections:
        deafen(connection.fileno())


@BOTH_KINDS
async def test_client_that_goes_on_calling_connects_again(server, connect, kind):
    store = await connect(kind=kind, heartbeat=LIMIT)
    assert await store.add("n", 1) == 1
    deafen_the_server(server)
    assert await store.add("n", 1) == 2
    assert await store.add("n", 1) == 3


@BOTH_KINDS
async def test_client_that_waits_for_a_key_connects_again(server, connect, kind):
    store = await connect(kind=kind, heartbeat=LIMIT)
    waiting = asyncio.ensure_future(store.get("k"))
    assert await store.add("n", 1) == 1
    deafen_the_server(server)
    async with await AsyncStore.connect("127.0.0.1", server.port, token=TOKEN) as other:
        await other.set("k", "v")
    assert await waiting == b"v"


@BOTH_KINDS
async def test_client_that_must_not_connect_again_gets_an_error_that_says_why(server, connect, kind):
    store = await connect(kind=kind, heartbeat=LIMIT, store_reconnect=0.0)
    assert await store.add("n", 1) == 1
    deafen_the_server(server)
    with pytest.raises(StoreConnectionError, match=re.escape("its host has acknowledged nothing for 0.2 s")):
        await store.add("n", 1)


def full_connection(closing):
    """Return the two ends of a connection whose reader has read nothing of what it can hold."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        writer = closing.enter_context(socket.create_connection(listening.getsockname()))
        reader = closing.enter_context(listening.accept()[0])
    writer.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            writer.send(bytes(1 << 16))
    return writer, reader


def test_process_that_reads_late_is_told_from_a_host_that_vanished(until):
    """The kernel probes a full reader less and less often; its host answers each probe."""
    with contextlib.ExitStack() as closing:
        writer, reader = full_connection(closing)
        tune(writer)
        watch = HostWatch(writer, 0.1)

        def silence():
            info = host_watch._TCP_INFO
            return info.unpack(writer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, info.size))[3]

        until(lambda: not watch.has_vanished() and watch.is_waiting and silence() > 300)
        deafen(reader.fileno())
        until(watch.has_vanished)


async def test_torch_clients_that_cannot_connect_again_are_given_two_minutes(server):
    client = await asyncio.to_thread(
        torch.distributed.TCPStore, "127.0.0.1", server.port, is_master=False, wait_for_workers=False
    )
    (session,) = server.admission.connections
    with socket.socket(fileno=session.fileno()) as sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        sock.detach()
    del client
