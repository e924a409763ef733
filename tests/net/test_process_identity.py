"""What a process of the same host does, and whether it has ended, as its peers see it."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from asyncdist.net.process_identity import ProcessState, has_ended, process_identity, process_state

pytestmark = pytest.mark.skipif(process_identity() is None, reason="this system has no /proc")


def program(test, what):
    """Tell the test its identity, and then sleep or compute."""
    test.send(process_identity())
    while what == "compute":
        pass
    test.recv()


def state_of(identity):
    return process_state(identity, process_identity())


def test_process_that_computes_works_and_one_that_sleeps_is_stopped_or_was_killed_does_not(nursery, until):
    own = process_identity()
    computing, sleeping = (nursery.start(__file__, "program", what) for what in ("compute", "sleep"))
    identity, other = computing.hear(), sleeping.hear()
    until(lambda: state_of(identity).is_working)
    until(lambda: state_of(other) == ProcessState(text="a call in it holds the interpreter"))
    computing.stop()
    until(lambda: state_of(identity) == ProcessState(text="its process is stopped"))
    computing.resume()
    until(lambda: state_of(identity).is_working)
    assert not has_ended(identity, own)
    computing.kill()
    # Also before its parent asks for its status.
    until(lambda: has_ended(identity, own))
    computing.wait()
    assert has_ended(identity, own)


def test_process_that_has_ended_and_one_that_cannot_be_seen_have_no_state():
    own = process_identity()
    assert state_of(own) is None
    assert state_of({**own, "pid": 1, "pids": "elsewhere"}) is None
    assert state_of(None) is process_state(own, None) is None
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert state_of({**own, "pid": ended.pid}) is None


def test_number_that_another_process_has_now_is_not_taken_for_the_process():
    own = process_identity()
    assert not has_ended(own, own)
    assert has_ended({**own, "started": own["started"] - 1}, own)


@pytest.mark.parametrize("key", ["host", "pids"])
def test_process_that_cannot_be_seen_is_not_known_to_have_ended(key):
    own = process_identity()
    elsewhere = {**own, key: "another", "pid": 0}
    assert not has_ended(elsewhere, own)
    assert not has_ended(None, own)
    assert not has_ended(own, None)


def test_processes_of_hosts_with_different_names_do_not_see_each_other():
    own, other = process_identity("one"), process_identity("two")
    assert not has_ended(other | {"pid": 1 << 22}, own)
    assert has_ended(own | {"pid": 1 << 22}, own)


@pytest.mark.skipif(shutil.which("gdb") is None, reason="no gdb on this machine")
@pytest.mark.exhaustive
def test_process_in_a_debugger_is_traced(nursery, until):
    rank = nursery.start(__file__, "program", "sleep")
    identity = rank.hear()
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
            assert state_of(identity).is_traced
        finally:
            debugger.kill()
    until(lambda: not state_of(identity).is_traced)
