"""``asyncdist store`` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from asyncdist.config import Config
from asyncdist.errors import AuthenticationError
from asyncdist.store import TCPStore

pytestmark = pytest.mark.processes
LIMIT = 30  # seconds; nothing here takes one

_PROGRAM = """
import sys
from asyncdist.cli import main
try:
    main(sys.argv[1:], prog_name="asyncdist")
finally:
    assert not {"torch", "numpy"} & set(sys.modules)
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", _PROGRAM, "store", *arguments]


def environment(**settings: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCDIST_")}
    return {**clean, **settings}


class Daemon:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.ready = process.stdout.readline()
        found = re.fullmatch(r"asyncdist store is ready at tcp://(.+):(\d+) \((no )?token wanted\)\n", self.ready)
        assert found, self.ready
        self.host, self.port = found[1], int(found[2])

    def client(self, token: str | None = None) -> TCPStore:
        return TCPStore(self.host, self.port, timeout=LIMIT, config=Config(token=token))

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, out, err


@contextmanager
def _started(*arguments: str, **settings: str) -> Iterator[Daemon]:
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**settings)
    )
    try:
        yield Daemon(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with _started("--port", "0") as daemon:
        yield daemon


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_stop(daemon: Daemon, number: int):
    first, second = daemon.client(), daemon.client()
    first.set("key", "value")
    first.close()
    assert second.get("key") == b"value"  # what was set outlives who set it
    assert daemon.stop(number) == (0, "", "")
    second.close()


def test_it_wants_the_token():
    with _started("--port", "0", ASYNCDIST_TOKEN="secret") as guarded:
        assert guarded.ready.endswith("(token wanted)\n")
        for token in (None, "guess"):
            with pytest.raises(AuthenticationError):
                guarded.client(token).get("key")
        store = guarded.client("secret")
        assert store.add("count", 2) == 2
        store.close()
        assert guarded.stop()[0] == 0


Refused = Callable[..., str]


@pytest.fixture
def refused() -> Refused:
    """Run a store that must end at once with code 2; return what it complained of, on one line."""

    def run(*arguments: str, **settings: str) -> str:
        ended = subprocess.run(
            command(*arguments), capture_output=True, text=True, timeout=LIMIT, env=environment(**settings), check=False
        )
        assert ended.returncode == 2, ended
        assert ended.stdout == ""
        assert ended.stderr.startswith("Error: ")
        assert "Traceback" not in ended.stderr
        return ended.stderr

    return run


def test_a_port_in_use(refused: Refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is in use already" in refused("--port", str(port))


def test_a_host_that_does_not_resolve(refused: Refused):
    assert "'no-such-host.invalid' does not resolve" in refused("--host", "no-such-host.invalid", "--port", "0")


def test_an_address_of_another_machine(refused: Refused):
    assert "is no address of this machine" in refused("--host", "192.0.2.77", "--port", "0", ASYNCDIST_TOKEN="secret")


def test_beyond_loopback_without_a_token(refused: Refused):
    assert "set ASYNCDIST_TOKEN" in refused("--host", "0.0.0.0", "--port", "0")


def test_beyond_loopback_with_a_token():
    with _started("--host", "0.0.0.0", "--port", "0", ASYNCDIST_TOKEN="secret") as daemon:
        assert daemon.host == "0.0.0.0"
        assert daemon.stop()[0] == 0
