"""A forked child closes its copies of the descriptors of connections, listeners and locks; the parent's stay open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from pathlib import Path

import pytest

from asyncdist.base.background_loop import background_loop, new_loop
from asyncdist.config import Config
from asyncdist.store import AsyncStore, FileStore, StoreServer, TCPStore
from asyncdist.store.server.listener import unix_socket
from asyncdist.testing.cluster import world_of
from tests.support.channels import tls_settings
from tests.support.ranks import sums
from tests.support.resources import open_files

LONG = 60.0
TLS = tls_settings()

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "fork") or not Path("/proc/self/fd").is_dir(), reason="needs fork and /proc"),
]


def opened():
    """Return the sockets and regular files to which the descriptors of this process refer."""
    return {each for each in open_files() if each.startswith(("socket:", "/")) and not each.startswith("/dev/")}


def kept_by_a_child(before):
    """Fork a child; return the files that it has open, and those of its parent, without the files in ``before``."""
    here = opened() - before
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(sorted(opened() - before)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        there = said.read()
    assert os.waitpid(child, 0)[1] == 0
    return set(json.loads(there)), here


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request):
    """Run a coroutine on a loop of either kind."""
    factory = new_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run(coroutine):
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(coroutine)

    return run


@pytest.mark.parametrize("secured", [False, True])
def test_child_keeps_no_socket_of_a_store_and_its_clients(run, secured, tmp_path):
    config = Config(token="a token", **(TLS if secured else {}))

    async def program():
        background_loop()
        # The first socket opens descriptors that the process keeps.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        before = opened()
        path = tmp_path / "store.sock"
        with unix_socket(path) as sock:
            async with (
                await StoreServer.start(
                    "127.0.0.1", 0, token="a token", config=config, data=tmp_path / "data"
                ) as server,
                await StoreServer.start("", 0, token="a token", config=config, sockets=[sock]),
                await AsyncStore.connect(
                    "127.0.0.1", server.port, token="a token", timeout=LONG, config=config
                ) as store,
                await AsyncStore.connect(str(path), 0, token="a token", timeout=LONG, config=config) as by_file,
            ):
                await store.set("k", b"v")
                await by_file.set("k", b"v")
                blocking = await asyncio.to_thread(TCPStore, "127.0.0.1", server.port, timeout=LONG, config=config)
                there, here = kept_by_a_child(before)
                assert len([each for each in here if each.startswith("socket:")]) == 8
                assert not [each for each in there if each.startswith("socket:")]
                assert str(tmp_path / "data" / "lock") in here - there
                assert await store.get("k") == b"v"
                assert await asyncio.to_thread(blocking.get, "k") == b"v"
                await asyncio.to_thread(blocking.close)

    run(program())


@pytest.mark.parametrize(("transport", "more"), [("tcp", {}), ("tcp", TLS), ("shm", {})])
def test_child_keeps_no_socket_between_ranks(run, transport, more):
    async def program():
        background_loop()
        before = opened()
        config = Config(token="a token", **more)
        async with world_of(3, transport=transport, config=config) as groups:
            assert await sums(groups) == [3.0] * 3
            there, here = kept_by_a_child(before)
            assert len([each for each in here if each.startswith("socket:")]) >= 6
            assert not [each for each in there if each.startswith("socket:")]
            assert await sums(groups) == [3.0] * 3

    run(program())


def test_child_keeps_no_lock_of_a_file_store(tmp_path):
    path = tmp_path / "store"
    with contextlib.closing(FileStore(str(path), 1)) as store:
        store.set("k", b"v")
        there, here = kept_by_a_child(set())
        assert str(path) in here
        assert str(path) not in there
        assert store.get("k") == b"v"


def test_port_of_a_killed_store_is_free_while_a_forked_child_lives():
    reader, writer = os.pipe()
    server = os.fork()
    if server == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, world_size=1, timeout=LONG)
        if os.fork() == 0:  # the child has closed the listening socket when this returns
            os.write(writer, f"{store.port} {os.getpid()}\n".encode())
        os.read(os.pipe()[0], 1)  # until it is killed
    os.close(writer)
    with open(reader) as said:
        port, child = map(int, said.readline().split())
    try:
        os.kill(server, 9)
        os.waitpid(server, 0)
        with contextlib.closing(TCPStore("127.0.0.1", port, is_master=True, world_size=1, timeout=LONG)) as store:
            assert store.port == port
        os.kill(child, 0)
    finally:
        os.kill(child, 9)


async def test_child_runs_no_timer_of_its_parent():
    """Timers of transports use the parent's sockets, whose numbers mean other files in the child."""
    async with world_of(1, transport="shm") as groups:
        timers = groups[0].endpoint.timers
        timers.schedule("test", time.monotonic(), lambda: None)
        child = os.fork()
        if child == 0:
            os._exit(len(timers))
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - the child ends at once
        assert os.waitstatus_to_exitcode(status) == 0
