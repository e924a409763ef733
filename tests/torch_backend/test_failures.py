"""Failures: peers that die, leave or never arrive, user mistakes, and process exit.

Every surviving rank raises an asyncdist error that names the rank and the operation. Every process exits without help,
with the status of a program that did not crash.
"""

import itertools
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent


@pytest.fixture
def start(start_world, transport):
    """Fork the ranks of a world that run a function of the program: ``start(world, function, *arguments)``."""

    def start(world, function, *arguments, ranks=None):
        return start_world(
            "programs_failures.py", function, world, *arguments, ranks=ranks, ASYNCDIST_TRANSPORT=transport
        )

    return start


def mostly(transport):
    """Leave the ranks with the other transport to the exhaustive tests: the transport matters little."""
    other = pytest.param({"shm": "tcp", "tcp": "shm"}[transport], marks=pytest.mark.exhaustive)
    return pytest.mark.parametrize("transport", [transport, other])


def check_failed(rank, kind, *words):
    """Check the failure that a rank sends: a class among those of the exception, and what its message contains."""
    kinds, text = rank.hear()
    assert kind in kinds, text
    assert all(word in text for word in words), text


DYING = {
    "ddp": ("dies_in_backward", {}),
    "unused parameters": ("dies_in_backward", {"find_unused_parameters": True}),
    "static graph": ("dies_in_backward", {"static_graph": True}),
    "views": ("dies_in_backward", {"gradient_as_bucket_view": True}),
    "fsdp": ("dies_in_backward_of_fsdp", {}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", DYING)
def test_peer_death_during_backward_is_raised(start, ended, what, world):
    program, options = DYING[what]
    *survivors, victim = start(world, program, options)
    ended(victim, status=-signal.SIGKILL)
    for rank in survivors:
        check_failed(rank, "RuntimeError", f"rank {world - 1} was lost")
        check_failed(rank, "GroupError")


def test_peer_death_fails_every_waiting_call(start):
    *survivors, victim = start(3, "dies")
    assert [rank.hear() for rank in (*survivors, victim)] == ["waiting", "waiting", "here"]
    victim.kill()
    for rank in survivors:
        told = dict(rank.hear() for _ in range(9))
        assert len(told) == 9
        for call, (kinds, text) in told.items():
            assert ("RuntimeError" if call == "future" else "PeerLostError") in kinds, text
            assert "rank 2 was lost" in text
    assert [rank.hear() for rank in survivors] == [2.0, 2.0], "the survivors continue in a new group"


@mostly("tcp")
def test_peer_that_destroys_its_group_is_lost_to_the_others(start, ended):
    *stayed, left = start(3, "leaves")
    ended(left)
    for rank in stayed:
        check_failed(rank, "PeerLostError", "rank 2 was lost")


@mostly("shm")
def test_rendezvous_timeout_names_the_missing_rank(start):
    ranks = start(3, "never_complete", ranks=2)
    for rank in ranks:
        check_failed(rank, "RendezvousTimeoutError", "missing 2")
        assert rank.hear() is False


@pytest.mark.exhaustive
def test_late_peer_fails_operations_with_a_timeout(start):
    punctual, late, third = start(3, "late")
    kinds, text = punctual.hear()
    assert "OperationTimeoutError" in kinds, text
    assert "monitored_barrier" in text, text
    # On a machine with few processors rank 2 may be late, too.
    assert re.search(r"ranks? .*\b1\b", text), text
    check_failed(third, "GroupError")
    for rank in (punctual, third):
        check_failed(rank, "GroupError", "all_reduce")
    # These calls have timeouts of their own; the group's timeout is a minute.
    for _ in range(3):
        call, (kinds, text) = punctual.hear()
        assert "OperationTimeoutError" in kinds, text
        assert re.match(rf"{call} #1 on group .*: timed out after 0\.5 s", text), text
    late.say("come")


@mostly("tcp")
def test_wait_timeout_leaves_the_operation_running(start):
    waiting, late = start(2, "waits_briefly")
    check_failed(waiting, "WaitTimeoutError")
    late.say("come")
    waiting.say("wait again")
    assert [rank.hear() for rank in (waiting, late)] == [3.0, 3.0]


@mostly("shm")
def test_mismatched_calls_raise_on_every_rank(start):
    ranks = start(2, "mismatched")
    for rank in ranks:
        check_failed(rank, "MismatchError", "10", "11")


_WAYS = ["undestroyed", "pending", "from a thread", "in a callback"]
_ESSENTIAL = list(zip(_WAYS, ["shm", "tcp", "tcp", "shm"], strict=True))


@pytest.mark.parametrize(
    ("how", "transport"),
    [
        pair if pair in _ESSENTIAL else pytest.param(*pair, marks=pytest.mark.exhaustive)
        for pair in itertools.product(_WAYS, ["shm", "tcp"])
    ],
)
def test_exit_without_destroying_the_group(start, how):
    start(2, "ends", how)


@mostly("shm")
def test_uncaught_exception_exits_with_status_1(start, ended):
    ranks = start(2, "ends", "raising")
    ended(*ranks, status=1)
    assert 'KeyError: "a user\'s mistake"' in ranks[0].output()


@mostly("shm")
@pytest.mark.parametrize("how", ["twice", "default first"])
def test_group_destroyed_twice_or_in_the_wrong_order_raises(start, how):
    ranks = start(2, "ends", how)
    for rank in ranks:
        check_failed(rank, "Exception")


@mostly("tcp")
def test_process_group_is_initialized_again_after_destroy(start):
    ranks = start(2, "ends", "again")
    assert [[rank.hear() for _ in range(3)] for rank in ranks] == [[[2.0] * 10] * 3] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("busy", ["waits", "works"])
def test_interrupt_of_torchrun_ends_agent_and_ranks(transport, busy, monkeypatch):
    """The agent forwards SIGINT to ranks that are blocked in a collective or run many of them.

    A rank that did not end by itself would be killed by torchrun after thirty seconds, and could not print.
    """
    monkeypatch.setenv("ASYNCDIST_TRANSPORT", transport)
    # Without the variable torchrun prints a warning into the output.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = str(HERE / "program_interrupted.py")
    job = subprocess.Popen([*command, program, busy], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = [job.stdout.readline().strip() for _ in range(2)]
        assert sorted(said) == ["rank 0 is busy", "rank 1 is busy"], said
        job.send_signal(signal.SIGINT)
        rest, _ = job.communicate(timeout=120)
        assert rest.splitlines().count("ended") == 2, rest
        assert job.returncode != 0
        assert "Aborted" not in rest
    finally:
        job.kill()
        job.communicate()


@mostly("tcp")
def test_abort_process_group_reaches_every_rank(start):
    """The abort reaches peers without an open connection while the aborting process is still alive."""
    first, *others = start(3, "aborts")
    for kinds, text in [*first.hear(), *(rank.hear() for rank in others)]:
        assert "GroupAbortedError" in kinds
        assert "torch.distributed aborted the process group" in text
    # The aborting rank has no pending operations.
    assert first.hear() == []
    check_failed(first, "NotInitializedError")
    for rank in (first, *others):
        rank.say("go")
