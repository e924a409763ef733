"""Connections between the ranks of one host, and the memory after they end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
import tempfile
import time
import types

import pytest
import torch

from asyncdist.groups.world import open_world
from asyncdist.kernel.memory.shared_arena import arena
from asyncdist.store import HashStore
from asyncdist.testing.cluster import world_of
from asyncdist_transports.shm import local_listener, meetings, transport
from asyncdist_transports.shm.local_listener import LocalListener, unreachable_reason
from tests.support.faults import cancelled_at


async def check_sums(groups):
    tensors = [torch.full((1000,), group.rank() + 1.0) for group in groups]
    await asyncio.gather(*[group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)])
    assert {tensor[-1].item() for tensor in tensors} == {len(groups) * (len(groups) + 1) / 2}


@pytest.mark.parametrize("name", ["tmp", "a folder whose name is longer than the address of a socket may be" * 3])
async def test_ranks_of_different_network_namespaces_connect_by_descriptor(monkeypatch, tmp_path, name):
    """Each rank claims a network namespace of its own, where abstract addresses are not visible."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    address, numbers, listening = LocalListener.address, itertools.count(1), []
    monkeypatch.setattr(LocalListener, "address", lambda listener: {**address(listener), "net": next(numbers)})
    opened = LocalListener.listen_by_descriptor
    monkeypatch.setattr(
        LocalListener, "listen_by_descriptor", lambda listener: listening.append(listener) or opened(listener)
    )
    async with world_of(3, transport="shm") as groups:
        assert len(listening) == 2
        await check_sums(groups)
    assert list(folder.iterdir()) == []


def bound(path):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(str(path))
    return sock


def listener_here():
    return LocalListener(types.SimpleNamespace(config=types.SimpleNamespace(host="here")))


def test_listen_by_descriptor_removes_only_stale_socket_files(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bound(tmp_path / "asyncdist-dead").close()
    bound(tmp_path / "another's").close()
    (tmp_path / "asyncdist-notes").touch()
    listener = listener_here()
    with bound(tmp_path / "asyncdist-alive") as alive:
        alive.listen()
        listener.listen_by_descriptor()
    listener.close()
    assert {entry.name for entry in tmp_path.iterdir()} == {"another's", "asyncdist-notes", "asyncdist-alive"}


def test_listen_by_descriptor_retries_when_its_socket_file_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    listener, listening, removed = listener_here(), local_listener.listening_socket, []

    def listening_too_late(path):
        sock = listening(path)
        if not removed:
            removed.append(path)
            os.unlink(path)
        return sock

    monkeypatch.setattr(local_listener, "listening_socket", listening_too_late)
    listener.listen_by_descriptor()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
        visitor.connect(f"/proc/self/fd/{listener.address()['descriptor']}")
    listener.close()
    assert removed
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def connect_strangers(monkeypatch):
    """Let strangers connect to each listener: ``connect_strangers(count, packet)``. Without a packet they send nothing."""
    with contextlib.ExitStack() as strangers:

        def connect(count, packet=None):
            address = LocalListener.address

            def and_connect(listener):
                own_address = address(listener)
                for _ in range(count):
                    stranger = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    stranger.connect(f"\0asyncdist-{own_address['name']}")
                    if packet is not None:
                        stranger.send(packet)
                return own_address

            monkeypatch.setattr(LocalListener, "address", and_connect)

        yield connect


@pytest.mark.exhaustive
@pytest.mark.parametrize("packet", [None, b"", b"garbage", b"x" * 44, b"asyncdist/1\n" + bytes(32), bytes(68)])
async def test_unauthenticated_connections_are_refused_and_do_not_block_peers(connect_strangers, packet):
    connect_strangers(3, packet)
    began = time.monotonic()
    async with world_of(3, transport="shm") as groups:
        assert time.monotonic() - began < 5
        await check_sums(groups)


async def test_silent_strangers_give_way_to_peers(monkeypatch, connect_strangers):
    monkeypatch.setattr(meetings, "_MOST_STRANGERS", 2)
    connect_strangers(40)
    accept_peer, waiting, most = meetings.accept_peer, 0, 0

    async def counted(*args):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        try:
            return await accept_peer(*args)
        finally:
            waiting -= 1

    monkeypatch.setattr(meetings, "accept_peer", counted)
    async with world_of(2, transport="shm") as groups:
        await check_sums(groups)
    assert 0 < most < 10


async def test_accepting_rank_refuses_another_user(monkeypatch):
    """The kernel reports the peer's user; the published address shows no difference here."""
    user = os.getuid()
    monkeypatch.setattr("asyncdist_transports.shm.transport._PATIENCE", 0.5)
    monkeypatch.setattr(
        local_listener, "os", types.SimpleNamespace(**{**vars(local_listener.os), "getuid": lambda: user + 1})
    )
    began = time.monotonic()
    with pytest.raises(Exception, match="shm cannot connect rank"):
        async with world_of(2, transport="shm") as groups:
            await check_sums(groups)
    assert time.monotonic() - began < 5


def test_listener_that_cannot_listen_leaves_no_descriptor(monkeypatch):
    def fail(address):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(local_listener, "listening_socket", fail)
    with pytest.raises(OSError, match="Too many open files"):
        listener_here()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_descriptors_that_a_stranger_sends_are_closed():
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        near.setblocking(False)
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(far, [b"no greeting"], [0, 0, 0])
        host = types.SimpleNamespace(config=types.SimpleNamespace(token=None), world_id="")
        with pytest.raises(local_listener.PeerRefused, match="a packet of 11 bytes"):
            await local_listener.accept_peer(near, "name", host, None, 0, {1})
        assert len(os.listdir("/proc/self/fd")) == before


def test_unreachable_reason():
    own = {"user": 1, "net": 1, "pids": 1}
    assert unreachable_reason(own, own) is None
    assert unreachable_reason(own, {**own, "net": 2}) is None
    assert "another user" in unreachable_reason(own, {**own, "user": 2})
    assert "namespace" in unreachable_reason(own, {**own, "net": 2, "pids": 2})


async def test_listener_closed_by_another_thread_keeps_watched_sockets_open():
    """An ending process closes it in its main thread. uvloop aborts when a watched descriptor is closed."""
    listener = listener_here()
    listener.listen_by_descriptor()
    sockets, waiting = list(listener.sockets), asyncio.ensure_future(listener.accept())
    await asyncio.sleep(0)
    await asyncio.to_thread(listener.close)
    assert [sock.fileno() >= 0 for sock in sockets] == [True, True]
    waiting.cancel()
    await asyncio.wait([waiting])
    assert [sock.fileno() for sock in sockets] == [-1, -1]
    listener.listen_by_descriptor()
    assert listener.sockets == []


async def open_and_close(rank, **options):
    world = await open_world(rank=rank, **options)
    await world.close()
    return "closed"


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1])
async def test_opening_cancelled_at_any_step_leaks_no_socket_or_memory(victim):
    used = arena().used_nbytes
    for number in itertools.count():
        options = {"backend": "shm", "store": HashStore(), "world_size": 2, "timeout": 20}
        other = asyncio.ensure_future(open_and_close(1 - victim, **options))
        opening = asyncio.ensure_future(cancelled_at(number, open_and_close(victim, **options)))
        await asyncio.wait([opening])
        if not opening.cancelled():
            assert [opening.result(), await other] == ["closed"] * 2
            break
        other.cancel()
        await asyncio.wait([other])
    assert number > 4
    assert arena().used_nbytes == used


@pytest.mark.exhaustive
async def test_destroyed_groups_leak_no_memory():
    used = arena().used_nbytes
    async with world_of(2, transport="shm") as groups:
        used_in_turn = []
        for _ in range(600):
            among = [group.world.new_group(None) for group in groups]
            await asyncio.gather(*[group.all_reduce(torch.ones(10)) for group in among])
            for group in among:
                group.close()
            used_in_turn.append(arena().used_nbytes)
        assert max(used_in_turn[-100:]) == max(used_in_turn[:100])
    assert arena().used_nbytes == used


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "failing", [(LocalListener, "accept"), (meetings, "connect_peer")], ids=["accepting", "connecting"]
)
async def test_process_out_of_sockets_logs_it_and_uses_next_transport(monkeypatch, caplog, failing):
    async def no_socket(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(*failing, no_socket)
    # The wait for ranks that do not connect.
    monkeypatch.setattr(transport, "_PATIENCE", 1.0)
    async with world_of(3, transport="auto") as groups:
        assert not any(group.shares_memory for group in groups)
        await check_sums(groups)
    assert "this process gets no more sockets: Too many open files" in caplog.text
