"""Ranks as processes over shared memory: waiting, forks, limits, and other users."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from asyncdist.store import TCPStore
from tests.support.stopwatch import Stopwatch

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "program_waits.py"


def succeeds(command):
    return bool(shutil.which(command[0])) and subprocess.run(command, capture_output=True, check=False).returncode == 0


as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
mounts = pytest.mark.skipif(
    not succeeds(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]), reason="no mount namespaces here"
)


@pytest.fixture
def start(nursery, tmp_path):
    """Start two ranks that run a function of the program: ``start(function, *args, **environment)``."""

    def start(function, *args, **environment):
        where = f"file://{tmp_path}/world"
        return [nursery.start(PROGRAM, function, where, rank, 2, *args, environment=environment) for rank in range(2)]

    return start


@pytest.mark.exhaustive
@pytest.mark.parametrize("spin", ["0", "5", "300"])
def test_no_wake_up_is_lost(start, spin):
    """Without spinning every wait sleeps; with little spinning peers publish while a rank falls asleep."""
    ranks = start("run_many_collectives", 8000, ASYNCDIST_SPIN_US=spin)
    assert [rank.hear(120) for rank in ranks] == ["done", "done"]
    assert [rank.wait() for rank in ranks] == [0, 0]


def test_waiting_for_stopped_rank_sleeps_until_deadline(nursery, start):
    waiting, stopped = start("wait_for_a_stopped_rank")
    assert [waiting.hear(), stopped.hear()] == ["warm", "warm"]
    stopped.stop()
    since = Stopwatch.of(nursery)
    waiting.say("go")
    kind, peers, took, over, used, wake_ups = waiting.hear()
    assert (kind, tuple(peers)) == ("OperationTimeoutError", (1,))
    assert took > 0.9
    assert since.seconds(over) < 2.0
    # A spinning rank uses CPU time all the time, and a polling rank wakes up often.
    assert used < 0.1
    assert wake_ups < 20
    stopped.resume()


def test_rank_death_is_noticed_while_its_forked_child_lives(nursery, start):
    survivor, victim = start("fork_and_wait")
    child = victim.hear()
    try:
        survivor.say("go")
        since = Stopwatch.of(nursery)
        victim.kill()
        kind, peer, at = survivor.hear()
        assert (kind, peer) == ("PeerLostError", 1)
        assert since.seconds(at) < 1.0
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.exhaustive
def test_groups_fail_in_child_forked_during_an_operation(start):
    ranks = start("fork_during_an_operation")
    assert [rank.hear() for rank in ranks] == [0, 0]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert "Exception ignored" not in ranks[0].output() + ranks[1].output()


@pytest.fixture
def store():
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        yield store


@pytest.mark.parametrize("obstacle", ["nothing", "another folder"])
def test_ranks_of_one_host_share_memory(start, store, obstacle):
    ranks = start("join_despite", obstacle, store.port)
    for rank in ranks:
        total, names, lines, _ = rank.hear()
        assert (total, names) == (3.0, ["ShmLink"]), lines
        assert not [line for line in lines if "next transport" in line]
    for rank in ranks:
        rank.say("leave")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("obstacle", "reasons"),
    [
        ("small files", ["it offers none", "ulimit -f"]),
        ("no descriptors", ["no descriptor passes"]),
        pytest.param("no memory", ["it offers none", "no memory is left"], marks=mounts),
        pytest.param("another user", ["runs as another user, 0", "runs as another user, 65534"], marks=as_root),
    ],
)
def test_ranks_without_shared_memory_use_next_transport_and_log_why(start, store, obstacle, reasons):
    ranks = start("join_despite", obstacle, store.port)
    logged = []
    for rank in ranks:
        total, names, lines, took = rank.hear()
        assert (total, names) == (3.0, ["TcpLink"])
        assert took < 5.0
        (line,) = [line for line in lines if "next transport" in line or "cannot be used here" in line]
        logged.append(line)
    assert all(any(reason in line for line in logged) for reason in reasons), logged
    for rank in ranks:
        rank.say("leave")


LARGE = (
    "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all", "send",
)  # fmt: skip


@pytest.mark.exhaustive
@mounts
def test_full_shared_memory_raises_on_every_rank_before_tensors_change(start):
    """Writing to a page without memory would end the process (SIGBUS)."""
    ranks = start("run_out_of_memory")
    assert [rank.hear() for rank in ranks] == ["ready", "ready"]
    for name in LARGE:
        for rank in ranks:
            rank.say(name)
        assert [rank.hear() for rank in ranks] == ["met", "met"]
        for rank in ranks:
            rank.say("call")
        for number, rank in enumerate(ranks):
            kind, text, unharmed = rank.hear()
            assert kind == ("GroupError" if number == 1 else "GroupAbortedError"), text
            assert "no memory is left; free memory or raise the limit" in text
            assert unharmed, name
    for rank in ranks:
        rank.say(None)
    # There is memory again.
    assert [rank.hear() for rank in ranks] == [3.0, 3.0]
    for rank in ranks:
        rank.say("leave")
    assert [rank.wait() for rank in ranks] == [0, 0]


def test_messages_of_a_world_survive_the_end_of_an_earlier_one(start):
    """The first ring after the end lies at the beginning of the segment, at offset 0."""
    ranks = start("outlive_another_world")
    assert [rank.hear() for rank in ranks] == [[0, 1], [0, 1]]
    assert [rank.wait() for rank in ranks] == [0, 0]


def test_waiting_ranks_on_one_core_spread_over_cores(nursery, tmp_path):
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores, and a system that moves threads")
    where = f"file://{tmp_path}/world"
    ranks = [nursery.start(PROGRAM, "start_on_one_core", where, rank, 3) for rank in range(3)]
    lower, higher = sorted(os.sched_getaffinity(0))[:2]
    first, _, last = [rank.hear() for rank in ranks]
    assert (first, last) == ([], [[higher], [lower, higher]])
