"""What goes wrong: peers that die, leave or never come, and mistakes. Errors are ours, name ranks and operation, and reach
everybody; and every process ends by itself, with the status of a program that did not crash.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncdist.testing.processes import Nursery
from asyncdist.testing.stopwatch import Stopwatch, stood_in_line

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
PROGRAM = HERE / "programs_failures.py"
SOON = 5.0
"""Seconds within which everybody must have heard of a failure; all deadlines are ten times as far."""


@pytest.fixture(scope="module")
def brief_lives():
    """What forks ranks that end as programs do: taking apart all that teams have imported would cost each a second."""
    modules = (
        "asyncdist.torch_backend",
        "asyncdist_transports.shm",
        "asyncdist_transports.tcp",
        "torch.distributed.fsdp",
    )
    with Nursery(modules) as nursery:
        yield nursery


@pytest.fixture
def start(brief_lives, transport, tmp_path):
    """Fork the ranks of a world that run a function of the program: ``start(world, function, *arguments)``."""
    meetings, started = itertools.count(), []

    def start(world, function, *arguments, come=None):
        meeting = f"file://{tmp_path}/meeting-{next(meetings)}"
        environment = {"ASYNCDIST_TRANSPORT": transport}
        ranks = [
            brief_lives.start(PROGRAM, function, rank, world, meeting, *arguments, environment=environment)
            for rank in range(come or world)
        ]
        started.extend(ranks)
        return ranks

    yield start
    for rank in started:
        try:
            rank.wait(0.0)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                rank.kill()
            rank.wait()
        rank.close()


def check_lost(failure, kind, peer, since):
    kinds, text, at = failure
    assert kind in kinds, failure
    assert f"rank {peer} was lost" in text, text
    assert since.seconds(at) < SOON


# -- peers that die ----------------------------------------------------------------------------------

DYING = {
    "ddp": ("dies_in_backward", {}),
    "unused parameters": ("dies_in_backward", {"find_unused_parameters": True}),
    "static graph": ("dies_in_backward", {"static_graph": True}),
    "views": ("dies_in_backward", {"gradient_as_bucket_view": True}),
    "fsdp": ("dies_in_backward_of_fsdp", {}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", DYING)
def test_a_peer_dies_during_backward(brief_lives, start, what, world, request):
    if what == "fsdp":
        request.getfixturevalue("fsdp2")
    program, options = DYING[what]
    *survivors, victim = start(world, program, options)
    assert victim.wait() == -signal.SIGKILL
    since = brief_lives.stopwatch()
    for rank in survivors:
        check_lost(rank.hear(), "RuntimeError", world - 1, since)
        kinds, text, _ = rank.hear()
        assert "GroupError" in kinds, text
    assert [rank.wait() for rank in survivors] == [0] * len(survivors), survivors[0].output()


def test_a_peer_dies_while_others_wait_for_it(brief_lives, start):
    *survivors, victim = start(3, "dies")
    assert [rank.hear() for rank in (*survivors, victim)] == ["waiting", "waiting", "here"]
    since = brief_lives.stopwatch()
    victim.kill()
    for rank in survivors:
        told = dict(rank.hear() for _ in range(9))
        assert len(told) == 9
        for call, failure in told.items():
            check_lost(failure, "RuntimeError" if call == "future" else "PeerLostError", 2, since)
    assert [rank.wait() for rank in survivors] == [0, 0], survivors[0].output()


# -- peers that leave, or never come -----------------------------------------------------------------


def test_a_peer_leaves(brief_lives, start):
    *stayed, left = start(3, "leaves")
    assert left.wait() == 0, left.output()
    since = brief_lives.stopwatch()
    for rank in stayed:
        check_lost(rank.hear(), "PeerLostError", 2, since)
    assert [rank.wait() for rank in stayed] == [0, 0], stayed[0].output()


def test_a_world_that_never_becomes_complete(start):
    ranks = start(3, "never_complete", come=2)
    for rank in ranks:
        kinds, text, _ = rank.hear()
        assert "RendezvousTimeoutError" in kinds, text
        assert "missing 2" in text, text
        assert rank.hear() is False
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].output()


@pytest.mark.exhaustive
def test_a_peer_comes_late(start):
    punctual, late, third = start(3, "late")
    kinds, text, _ = punctual.hear()
    assert "OperationTimeoutError" in kinds, text
    assert "monitored_barrier" in text, text
    assert re.search(r"ranks? .*\b1\b", text), text  # and perhaps rank 2, where processors are few
    kinds, text, _ = third.hear()
    assert "GroupError" in kinds, text
    for rank in (punctual, third):
        kinds, text, _ = rank.hear()
        assert "GroupError" in kinds, text
        assert "all_reduce" in text, text
    for _ in range(3):  # the groups have a minute
        call, (kinds, text, _) = punctual.hear()
        assert "OperationTimeoutError" in kinds, text
        assert re.match(rf"{call} #1 on group .*: timed out after 0\.5 s", text), text
    late.say("come")
    assert [rank.wait() for rank in (punctual, late, third)] == [0, 0, 0], late.output()


def test_a_wait_is_given_up_and_the_operation_is_not(start):
    waiting, late = start(2, "waits_briefly")
    kinds, text, _ = waiting.hear()
    assert "WaitTimeoutError" in kinds, text
    late.say("come")
    waiting.say("wait again")
    assert [rank.hear() for rank in (waiting, late)] == [3.0, 3.0]
    assert [rank.wait() for rank in (waiting, late)] == [0, 0]


def test_ranks_that_call_different_things_are_told(start):
    ranks = start(2, "mismatched")
    for rank in ranks:
        kinds, text, _ = rank.hear()
        assert "MismatchError" in kinds, text
        assert "10" in text, text
        assert "11" in text, text
    assert [rank.wait() for rank in ranks] == [0, 0]


# -- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["devices", "dtypes", "counts", "layouts", "unequal", "by_cpp", "later_powers"])
def test_mistake(as_it_should_be, program):
    as_it_should_be("programs_refusals", program)


# -- the end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["undestroyed", "pending", "from a thread", "in a callback"])
def test_an_end_without_a_goodbye(brief_lives, start, how):
    ranks = start(2, "ends", how)
    since = brief_lives.stopwatch()
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].output()
    assert since.seconds() < SOON


def test_an_exception_ends_the_process(brief_lives, start):
    ranks = start(2, "ends", "raising")
    since = brief_lives.stopwatch()
    assert [rank.wait() for rank in ranks] == [1, 1], ranks[0].output()
    assert since.seconds() < SOON
    assert 'KeyError: "a user\'s mistake"' in ranks[0].output()


def test_groups_destroyed_twice_and_in_the_wrong_order(brief_lives, start):
    for how in ("twice", "default first"):
        ranks = start(2, "ends", how)
        since = brief_lives.stopwatch()
        for rank in ranks:
            kinds, text, _ = rank.hear()
            assert kinds != ["nothing"], text
            assert rank.wait() == 0, rank.output()
        assert since.seconds() < SOON


def test_one_world_after_another(start):
    ranks = start(2, "ends", "again")
    assert [[rank.hear() for _ in range(3)] for rank in ranks] == [[[2.0] * 10] * 3] * 2
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].output()


def gone(job):
    """Return what a job of torchrun says until all its processes are gone, and how long that takes on a stopwatch.

    Most of that is the end of three interpreters that have imported torch, which takes as long over gloo. What they stand
    in line for a processor is no time of theirs; ranks are asked for it as long as they are there.
    """
    ranks = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
    ended = dict.fromkeys(ranks, 0.0)
    since = Stopwatch(job.pid, *ranks, ended=ended)
    job.send_signal(signal.SIGINT)
    ends = [os.pidfd_open(rank) for rank in ranks]
    while ends:
        over = select.select(ends, (), (), 0.01)[0]
        ended.update({rank: max(ended[rank], stood_in_line(rank)) for rank in ranks})
        for end in over:
            ends.remove(end)
            os.close(end)
    rest = job.stdout.read()  # to its end, which is that of the last process
    return rest, since.seconds()


@pytest.mark.exhaustive
@pytest.mark.parametrize("busy", ["waits", "works"])
def test_an_interrupt_of_torchrun_ends_everything_soon(transport, busy, monkeypatch):
    """The agent passes on what Ctrl-C sends to it; ranks hang in a collective, or are in the middle of many."""
    monkeypatch.setenv("ASYNCDIST_TRANSPORT", transport)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or torchrun has something to say about it
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = str(HERE / "program_interrupted.py")
    job = subprocess.Popen([*command, program, busy], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = [job.stdout.readline().strip() for _ in range(2)]
        assert sorted(said) == ["rank 0 is busy", "rank 1 is busy"], said
        rest, seconds = gone(job)  # a rank that hangs is killed by torchrun after thirty
        assert seconds < 2.0, rest
        # One may hear of the other's end, and end by that, before it is interrupted itself.
        took = re.findall(r"(?m)^ended (?:after (\S+) s|by itself)$", rest)
        assert len(took) == 2, rest
        assert 0.0 <= max(float(seconds or -1.0) for seconds in took) < 2.0, rest
        assert job.wait() != 0
        assert "Aborted" not in rest
    finally:
        job.kill()
        job.communicate()


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 aborts groups of NCCL only")
def test_who_aborts_everything_has_left_and_all_others_have_heard_of_it(start):
    """Also those to whom there was no connection, and while it lives on."""
    first, *others = start(3, "aborts")
    for kinds, text, _ in [*first.hear(), *(rank.hear() for rank in others)]:
        assert "GroupAbortedError" in kinds
        assert "torch.distributed aborted the process group" in text
    assert first.hear() == []  # it waits for nobody any more
    kinds, text, _ = first.hear()
    assert "NotInitializedError" in kinds, text
    for rank in (first, *others):
        rank.say("go")
    assert [rank.wait() for rank in (first, *others)] == [0, 0, 0], first.output()
