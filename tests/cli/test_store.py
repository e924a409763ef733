"""``asyncdist store`` as a process: its addresses, options, data, log, metrics, signals and deployment."""

import contextlib
import json
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from asyncdist.config import Config
from asyncdist.errors import AuthenticationError, StoreConnectionError
from asyncdist.net.network import is_loopback
from asyncdist.rendezvous.addresses import outward
from asyncdist.store.client.connect import accepts_c10d_clients
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.c10d import MAGIC, Code
from tests.support.c10d_peer import encode
from tests.support.daemon import LIMIT, asked, ended, environment, refused, started
from tests.support.ports import free_port

pytestmark = pytest.mark.processes
TLS = Path(__file__).parents[1] / "tls"
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no address 127.0.0.2")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_daemon_serves_until_a_signal(number):
    with started("--port", "0") as daemon, daemon.client() as second:
        with daemon.client() as first:
            first.set("key", "value")
        assert second.get("key") == b"value"
        assert daemon.stop(number) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_repeated_signals_end_the_daemon_like_one(number):
    with started("--port", "0") as daemon:
        while daemon.process.poll() is None:
            daemon.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):  # time in which the daemon continues to end
                daemon.process.wait(0.0005)
        assert daemon.end() == (0, "")


def test_second_signal_ends_the_drain():
    with (
        started("--port", "0", "--drain", "1000") as daemon,
        socket.create_connection(("127.0.0.1", daemon.port)) as slow_reader,
    ):
        slow_reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with daemon.client() as store:
            store.set("large", b"v" * (32 << 20))
        slow_reader.sendall(encode(Code.VALIDATE, MAGIC) + encode(Code.GET, b"/large"))
        assert slow_reader.recv(1)
        daemon.process.send_signal(signal.SIGTERM)
        refused = False
        while not refused:
            with socket.socket() as probe:
                refused = probe.connect_ex(("127.0.0.1", daemon.port)) != 0
        assert daemon.process.poll() is None  # the daemon waits until the reply is sent
        assert daemon.stop() == (0, "")


def test_token_is_required_on_every_interface():
    with started("--host", "0.0.0.0", "--port", "0", ASYNCDIST_TOKEN="secret") as daemon:
        assert daemon.host == "0.0.0.0"
        assert daemon.ready.endswith("(token required)\n")
        for token in (None, "guess"):
            with pytest.raises(AuthenticationError):
                daemon.client(token).get("key")
        with daemon.client("secret") as store:
            assert store.add("count", 2) == 2
        assert daemon.stop()[0] == 0


@pytest.mark.parametrize(
    ("token", "options", "settings", "from_loopback", "from_elsewhere"),
    [
        ("secret", (), {}, False, False),
        ("secret", ("--c10d", "loopback"), {}, True, False),
        ("secret", ("--c10d", "any"), {}, True, True),
        ("secret", ("--c10d", "off"), {"ASYNCDIST_STORE_C10D": "any"}, False, False),
        ("secret", ("--allow-unauthenticated-c10d",), {}, True, True),
        (None, (), {}, True, None),
        (None, ("--c10d", "off"), {}, False, None),
    ],
)
def test_c10d_option_selects_which_torch_clients_a_store_accepts(
    token, options, settings, from_loopback, from_elsewhere
):
    host = "127.0.0.1" if token is None else "0.0.0.0"
    settings = settings if token is None else {**settings, "ASYNCDIST_TOKEN": token}
    with started("--host", host, "--port", "0", *options, **settings) as daemon:
        assert accepts_c10d_clients("127.0.0.1", daemon.port, LIMIT) is from_loopback
        if from_elsewhere is not None and not is_loopback(outside := outward(Config())):
            assert accepts_c10d_clients(outside, daemon.port, LIMIT) is from_elsewhere


@pytest.mark.parametrize("source", ["options", pytest.param("environment", marks=pytest.mark.exhaustive)])
def test_tls_files_come_from_options_or_the_environment(source):
    files = {"cert": TLS / "member.crt", "key": TLS / "member.key", "ca": TLS / "ca.crt"}
    options, settings = [], {}
    for name, path in files.items():
        if source == "options":
            options += [f"--tls-{name}", str(path)]
        else:
            settings[f"ASYNCDIST_TLS_{name.upper()}"] = str(path)
    with started("--port", "0", *options, **settings) as daemon:
        port = ("--port", str(daemon.port))
        assert ended(*port, *options, "set", "k", "v", **settings).returncode == 0
        assert ended(*port, *options, "get", "k", **settings).stdout == "v\n"
        assert "the store requires TLS: set ASYNCDIST_TLS_CA" in asked(*port, "get", "k", code=2)


def test_impossible_address_is_refused_with_one_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"port {port} is in use" in refused("--port", str(port))
    assert "'no-such-host.invalid' does not resolve" in refused("--host", "no-such-host.invalid", "--port", "0")
    other_machine = refused("--host", "203.0.113.77", "--port", "0", ASYNCDIST_TOKEN="secret")
    assert "is not an address of this machine" in other_machine
    assert "set ASYNCDIST_TOKEN" in refused("--host", "0.0.0.0", "--port", "0")


@pytest.mark.exhaustive
def test_store_listens_at_a_socket_file(short_folder):
    path = short_folder / "store.sock"
    for _ in range(2):  # the second daemon finds the file of the first one, which was killed
        with started("--unix", str(path)) as daemon:
            assert daemon.ready == f"asyncdist store is ready at unix://{path} (no token required)\n"
            assert path.stat().st_mode & 0o777 == 0o600
            asked("--unix", str(path), "set", "k", "v")
            assert asked("get", "k", "--unix", str(path)) == "v\n"
    with started("--unix", str(path), "--port", "0") as daemon:
        asked("--unix", str(path), "set", "k", "v")
        assert daemon.ask("get", "k") == "v\n"
        assert daemon.stop() == (0, "")
    assert not path.exists()


def test_socket_file_may_have_a_relative_path(short_folder, monkeypatch):
    monkeypatch.chdir(short_folder)
    with started("--unix", "store.sock") as daemon:
        assert daemon.ready == f"asyncdist store is ready at unix://{short_folder}/store.sock (no token required)\n"
        asked("--unix", "store.sock", "set", "k", "v")
        assert asked("get", "k", "--unix", "./store.sock") == "v\n"


def test_store_that_cannot_start_leaves_no_socket_file(short_folder):
    kept, new = short_folder / "kept.sock", short_folder / "new.sock"
    with started("--port", "0", "--unix", str(kept), "--data", str(short_folder / "data")) as daemon:
        assert "another store uses" in refused("--unix", str(new), "--data", str(short_folder / "data"))
        assert not new.exists()
        assert "is in use" in refused("--unix", str(new), "--port", str(daemon.port))
        assert not new.exists()
        assert "another store listens at it" in refused("--unix", str(kept))
        assert kept.exists()


@contextlib.contextmanager
def activated(listening, *arguments, **settings):
    """Start a daemon as systemd does, with a socket that already listens."""
    fd = listening.fileno()
    program = (
        "import os, sys\n"
        f"if {fd} != 3: os.dup2({fd}, 3)\n"
        "os.environ['LISTEN_PID'] = str(os.getpid())\n"
        f"from asyncdist.cli import main; main(['store', *{arguments!r}], prog_name='asyncdist')"
    )
    with started(program=[sys.executable, "-c", program], fds=[fd], LISTEN_FDS="1", **settings) as daemon:
        yield daemon


def test_systemd_passes_the_socket_and_is_notified(short_folder):
    address = str(short_folder / "notify")
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notified.bind(address)
    notified.settimeout(LIMIT)
    with notified, socket.create_server(("127.0.0.1", 0)) as server, activated(server, NOTIFY_SOCKET=address) as daemon:
        assert daemon.port == server.getsockname()[1]
        assert notified.recv(100) == b"READY=1"
        with daemon.client() as store:
            assert store.add("n", 1) == 1
        daemon.process.send_signal(signal.SIGTERM)
        assert notified.recv(100) == b"STOPPING=1"
        assert daemon.end() == (0, "")


@only_linux
def test_every_port_is_on_the_host_of_the_socket_of_systemd():
    port = free_port()
    with (
        socket.create_server(("127.0.0.2", 0)) as server,
        activated(server, "--metrics-port", str(port)) as daemon,
        daemon.client() as store,
    ):
        assert (daemon.host, daemon.port) == server.getsockname()
        store.request(operations.acquire_lease("job/"))
        scoped_port = store.request(operations.command(operations.Op.OPEN_SCOPED_STORE, "job/"))
        socket.create_connection((daemon.host, scoped_port), LIMIT).close()
        assert fetch(port, "/healthz", daemon.host) == "ok\n"


def test_killed_store_recovers_its_data(tmp_path):
    data = str(tmp_path / "data")
    with started("--port", "0", "--data", data) as daemon, daemon.client() as store:
        store.set("k", "v")
        assert store.add("n", 41) == 41
        daemon.process.kill()
        daemon.process.wait()
    with started("--port", "0", "--data", data) as daemon, daemon.client() as store:
        assert store.get("k") == b"v"
        assert store.add("n", 1) == 42
    path = Path(data) / "log-1"
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    path.write_bytes(content)
    assert f"{path} is damaged at offset " in refused("--port", "0", "--data", data)


def test_full_disk_ends_the_daemon(tmp_path):
    def limit_file_size():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    with started("--port", "0", "--data", str(tmp_path), before=limit_file_size) as daemon:
        with daemon.client() as store:
            store.set("k", "acknowledged")
            with pytest.raises(StoreConnectionError):
                store.set("large", "v" * 10_000)
        code, error = daemon.end()
        assert code == 1
        assert "cannot be written" in error
    with started("--port", "0", "--data", str(tmp_path)) as daemon, daemon.client() as store:
        assert store.list_keys() == ["k"]


def fetch(port, path, host="127.0.0.1"):
    with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=LIMIT) as response:
        return response.read().decode()


def test_metrics_and_health_are_served_over_http(tmp_path):
    port = free_port()
    with (
        started("--port", "0", "--metrics-port", str(port), "--data", str(tmp_path)) as daemon,
        daemon.client() as store,
    ):
        for number in range(10):
            store.set(f"k{number}", "v")
        store.queue_push("q", "item")
        text = fetch(port, "/metrics")
        figures = {
            name.removeprefix("asyncdist_store_"): float(value)
            for name, value in (line.split() for line in text.splitlines() if not line.startswith("#"))
        }
        assert (figures["keys"], figures["queue_items"], figures["connections"]) == (10, 1, 1)
        assert figures["requests_total"] >= 11
        assert 11 <= figures["commits_total"] <= 12  # the client's session may be a commit of its own
        assert figures["stored_bytes"] > 11
        assert "# TYPE asyncdist_store_requests_total counter" in text
        assert "# HELP asyncdist_store_keys keys with a value" in text
        assert fetch(port, "/healthz") == "ok\n"
        with socket.create_connection(("127.0.0.1", port), LIMIT) as client, client.makefile("rb") as response:
            client.sendall(b"HEAD /healthz HTTP/1.1\r\n\r\n")
            head = response.read()
        assert b"\r\nContent-Length: 3\r\n" in head  # the length of the response to a GET
        assert head.endswith(b"\r\n\r\n")
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            fetch(port, "/")
        refused.value.close()
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(b"GET /metr")
            assert fetch(port, "/healthz") == "ok\n"  # the server does not wait for the silent client
        with socket.create_connection(("127.0.0.1", port)) as endless:
            endless.settimeout(LIMIT)
            with contextlib.suppress(ConnectionError):  # the server closes or resets the connection
                endless.sendall(b"GET /" + b"x" * 70_000)
                assert endless.recv(1000) == b""
        assert daemon.stop() == (0, "")


@only_linux
def test_metrics_are_served_on_every_interface_of_the_store():
    port = free_port()
    with started("--host", "", "--port", "0", "--metrics-port", str(port), ASYNCDIST_TOKEN="secret"):
        assert fetch(port, "/healthz", "127.0.0.2") == "ok\n"


def test_missing_prometheus_client_is_named():
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from asyncdist.cli import main; main(['store', '--port', '0', '--metrics-port', '0'], prog_name='asyncdist')"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT, env=environment(), check=False
    )
    assert run.returncode == 2
    assert "pip install prometheus-client" in run.stderr


def test_json_log_has_one_object_per_line():
    with started("--port", "0", "--log-format", "json", "--log-level", "info") as daemon:
        with socket.create_connection(("127.0.0.1", daemon.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" + b"\r\n" * 50)
            while stranger.recv(1000):
                pass
        code, log = daemon.stop()
        assert code == 0
        lines = [json.loads(line) for line in log.splitlines()]
        refused = next(line for line in lines if "refused" in line["message"])
        assert refused["level"] == "warning"
        assert refused["logger"].startswith("asyncdist.store")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", refused["time"])
        assert "speaks another protocol" in refused["message"]


DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
UNITS = [DEPLOY / f"asyncdist-store.{kind}" for kind in ("service", "socket")]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path):
    for unit in UNITS:  # the program of the unit is not installed here
        (tmp_path / unit.name).write_text(unit.read_text().replace("/usr/local/bin/asyncdist", sys.executable))
    verified = subprocess.run(
        ["systemd-analyze", "verify", *(str(tmp_path / unit.name) for unit in UNITS)],
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert (verified.returncode, verified.stderr) == (0, "")


def test_command_of_the_unit_starts_a_store(tmp_path):
    """The test changes only the ports and the folder of the command."""
    text = UNITS[0].read_text().replace("\\\n", " ")
    program, subcommand, *arguments = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1])
    assert (Path(program).name, subcommand) == ("asyncdist", "store")
    changed = {"29500": "0", "9529": "0", "/var/lib/asyncdist": str(tmp_path / "data")}
    with started(*(changed.get(each, each) for each in arguments), ASYNCDIST_TOKEN="secret") as daemon:
        with daemon.client("secret") as store:
            store.set("k", "v")
        assert daemon.stop()[0] == 0
    assert (tmp_path / "data" / "log-1").exists()
