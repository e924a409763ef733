"""The daemon: a process of its own that serves until it is told to stop."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncdist.config import Config
from asyncdist.errors import StoreConnectionError
from asyncdist.store import TCPStore
from tests.support.ports import free_port

LONG = 20.0
CONFIG = Config(token="a token for tests", store_reconnect=0.0)
PROGRAM = """
import asyncio
from asyncdist.config import Config
from asyncdist.store.server.daemon import serve

def ready(host, port):
    print(port, flush=True)

import sys

async def main():
    asyncio.get_running_loop().slow_callback_duration = 60  # a tenth of a second says how busy the machine is
    await serve("127.0.0.1", int(sys.argv[1]), token="a token for tests", config=Config(), ready=ready)

asyncio.run(main())
assert "torch" not in sys.modules
print("closed", flush=True)
"""

pytestmark = pytest.mark.processes


@contextmanager
def daemon(port: int = 0) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_closes_cleanly_when_told_to(how):
    with daemon() as (process, port), TCPStore("127.0.0.1", port, timeout=LONG, config=CONFIG) as store:
        assert store.add("n", 1) == 1
        process.send_signal(how)
        out, err = process.communicate(timeout=LONG)
        assert (process.returncode, out, err) == (0, b"closed\n", b"")
        with pytest.raises(StoreConnectionError):
            store.add("n", 1)


@pytest.mark.exhaustive
def test_it_is_killed_and_another_one_takes_its_place():
    with daemon(free_port()) as (process, port), TCPStore("127.0.0.1", port, timeout=LONG, config=CONFIG) as store:
        store.set("k", "v")
        process.kill()
        with pytest.raises(StoreConnectionError):
            store.get("never")
        process.wait(LONG)
        with daemon(port) as (_, again), TCPStore("127.0.0.1", again, timeout=LONG, config=CONFIG) as other:
            assert again == port
            assert other.check(["k"]) is False
            assert other.add("n", 1) == 1


def test_it_outlives_its_clients():
    with daemon() as (_, port):
        for number in range(1, 4):
            with TCPStore("127.0.0.1", port, timeout=LONG, config=CONFIG) as store:
                assert store.add("n", 1) == number
