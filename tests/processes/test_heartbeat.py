"""A rank that is silent while its connections stay open: the others lose it by its missing heartbeats, and only then."""

import os
import signal
import time

import pytest

pytestmark = pytest.mark.processes

SHORT = {"ASYNCDIST_HEARTBEAT": "0.5"}


def check_silent(failures, rank):
    for failed in failures:
        assert (failed.kind, failed.peer, failed.noticed) == ("PeerLostError", rank, "heartbeat"), failed.text
        assert f"rank {rank} was lost (no heartbeat for " in failed.text
        assert failed.last_heard >= 0.4


def test_stopped_rank_is_lost_and_learns_why_when_it_continues(job, all_do, face, until):
    ranks = job.met(3, face, **SHORT)
    ranks[1].process.stop()
    others = [ranks[0], ranks[2]]
    failures = all_do(others, "all_reduce", "world", 1000)
    check_silent(failures, 1)
    if job.transport == "shm":
        assert "its process is stopped" in failures[0].text
    all_do(others, "new_group", "rest", [0, 2])
    ranks[1].process.resume()
    until(lambda: ranks[1].do("error_of", "world") is not None)
    excluded = ranks[1].do("error_of", "world")
    assert excluded["kind"] == "PeerLostError"
    assert "found that rank 1 was lost (no heartbeat for" in excluded["text"]
    assert all_do(others, "all_reduce", "rest", 1000) == [2.0, 2.0]


def test_ranks_that_are_stopped_together_lose_nobody(job, all_do, face):
    """As if their machine had been suspended. A rank of another world, which is stopped alone, is the clock."""
    ranks = job.met(3, face, **SHORT)
    watcher, alone = job.met(2, face, ASYNCDIST_HEARTBEAT="3")
    for told in ranks[:2]:
        told.tell("all_reduce", "world", 1000)
    for told in (*ranks, alone):
        told.process.stop()
    # Six times the limit of the three.
    (failed,) = all_do([watcher], "all_reduce", "world", 1000)
    assert (failed.kind, failed.peer, failed.noticed) == ("PeerLostError", 1, "heartbeat"), failed.text
    for told in ranks:
        told.process.resume()
    ranks[2].tell("all_reduce", "world", 1000)
    assert [told.hear() for told in ranks] == [3.0] * 3
    # They look at each other again.
    ranks[1].process.stop()
    check_silent(all_do([ranks[0], ranks[2]], "all_reduce", "world", 1000), 1)


def test_rank_whose_interpreter_is_held_is_lost(job, all_do, face, until):
    """The others make no calls: they learn it too."""
    ranks = job.met(3, face, **SHORT)
    ranks[2].tell("hold_interpreter", 60_000)
    for told in ranks[:2]:
        until(lambda told=told: told.do("error_of", "world") is not None)
    check_silent(all_do(ranks[:2], "all_reduce", "world", 10), 2)


def test_rank_that_continues_in_time_recovers(job, all_do, face, until):
    ranks = job.world(2, face, ASYNCDIST_HEARTBEAT="8")
    all_do(ranks, "log_changes")
    all_do(ranks, "barrier", "world")
    ranks[1].process.stop()
    until(lambda: "rank 1 has become suspect, after" in ranks[0].process.output())
    ranks[1].process.resume()
    until(lambda: "rank 1 has recovered, after" in ranks[0].process.output())
    assert all_do(ranks, "all_reduce", "world", 1000) == [2.0, 2.0]
    assert "rank 0" not in ranks[1].process.output()


@pytest.mark.exhaustive
def test_rank_that_computes_with_the_interpreter_is_not_lost_on_its_host(job, all_do, face):
    if job.transport != "shm":
        pytest.skip("ranks that share no memory do not look at each other's processes")
    ranks = job.met(2, face, ASYNCDIST_HEARTBEAT="1")
    ranks[1].tell("compute_with_interpreter")
    time.sleep(3.0)  # three times the limit
    os.kill(ranks[1].process.pid, signal.SIGUSR1)
    assert ranks[1].hear() is None
    assert all_do(ranks, "all_reduce", "world", 1000) == [2.0, 2.0]


@pytest.mark.exhaustive
def test_rank_stopped_before_its_first_message_is_lost(job, all_do, face):
    ranks = job.world(3, face, **SHORT)
    ranks[1].process.stop()
    check_silent(all_do([ranks[0], ranks[2]], "all_reduce", "world", 1000), 1)


@pytest.mark.exhaustive
def test_forked_child_does_not_beat_for_its_parent(job, all_do, face):
    *survivors, victim = ranks = job.world(3, face, **SHORT)
    all_do(ranks, "all_reduce", "world", 10)
    child = victim.do("leave_a_child")
    try:
        victim.process.stop()
        check_silent(all_do(survivors, "all_reduce", "world", 10), 2)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.exhaustive
def test_idle_ranks_that_leave_one_by_one_are_not_lost(job, all_do, face):
    ranks = job.world(4, face, **SHORT)
    all_do(ranks, "all_reduce", "world", 10)
    for told in ranks[3:0:-1]:
        told.do("destroy")
        told.do("rest", 1.0)
    assert ranks[0].do("error_of", "world") is None


@pytest.mark.exhaustive
def test_idle_rank_uses_little_time(job, all_do, face):
    ranks = job.met(2, face)
    for used, wake_ups in all_do(ranks, "rest", 10.0):
        assert used < 0.1
        assert wake_ups < 400


@pytest.mark.exhaustive
def test_busy_machine_loses_nobody(job, all_do, face, nursery):
    ranks = job.met(4, face)
    for _ in range(16):
        nursery.start(__file__, "burn")
    until = time.monotonic() + 20.0
    while time.monotonic() < until:
        assert all_do(ranks, "all_reduce", "world", 100_000, 20) == [4.0**20] * 4


def burn(test):
    while True:
        sum(range(100_000))
