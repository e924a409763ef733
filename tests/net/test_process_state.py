"""What a process of the same host does, as its peers see it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from asyncdist.net.process_identity import ProcessState, process_identity
from asyncdist.net.process_identity import process_state as state_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has /proc")


def process_state(pid):
    own = process_identity()
    return state_of({**own, "pid": pid}, own)


def program(test, what):
    """Sleep, or compute, after the test has been told."""
    test.send(what)
    while what == "compute":
        pass
    test.recv()


def test_process_that_computes_works_and_one_that_sleeps_or_is_stopped_does_not(nursery, until):
    computing, sleeping = (nursery.start(__file__, "program", what) for what in ("compute", "sleep"))
    assert [computing.hear(), sleeping.hear()] == ["compute", "sleep"]
    until(lambda: process_state(computing.pid).is_working)
    until(lambda: process_state(sleeping.pid) == ProcessState(text="a call in it holds the interpreter"))
    computing.stop()
    until(lambda: process_state(computing.pid) == ProcessState(text="its process is stopped"))
    computing.resume()
    until(lambda: process_state(computing.pid).is_working)


def test_process_that_has_ended_and_one_that_cannot_be_seen_have_no_state():
    own = process_identity()
    assert state_of(own, own) is None
    assert state_of({**own, "pid": 1, "pids": "elsewhere"}, own) is None
    assert state_of(None, own) is state_of(own, None) is None
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert process_state(ended.pid) is None


@pytest.mark.skipif(shutil.which("gdb") is None, reason="no gdb on this machine")
@pytest.mark.exhaustive
def test_process_in_a_debugger_is_traced(nursery, until):
    rank = nursery.start(__file__, "program", "sleep")
    rank.hear()
    command = ["gdb", "--nx", "--quiet", "-iex", "set debuginfod enabled off", "-p", str(rank.pid)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "HOME": "/"},
    ) as debugger:
        try:
            said = b""
            while b"(gdb)" not in said:
                part = os.read(debugger.stdout.fileno(), 4096)
                assert part, said
                said += part
            if b"ptrace: Operation not permitted" in said or b"Could not attach" in said:
                pytest.skip("no debugger may attach here")
            assert process_state(rank.pid).is_traced
        finally:
            debugger.kill()
    until(lambda: not process_state(rank.pid).is_traced)
