"""``asyncdist store`` in a process of its own."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest

from asyncdist.errors import AuthenticationError
from tests.support.daemon import Daemon, ended, started

pytestmark = pytest.mark.processes


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with started("--port", "0") as daemon:
        yield daemon


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_stop(daemon: Daemon, number: int):
    first, second = daemon.client(), daemon.client()
    first.set("key", "value")
    first.close()
    assert second.get("key") == b"value"  # what was set outlives who set it
    assert daemon.stop(number) == (0, "")
    second.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_again_and_again_it_ends_as_if_told_once(daemon: Daemon, number: int):
    while daemon.process.poll() is None:
        daemon.process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a moment, in which it gets on with its end
            daemon.process.wait(0.0005)
    assert daemon.end() == (0, "")


def test_it_wants_the_token():
    with started("--port", "0", ASYNCDIST_TOKEN="secret") as guarded:
        assert guarded.ready.endswith("(token required)\n")
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
        complaining = ended(*arguments, **settings)
        assert complaining.returncode == 2, complaining
        assert complaining.stdout == ""
        assert complaining.stderr.startswith("Error: ")
        assert "Traceback" not in complaining.stderr
        return complaining.stderr

    return run


def test_a_port_in_use(refused: Refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is in use" in refused("--port", str(port))


def test_a_host_that_does_not_resolve(refused: Refused):
    assert "'no-such-host.invalid' does not resolve" in refused("--host", "no-such-host.invalid", "--port", "0")


def test_an_address_of_another_machine(refused: Refused):
    assert "is not an address of this machine" in refused(
        "--host", "203.0.113.77", "--port", "0", ASYNCDIST_TOKEN="secret"
    )


def test_beyond_loopback_without_a_token(refused: Refused):
    assert "set ASYNCDIST_TOKEN" in refused("--host", "0.0.0.0", "--port", "0")


def test_beyond_loopback_with_a_token():
    with started("--host", "0.0.0.0", "--port", "0", ASYNCDIST_TOKEN="secret") as daemon:
        assert daemon.host == "0.0.0.0"
        assert daemon.stop()[0] == 0
