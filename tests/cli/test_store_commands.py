"""``asyncdist store status|get|set|keys|watch``: the commands that query a running store."""

import contextlib
import json
import os
import re
import signal
import subprocess

import pytest

from tests.support.daemon import LIMIT, asked, command, environment, started
from tests.support.ports import free_port

pytestmark = pytest.mark.processes


def test_commands_query_a_running_store(tmp_path):
    with started("--port", "0", "--data", str(tmp_path), "--max-memory", "1M") as daemon:
        daemon.ask("set", "job/a", "ä value")
        daemon.ask("set", "job/b", "-", stdin="from standard input")
        assert daemon.ask("keys", "job/") == "job/a\njob/b\n"
        assert daemon.ask("get", "job/a") == "ä value\n"
        assert daemon.ask("get", "job/b", "--raw") == "from standard input"
        daemon.ask("set", "bytes", "\udcff")  # Python's text for a byte that is not UTF-8
        assert daemon.ask("get", "bytes") == "b'\\xff'\n"
        assert "no key 'c'" in daemon.ask("get", "c", code=1)
        assert "bytes and takes 1048576" in daemon.ask("set", "c", "-", stdin="v" * (1 << 20), code=2)
        status = json.loads(daemon.ask("status", "--json"))
        assert (status["keys"], status["connections"], status["data"]) == (3, 1, str(tmp_path))
        assert status["stored_bytes_limit"] == 1 << 20
        assert re.search(rf"^pid +{status['pid']}$(.|\n)*^keys +3$", daemon.ask("status"), re.MULTILINE)
        assert "--data applies only to serving" in asked("--data", str(tmp_path), "status", code=2)


def test_failed_reads_and_writes_of_standard_streams_are_reported():
    with started("--port", "0") as daemon, daemon.client() as store:
        store.set("k", b"v" * 100_000)

        def error(*arguments, **streams):
            run = subprocess.run(
                command("--port", str(daemon.port), *arguments),
                stderr=subprocess.PIPE, text=True, env=environment(), timeout=LIMIT, check=False, **streams,
            )  # fmt: skip
            assert run.returncode == 1, run
            return run.stderr

        with open("/dev/full", "wb") as full:
            for arguments in (("get", "k", "--raw"), ("keys",)):
                assert error(*arguments, stdout=full) == (
                    "Error: cannot write to the standard output: No space left on device\n"
                )
        closed = error("set", "k", "-", preexec_fn=lambda: os.close(0))
        assert closed.startswith("Error: the standard input is closed")


@contextlib.contextmanager
def watching(port, *arguments):
    """Run ``asyncdist store watch``; yield its output, and end it with Ctrl-C."""
    watch, pipe = command("--port", str(port), "watch", *arguments), subprocess.PIPE
    with subprocess.Popen(watch, stdout=pipe, stderr=pipe, text=True, env=environment(PYTHONUNBUFFERED="1")) as process:
        try:
            yield process.stdout
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT) == 130
            assert process.stderr.read() == "interrupted\n"
        finally:
            process.kill()


def test_watch_prints_values_and_deleted_keys():
    with started("--port", "0") as daemon, daemon.client() as store:
        store.set("job/a", "first")
        with watching(daemon.port, "job/") as output:
            assert output.readline() == "job/a = first\n"
            store.set("job/b", b"\xff")
            assert output.readline() == "job/b = b'\\xff'\n"
            store.delete_key("job/a")
            assert output.readline() == "job/a is gone\n"
            store.set("job/\x1b[2J\nc", "d")
            assert output.readline() == "'job/\\x1b[2J\\nc' = d\n"
            store.delete_key("job/\x1b[2J\nc")
            assert output.readline() == "'job/\\x1b[2J\\nc' is gone\n"


def test_watch_continues_after_a_restart_of_the_daemon(tmp_path):
    port = free_port()
    serving = ("--port", str(port), "--data", str(tmp_path))
    with contextlib.ExitStack() as stack:
        with started(*serving) as daemon:
            daemon.ask("set", "job/a", "1")
            output = stack.enter_context(watching(port, "job/"))
            assert output.readline() == "job/a = 1\n"
        stack.enter_context(started(*serving)).ask("set", "job/b", "2")
        assert output.readline() == "job/b = 2\n"


def test_watch_prints_messages_of_a_channel(until):
    with (
        started("--port", "0") as daemon,
        daemon.client() as store,
        watching(daemon.port, "news", "--channel") as output,
    ):
        until(lambda: store.publish("news", "a message"))
        assert output.readline() == "a message\n"


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_invalid_timeout_is_refused(seconds):
    assert "Invalid value for '--timeout'" in asked("get", "k", "--timeout", seconds, code=2)


def test_missing_store_is_reported():
    assert "no store answered" in asked("status", "--port", str(free_port()), "--timeout", "0.1", code=2)
