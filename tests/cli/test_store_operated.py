"""The store daemon in operation: its addresses, data, commands and metrics, and its end."""

from __future__ import annotations

import contextlib
import json
import os
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
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncdist.base.network import is_loopback
from asyncdist.config import Config
from asyncdist.errors import StoreConnectionError
from asyncdist.rendezvous.addresses import outward
from asyncdist.store.client.c10d_probe import accepts_c10d_clients
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.c10d import MAGIC, Code
from tests.support.c10d_peer import encode
from tests.support.daemon import LIMIT, Daemon, asked, command, ended, environment, started
from tests.support.ports import free_port

pytestmark = pytest.mark.processes
TLS = Path(__file__).parents[1] / "tls"


# -- who may connect --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "settings", "from_loopback", "from_elsewhere"),
    [
        ((), {}, False, False),
        (("--c10d", "off"), {}, False, False),
        (("--c10d", "loopback"), {}, True, False),
        (("--c10d", "any"), {}, True, True),
        ((), {"ASYNCDIST_STORE_C10D": "any"}, True, True),
        (("--c10d", "off"), {"ASYNCDIST_STORE_C10D": "any"}, False, False),
        (("--allow-unauthenticated-c10d",), {}, True, True),
    ],
)
def test_c10d_option_selects_which_torch_clients_a_store_with_a_token_accepts(
    options, settings, from_loopback, from_elsewhere
):
    with started("--host", "0.0.0.0", "--port", "0", *options, ASYNCDIST_TOKEN="secret", **settings) as daemon:
        assert accepts_c10d_clients("127.0.0.1", daemon.port, LIMIT) is from_loopback
        if not is_loopback(outside := outward(Config())):
            assert accepts_c10d_clients(outside, daemon.port, LIMIT) is from_elsewhere


def test_store_without_a_token_accepts_torch_clients_unless_c10d_is_off():
    for options, accepted in (((), True), (("--c10d", "off"), False)):
        with started("--port", "0", *options) as daemon:
            assert accepts_c10d_clients("127.0.0.1", daemon.port, LIMIT) is accepted
    assert "'sometimes' is not one of 'off', 'loopback', 'any'" in asked("--c10d", "sometimes", code=2)


# -- asking -----------------------------------------------------------------------------------------


def test_one_that_runs_is_asked(tmp_path):
    with started("--port", "0", "--data", str(tmp_path), "--max-memory", "1M") as daemon:
        daemon.ask("set", "job/a", "ä value")
        daemon.ask("set", "job/b", "-", stdin="from standard input")
        assert daemon.ask("keys", "job/") == "job/a\njob/b\n"
        assert daemon.ask("keys", "other") == ""
        assert daemon.ask("get", "job/a") == "ä value\n"
        assert daemon.ask("get", "job/b", "--raw") == "from standard input"
        daemon.ask("set", "bytes", "\udcff")  # what Python makes of a byte that is no text
        assert daemon.ask("get", "bytes") == "b'\\xff'\n"
        assert "no key 'c'" in daemon.ask("get", "c", code=1)
        assert "bytes and takes 1048576" in daemon.ask("set", "c", "-", stdin="v" * (1 << 20), code=2)
        status = json.loads(daemon.ask("status", "--json"))
        assert status["keys"] == 3
        assert status["connections"] == 1
        assert status["data"] == str(tmp_path)
        assert status["stored_bytes_limit"] == 1 << 20
        assert re.search(r"^keys +3$", daemon.ask("status"), re.MULTILINE)
        assert "--data applies only to serving" in asked("--data", str(tmp_path), "status", code=2)


@pytest.mark.parametrize("told_by", ["options", "environment"])
def test_tls(told_by):
    files = {"cert": TLS / "member.crt", "key": TLS / "member.key", "ca": TLS / "ca.crt"}
    options = [word for name, path in files.items() for word in (f"--tls-{name}", str(path))]
    settings = {f"ASYNCDIST_TLS_{name.upper()}": str(path) for name, path in files.items()}
    if told_by == "options":
        settings = {}
    else:
        options = []
    with started("--port", "0", *options, **settings) as daemon:

        def ask(*arguments, **known):
            return ended("--port", str(daemon.port), *arguments, **known)

        assert ask(*options, "set", "k", "v", **settings).returncode == 0
        assert ask(*options, "get", "k", **settings).stdout == "v\n"
        plain = ask("get", "k")
        assert plain.returncode == 2
        assert "the store requires TLS: set ASYNCDIST_TLS_CA" in plain.stderr


def test_where_an_answer_cannot_be_written_or_a_value_not_read_it_says_so():
    with started("--port", "0") as daemon, daemon.client() as store:
        store.set("k", b"v" * 100_000)

        def complaint(*arguments, **streams):
            asking = command("--port", str(daemon.port), *arguments)
            done = subprocess.run(
                asking, stderr=subprocess.PIPE, text=True, env=environment(), timeout=LIMIT, check=False, **streams
            )
            assert done.returncode == 1, done
            return done.stderr

        with open("/dev/full", "wb") as full:
            for question in (("get", "k", "--raw"), ("keys",)):
                assert complaint(*question, stdout=full) == (
                    "Error: cannot write to the standard output: No space left on device\n"
                )
        closed = complaint("set", "k", "-", preexec_fn=lambda: os.close(0))
        assert closed.startswith("Error: the standard input is closed")


def test_keys_are_watched():
    with started("--port", "0") as daemon, daemon.client() as store:
        store.set("job/a", "first")
        watching = subprocess.Popen(
            command("--port", str(daemon.port), "watch", "job/"),
            stdout=subprocess.PIPE, text=True, env=environment(PYTHONUNBUFFERED="1"),
        )  # fmt: skip
        with watching:
            assert watching.stdout.readline() == "job/a = first\n"
            store.set("job/a", "second")
            assert watching.stdout.readline() == "job/a = second\n"
            store.set("job/b", b"\xff")
            assert watching.stdout.readline() == "job/b = b'\\xff'\n"
            store.delete_key("job/a")
            assert watching.stdout.readline() == "job/a is gone\n"
            store.set("job/\x1b[2J\nc", "d")
            assert watching.stdout.readline() == "'job/\\x1b[2J\\nc' = d\n"
            store.delete_key("job/\x1b[2J\nc")
            assert watching.stdout.readline() == "'job/\\x1b[2J\\nc' is gone\n"
            watching.send_signal(signal.SIGINT)
            assert watching.wait(LIMIT) == 130


def test_keys_are_watched_through_the_end_of_a_daemon(tmp_path):
    data, port = ("--data", str(tmp_path)), str(free_port())
    with started("--port", port, *data) as daemon:
        daemon.ask("set", "job/a", "1")
        watching = subprocess.Popen(
            command("--port", port, "watch", "job/"),
            stdout=subprocess.PIPE, text=True, env=environment(PYTHONUNBUFFERED="1"),
        )  # fmt: skip
        assert watching.stdout.readline() == "job/a = 1\n"
        daemon.process.kill()
        daemon.process.wait(LIMIT)
    with watching, started("--port", port, *data) as daemon:
        daemon.ask("set", "job/b", "2")
        assert watching.stdout.readline() == "job/b = 2\n"
        watching.send_signal(signal.SIGINT)
        assert watching.wait(LIMIT) == 130


def test_messages_of_a_channel_are_printed(until):
    with started("--port", "0") as daemon, daemon.client() as store:
        watching = subprocess.Popen(
            command("--port", str(daemon.port), "watch", "news", "--channel"),
            stdout=subprocess.PIPE, text=True, env=environment(PYTHONUNBUFFERED="1"),
        )  # fmt: skip
        with watching:
            until(lambda: store.publish("news", "heard"))
            assert watching.stdout.readline() == "heard\n"
            watching.send_signal(signal.SIGINT)
            assert watching.wait(LIMIT) == 130


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_a_timeout_that_is_none(seconds):
    assert "Invalid value for '--timeout'" in asked("get", "k", "--timeout", seconds, code=2)


def test_none_that_runs():
    assert "no store answered" in asked("status", "--port", str(free_port()), "--timeout", "0.1", code=2)


# -- where it listens -------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_socket_file(short_folder):
    path = short_folder / "store.sock"
    for _ in range(2):  # the second finds the file of one that was killed
        with started("--unix", str(path)) as daemon:
            assert daemon.ready == f"asyncdist store is ready at unix://{path} (no token required)\n"
            assert path.stat().st_mode & 0o777 == 0o600
            asked("--unix", str(path), "set", "k", "v")
            assert asked("get", "k", "--unix", str(path)) == "v\n"
    with started("--unix", str(path), "--port", "0") as daemon:
        asked("--unix", str(path), "set", "k", "v")
        assert daemon.ask("get", "k") == "v\n"
        assert "another store listens at it" in asked("--unix", str(path), code=2)
        assert daemon.stop() == (0, "")
    assert not path.exists()


def test_a_socket_file_of_this_folder(short_folder, monkeypatch):
    monkeypatch.chdir(short_folder)
    with started("--unix", "store.sock") as daemon:
        assert daemon.ready == f"asyncdist store is ready at unix://{short_folder}/store.sock (no token required)\n"
        asked("--unix", "store.sock", "set", "k", "v")
        assert asked("get", "k", "--unix", "./store.sock") == "v\n"


def test_one_that_cannot_start_leaves_no_socket_file(short_folder):
    kept, new = short_folder / "kept.sock", short_folder / "new.sock"
    with started("--port", "0", "--unix", str(kept), "--data", str(short_folder / "data")) as daemon:
        assert "another store uses" in asked("--unix", str(new), "--data", str(short_folder / "data"), code=2)
        assert not new.exists()
        assert "is in use" in asked("--unix", str(new), "--port", str(daemon.port), code=2)
        assert not new.exists()
        assert "another store listens at it" in asked("--unix", str(kept), code=2)
        assert kept.exists()


@contextlib.contextmanager
def activated(listening: socket.socket, *arguments: str, **settings: str) -> Iterator[Daemon]:
    """Start a daemon as systemd does, with a socket that listens already."""
    fd = listening.fileno()
    program = (
        "import os, sys\n"
        f"if {fd} != 3: os.dup2({fd}, 3)\n"
        "os.environ['LISTEN_PID'] = str(os.getpid())\n"
        f"from asyncdist.cli import main; main(['store', *{arguments!r}], prog_name='asyncdist')"
    )
    with started(program=[sys.executable, "-c", program], fds=[fd], LISTEN_FDS="1", **settings) as daemon:
        yield daemon


def test_systemd_opens_the_socket_and_is_told(short_folder):
    notify = str(short_folder / "notify")
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(notify)
    told.settimeout(LIMIT)
    with told, socket.create_server(("127.0.0.1", 0)) as ours, activated(ours, NOTIFY_SOCKET=notify) as daemon:
        assert daemon.port == ours.getsockname()[1]
        assert told.recv(100) == b"READY=1"
        with daemon.client() as store:
            assert store.add("n", 1) == 1
        daemon.process.send_signal(signal.SIGTERM)
        assert told.recv(100) == b"STOPPING=1"
        assert daemon.end() == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.1 is the only address of its kind")
def test_all_of_it_is_where_systemds_socket_is():
    port = free_port()
    with (
        socket.create_server(("127.0.0.2", 0)) as ours,
        activated(ours, "--metrics-port", str(port)) as daemon,
        daemon.client() as store,
    ):
        assert (daemon.host, daemon.port) == ours.getsockname()
        store.request(operations.acquire_lease("job/"))
        scoped_port = store.request(operations.open_scoped_store("job/"))
        socket.create_connection((daemon.host, scoped_port), LIMIT).close()
        assert fetched(port, "/healthz", daemon.host) == "ok\n"


# -- what it keeps, and how it ends -----------------------------------------------------------------


def test_it_is_killed_and_comes_back_with_what_it_had(tmp_path):
    data = str(tmp_path / "data")
    with started("--port", "0", "--data", data) as daemon:
        with daemon.client() as store:
            store.set("k", "v")
            assert store.add("n", 41) == 41
        assert "another store uses" in asked("--port", "0", "--data", data, code=2)
        daemon.process.kill()
        daemon.process.wait()
    with started("--port", "0", "--data", data) as daemon, daemon.client() as store:
        assert store.get("k") == b"v"
        assert store.add("n", 1) == 42
    path = Path(data) / "log-1"
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    path.write_bytes(content)
    assert f"{path} is damaged at offset " in asked("--port", "0", "--data", data, code=2)


def test_a_disk_that_is_full_ends_it(tmp_path):
    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    with started("--port", "0", "--data", str(tmp_path), before=small) as daemon:
        with daemon.client() as store:
            store.set("k", "acknowledged")
            with pytest.raises(StoreConnectionError):
                store.set("large", "v" * 10_000)
        code, err = daemon.end()
        assert code == 1
        assert "cannot be written" in err
    with started("--port", "0", "--data", str(tmp_path)) as daemon, daemon.client() as store:
        assert store.list_keys() == ["k"]


def test_told_twice_it_leaves_at_once():
    with (
        started("--port", "0", "--drain", "1000") as daemon,
        socket.create_connection(("127.0.0.1", daemon.port)) as deaf,
    ):
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with daemon.client() as store:
            store.set("large", b"v" * (32 << 20))
        deaf.sendall(encode(Code.VALIDATE, MAGIC) + encode(Code.GET, b"/large"))
        assert deaf.recv(1)
        daemon.process.send_signal(signal.SIGTERM)
        refused = False
        while not refused:
            with socket.socket() as probe:
                refused = probe.connect_ex(("127.0.0.1", daemon.port)) != 0
        assert daemon.process.poll() is None  # it tries to send what is due
        assert daemon.stop() == (0, "")


# -- how it is watched ------------------------------------------------------------------------------


def fetched(port: int, path: str, host: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=LIMIT) as answer:
        return answer.read().decode()


def test_prometheus_reads_figures(tmp_path):
    port = free_port()
    with (
        started("--port", "0", "--metrics-port", str(port), "--data", str(tmp_path)) as daemon,
        daemon.client() as store,
    ):
        for number in range(10):
            store.set(f"k{number}", "v")
        store.queue_push("q", "item")
        text = fetched(port, "/metrics")
        figures = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
        assert float(figures["asyncdist_store_keys"]) == 10
        assert float(figures["asyncdist_store_queue_items"]) == 1
        assert float(figures["asyncdist_store_connections"]) == 1
        assert float(figures["asyncdist_store_requests_total"]) >= 11
        assert 11 <= float(figures["asyncdist_store_commits_total"]) <= 12  # that the client came may be one of its own
        assert float(figures["asyncdist_store_stored_bytes"]) > 11
        assert "# TYPE asyncdist_store_requests_total counter" in text
        assert "# HELP asyncdist_store_keys keys with a value" in text
        assert fetched(port, "/healthz") == "ok\n"
        with socket.create_connection(("127.0.0.1", port), LIMIT) as asking, asking.makefile("rb") as answer:
            asking.sendall(b"HEAD /healthz HTTP/1.1\r\n\r\n")
            head = answer.read()
        assert b"\r\nContent-Length: 3\r\n" in head  # of what a GET gets
        assert head.endswith(b"\r\n\r\n")
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            fetched(port, "/")
        refused.value.close()
        with socket.create_connection(("127.0.0.1", port)) as silent:  # the server does not wait for it
            silent.sendall(b"GET /metr")
            assert fetched(port, "/healthz") == "ok\n"
        with socket.create_connection(("127.0.0.1", port)) as endless:
            endless.settimeout(LIMIT)
            with contextlib.suppress(ConnectionError):  # it hangs up, in one way or the other
                endless.sendall(b"GET /" + b"x" * 70_000)
                assert endless.recv(1000) == b""
        assert daemon.stop() == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.1 is the only address of its kind")
def test_figures_are_given_wherever_the_store_listens():
    port = free_port()
    with started("--host", "", "--port", "0", "--metrics-port", str(port), ASYNCDIST_TOKEN="secret"):
        assert fetched(port, "/healthz", "127.0.0.2") == "ok\n"


def test_without_prometheus_client_it_says_what_to_install():
    hidden = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from asyncdist.cli import main; main(['store', '--port', '0', '--metrics-port', '0'], prog_name='asyncdist')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", hidden], capture_output=True, text=True, timeout=LIMIT, env=environment(), check=False
    )
    assert ended.returncode == 2
    assert "pip install 'asyncdist[metrics]'" in ended.stderr


def test_its_log_is_for_machines():
    with started("--port", "0", "--log-format", "json", "--log-level", "info") as daemon:
        with socket.create_connection(("127.0.0.1", daemon.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" + b"\r\n" * 50)
            while stranger.recv(1000):
                pass
        code, err = daemon.stop()
        assert code == 0
        lines = [json.loads(line) for line in err.splitlines()]
        refused = next(line for line in lines if "refused" in line["message"])
        assert refused["level"] == "warning"
        assert refused["logger"].startswith("asyncdist.store")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", refused["time"])
        assert "speaks another protocol" in refused["message"]


# -- how it is deployed -----------------------------------------------------------------------------

UNITS = [
    Path(__file__).parents[2] / "examples" / "deploy" / f"asyncdist-store.{kind}" for kind in ("service", "socket")
]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_takes_the_units(tmp_path):
    for unit in UNITS:  # the program is not where the unit has it
        (tmp_path / unit.name).write_text(unit.read_text().replace("/usr/local/bin/asyncdist", sys.executable))
    verified = subprocess.run(
        ["systemd-analyze", "verify", *(str(tmp_path / unit.name) for unit in UNITS)],
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert (verified.returncode, verified.stderr) == (0, "")


def test_what_the_unit_starts(tmp_path):
    """All of its command is real, but for where it listens and writes."""
    text = UNITS[0].read_text().replace("\\\n", " ")
    program, subcommand, *arguments = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1])
    assert (Path(program).name, subcommand) == ("asyncdist", "store")
    elsewhere = {"29500": "0", "9529": "0", "/var/lib/asyncdist": str(tmp_path / "data")}
    with started(*(elsewhere.get(each, each) for each in arguments), ASYNCDIST_TOKEN="secret") as daemon:
        with daemon.client("secret") as store:
            store.set("k", "v")
        assert daemon.stop()[0] == 0
    assert (tmp_path / "data" / "log-1").exists()
