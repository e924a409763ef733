"""Ctrl-C in a plain program, which nothing forks, prints lines of the program only."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.ports import free_port

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).with_name("program_interrupted.py")
NOTE = "frames of asyncdist and asyncio are left out: ASYNCDIST_DEBUG=1 shows them"


@pytest.fixture
def start(monkeypatch):
    monkeypatch.delenv("ASYNCDIST_DEBUG", raising=False)
    with contextlib.ExitStack() as ending:

        def start(*command, **environment):
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment,
            )  # fmt: skip
            ending.enter_context(process)
            ending.callback(process.kill)
            return process

        yield start


def interrupted(processes, ready=1):
    """Interrupt processes that have said ``ready`` so often; return what each wrote on its standard error."""
    for process in processes:
        said = 0
        while said < ready:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            said += line.count("ready")
    # Nothing shows from outside that the call after that line waits.
    time.sleep(0.2)
    for process in processes:
        process.send_signal(signal.SIGINT)
    return [process.communicate(timeout=60.0)[1] for process in processes]


def check_short(text):
    """One traceback of the program's own lines, the last of which is the call that waited."""
    lines = text.splitlines()
    own = [line for line in lines if line.startswith("  File ")]
    assert all(str(PROGRAM) in line for line in own), text
    assert len(own) == 2, text
    assert "# here it waits" in lines[lines.index(own[-1]) + 1]
    # Python underlines the call in the program's line.
    assert [line for line in lines if not re.fullmatch(r"[\s^~]+", line)][-2:] == ["KeyboardInterrupt", NOTE]
    assert len(lines) <= 9


def is_listening(port):
    """Return whether a process listens at a port, without a connection that the process would log."""
    sockets = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return any(each[1].endswith(f":{port:04X}") and each[3] == "0A" for each in sockets)


KINDS = ["blocking", "awaited"]
FACES = pytest.mark.parametrize("kind", KINDS)


def world(size):
    """Return the variables of each rank of a world, as a launcher sets them."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    return [address | {"RANK": str(rank)} for rank in range(size)]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_interrupt_of_ranks_shows_the_lines_where_they_waited(start, size):
    """The ranks with an even number use the blocking API, the others the awaited one."""
    processes = [start(PROGRAM, KINDS[rank % 2], "message", **variables) for rank, variables in enumerate(world(size))]
    for process, text in zip(processes, interrupted(processes), strict=True):
        check_short(text)
        assert process.returncode == -signal.SIGINT


@pytest.mark.exhaustive
@FACES
def test_interrupt_of_one_rank_at_the_start_shows_the_line_where_it_waited(start, until, kind):
    variables = world(2)[0]
    process = start(PROGRAM, kind, "start", **variables)
    # An import in another thread would take the exit status of Ctrl-C from Python.
    until(lambda: is_listening(int(variables["MASTER_PORT"])))
    check_short(*interrupted([process]))
    assert process.returncode == -signal.SIGINT


@pytest.mark.exhaustive
@FACES
def test_interrupt_of_torchrun_adds_two_lines_of_each_rank(start, kind):
    """torchrun, whose own traceback follows, sends the ranks the SIGINT that a terminal sends them, too."""
    process = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", PROGRAM, kind, "message")
    (text,) = interrupted([process], ready=2)
    assert text.count(NOTE) == 2, text
    assert text.count(f'File "{PROGRAM}"') == 4, text
    assert "asyncdist/" not in text.replace(str(PROGRAM), ""), text


@pytest.mark.exhaustive
def test_interrupt_with_the_debug_setting_shows_all_frames(start):
    process = start(PROGRAM, "blocking", "start", ASYNCDIST_DEBUG="1", **world(2)[0])
    (text,) = interrupted([process])
    assert "background_loop.py" in text
    assert NOTE not in text
