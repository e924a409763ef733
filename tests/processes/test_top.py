"""``asyncdist top`` on real processes: late, stopped, killed or busy; with and without the token."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncdist.cli import main
from tests.support.ports import free_port

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).parent / "program_watched.py"
CERTIFICATES = Path(__file__).parents[1] / "tls"


class Watched:
    """A world of processes, and the command that shows it."""

    def __init__(self, nursery, where, size, function="block", late=1, **environment):
        self.where = where
        self.ranks = [
            nursery.start(PROGRAM, function, where, rank, size, late, environment=environment) for rank in range(size)
        ]
        for rank in self.ranks:
            assert rank.hear() == "reduced"

    def top(self, *arguments, code=None, **environment):
        """Run the command and return its output."""
        run = CliRunner(env=environment).invoke(main, ["top", self.where, *map(str, arguments)])
        assert code is None or run.exit_code == code, run.output
        return run.output

    def status(self, *arguments, code=None):
        return json.loads(self.top("--json", "--once", *arguments, code=code))

    def eventually(self, until, holds, *arguments):
        """Ask until the ranks are in a state, and return the status."""
        found = []

        def shown():
            found[:] = [self.status(*arguments)]
            return holds({row["rank"]: row for row in found[0]["ranks"]})

        until(shown)
        return found[0]

    def end(self, late):
        """Let the late rank go on, and the ranks end."""
        self.ranks[late].say("go on")
        for rank in self.ranks:
            assert rank.hear() == "done"
            rank.say("end")
        assert [rank.wait() for rank in self.ranks] == [0] * len(self.ranks)


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.exhaustive)])
def test_late_stopped_and_killed_rank(nursery, tmp_path, until, transport):
    world = Watched(nursery, f"file://{tmp_path}/world", 3, ASYNCDIST_TRANSPORT=transport, ASYNCDIST_HEARTBEAT="0")
    status = world.eventually(until, lambda ranks: ranks[0]["state"] == ranks[2]["state"] == "pending", "--late", 0)
    late, *waiting = (status["ranks"][rank] for rank in (1, 0, 2))
    assert (late["state"], late["waited_for_by"], late["culprit"]) == ("idle", [0, 2], True)
    for row in waiting:
        assert (row["operation"], row["number"], row["waits_for"]) == ("all_reduce", 4, [1])
        assert row["pid"] == world.ranks[row["rank"]].pid
    assert world.status("--late", 1000, code=0)["healthy"]
    shown = world.top("--late", 0, code=1)
    assert "▶ 1" in shown
    assert "rank 1 has not called it: the other ranks wait for it." in shown

    text = world.top("--stacks", 1, "--stacks", 0, code=0)
    assert "test.recv()  # the rank is late here" in text
    assert "dist.all_reduce(torch.ones(1000))  # the others wait here" in text
    stacks = json.loads(world.top("--stacks", "all", "--json"))
    assert [row["stacks"][0]["name"] for row in stacks["ranks"]] == ["MainThread"] * 3

    # Rank 0 serves the store of a job at tcp://. Here any rank answers for all.
    world.ranks[0].stop()
    status = world.status(code=1)
    assert (status["ranks"][0]["state"], status["ranks"][0]["reason"]) == ("silent", "its process is stopped")
    assert status["answered_by"] in (1, 2)
    text = world.top("--stacks", 0, code=1)
    assert "no stacks: its process is stopped" in text
    assert "py-spy dump" in text
    world.ranks[0].resume()
    world.eventually(until, lambda ranks: ranks[0]["state"] == "pending")

    world.ranks[2].kill()
    world.ranks[2].wait()
    status = world.eventually(until, lambda ranks: ranks[0]["state"] == "failed")
    assert status["ranks"][2]["state"] == "lost"
    assert status["ranks"][2]["culprit"]
    assert "lost" in status["ranks"][0]["reason"] or "connection" in status["ranks"][0]["reason"]
    world.ranks[1].say("go on")
    for rank in world.ranks[:2]:
        assert rank.hear() == "done"
        rank.say("end")
    for rank in world.ranks[:2]:
        assert rank.wait() == 0


def test_rank_whose_event_loop_is_blocked_answers_and_shows_its_tasks(nursery, tmp_path, until):
    world = Watched(nursery, f"file://{tmp_path}/world", 2, "compute_in_the_loop")
    status = world.eventually(until, lambda ranks: ranks[0]["state"] == "pending")
    assert [row["state"] for row in status["ranks"]] == ["pending", "idle"]
    blocked, waiting = world.top("--stacks", 1), world.top("--stacks", 0)
    assert "test.recv()  # the loop is blocked here" in blocked
    assert "task waiter:" in waiting
    assert "await awaited.all_reduce(torch.ones(1000))  # the task waits here" in waiting
    world.ranks[1].say("go on")
    assert [rank.wait() for rank in world.ranks] == [0, 0]


def test_only_holders_of_the_token_see_the_job(nursery):
    where = f"tcp://127.0.0.1:{free_port()}"
    world = Watched(nursery, where, 2, late=0, ASYNCDIST_TOKEN="secret")
    world.where = where.removeprefix("tcp://")
    for wrong in ({}, {"ASYNCDIST_TOKEN": "guess"}):
        output = world.top("--stacks", "all", code=2, **wrong)
        assert "token" in output
        assert "test.recv()" not in output
    assert "test.recv()" in world.top("--stacks", "all", code=0, ASYNCDIST_TOKEN="secret")
    world.end(0)


@pytest.mark.exhaustive
def test_live_view_refreshes_in_a_terminal_until_it_is_interrupted(nursery, tmp_path):
    world = Watched(nursery, f"file://{tmp_path}/world", 2)
    command = [sys.executable, "-m", "asyncdist.cli", "top", world.where, "--interval", "0.2"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as viewer:
        os.close(theirs)
        shown = b""
        while shown.count(b"generation") < 3 or b"rank 1 has not called it" not in shown:
            assert select.select([ours], [], [], 60.0)[0], shown
            shown += os.read(ours, 1 << 16)
        viewer.send_signal(signal.SIGINT)
        # The end of the terminal is an error on Linux.
        with contextlib.suppress(OSError):
            while more := os.read(ours, 1 << 16):
                shown += more
        os.close(ours)
        assert viewer.wait() == 0
    assert b"Traceback" not in shown
    world.end(1)


@pytest.mark.exhaustive
def test_ranks_with_certificates_answer_only_inside_tls(nursery, tmp_path):
    files = {"CERT": "member.crt", "KEY": "member.key", "CA": "ca.crt"}
    certificates = {f"ASYNCDIST_TLS_{name}": str(CERTIFICATES / file) for name, file in files.items()}
    certificates["ASYNCDIST_TLS_CHECK_HOSTNAME"] = "0"
    world = Watched(nursery, f"file://{tmp_path}/world", 2, late=0, **certificates)
    strangers = {"ASYNCDIST_TLS_CERT": "stranger.crt", "ASYNCDIST_TLS_KEY": "stranger.key"}
    stranger = {name: str(CERTIFICATES / file) for name, file in strangers.items()}
    for settings in ({}, certificates | stranger):
        assert "no rank of the job" in world.top(code=2, **settings)
    assert "answered by rank" in world.top(code=0, **certificates)
    world.end(0)


@pytest.mark.exhaustive
def test_rank_that_holds_its_interpreter_is_silent(nursery, tmp_path):
    world = Watched(nursery, f"file://{tmp_path}/world", 2, "hold_the_interpreter", ASYNCDIST_HEARTBEAT="0")
    status = world.status(code=1)
    assert status["ranks"][1]["state"] == "silent"
    assert status["ranks"][1]["reason"].startswith("a call in it ")
    assert "no stacks: a call in it " in world.top("--stacks", 1, code=1)
