"""Ctrl-C, forks, and idle processes."""

import random
import signal
import time

import pytest

pytestmark = pytest.mark.processes


def check_interrupted(told):
    assert told.process.wait() == -signal.SIGINT
    # Log lines may follow.
    assert "KeyboardInterrupt" in told.process.output().splitlines()


def test_interrupt_ends_a_blocked_rank_and_notifies_the_others(job, face):
    """The tensor is large: of a small one the other ranks may already have received the blocked rank's part."""
    ranks = job.met(3, face)
    ranks[0].tell("all_reduce", "world", 300_000)
    ranks[1].tell("all_reduce", "world", 300_000)
    ranks[1].process.interrupt()
    check_interrupted(ranks[1])
    ranks[2].tell("all_reduce", "world", 300_000)
    for told in (ranks[0], ranks[2]):
        answer = told.hear()
        assert (answer.kind, answer.peer) == ("PeerLostError", 1), answer.text


@pytest.mark.exhaustive
def test_interrupt_of_busy_ranks_leaves_no_rank_hanging(job, face):
    moments = random.Random(7)
    for count in (1, 1, 1, 50_000, 50_000, 1_000_000, 1_000_000):
        ranks = job.world(2, face)
        for told in ranks:
            told.tell("all_reduce", "world", count, 1_000_000)
        # The moment of the interrupt is what varies.
        time.sleep(moments.uniform(0.01, 0.05))
        ranks[1].process.interrupt()
        check_interrupted(ranks[1])
        answer = ranks[0].hear()
        assert (answer.kind, answer.peer) == ("PeerLostError", 1), answer.text


def test_interrupt_ends_the_rendezvous(job, face, tmp_path):
    for rank in (0, 1):
        (told,) = job.start(1, face)
        # The rank runs and its output is redirected.
        told.do("is_initialized")
        told.tell("init", f"file://{tmp_path}/never{rank}", rank, 2)
        # Nothing shows from outside that the rank waits.
        time.sleep(0.1)
        told.process.interrupt()
        check_interrupted(told)


@pytest.mark.parametrize("waiting", ["init", "all_reduce", "settle"])
def test_interrupt_that_does_not_wake_the_main_thread_ends_its_wait(job, face, waiting, tmp_path):
    """The thread looks for signals again after a second, in the rendezvous as in each kind of wait for a peer."""
    if waiting == "init":
        (rank,) = job.start(1, face)
        rank.tell("interrupted_unseen", "init", f"file://{tmp_path}/never", 0, 2)
    else:
        rank, _ = job.world(2, face)
        rank.do("pend_receive", "world", 1)
        arguments = ("world", 1) if waiting == "all_reduce" else ()
        rank.tell("interrupted_unseen", waiting, *arguments)
    check_interrupted(rank)


@pytest.mark.parametrize(("number", "count"), [(1, 1), (2, 1), (3, 300_000)])
def test_interrupt_right_after_a_lock_was_acquired_does_not_leave_it_locked(job, number, count):
    ranks = job.world(2, "blocking")
    ranks[1].do("interrupt_after_acquire", number)
    for rank in ranks:
        rank.tell("all_reduce", "world", count, 1_000_000)
    check_interrupted(ranks[1])
    answer = ranks[0].hear()
    assert (answer.kind, answer.peer) == ("PeerLostError", 1), answer.text


def test_forked_child_cannot_use_or_harm_its_parents_world(job, all_do, face):
    ranks = job.world(2, face)
    all_do(ranks, "all_reduce", "world", 10)
    ranks[1].do("pend_receive", "world", 0)
    assert all_do(ranks, "fork", "describe_world") == [(0, "rank 0 of 2"), (0, "rank 1 of 2")]
    for status, outcome in all_do(ranks, "fork", "use_the_parents_group"):
        assert (status, "forked" in outcome) == (0, True), outcome
    if face == "blocking":
        assert all_do(ranks, "fork", "destroy_and_open_own_world") == [(0, "1.0"), (0, "1.0")]
    assert all_do(ranks, "all_reduce", "world", 100_000) == [2.0, 2.0]
    ranks[0].do("pend_send", "world", 1)
    assert ranks[1].do("settle") == [None]
    assert all_do(ranks, "destroy") == [None, None]


@pytest.fixture
def asleep(face):
    """Return whether a process slept: ``asleep(effort)``. Polling shows as wake-ups, spinning as CPU time."""
    # `IdleWatch` checks three times in a second. Each check may wait for the interpreter lock, which is a wake-up too.
    # A wake-up in trio is one of two threads, each of which also waits for the other's interpreter lock.
    most = 15 if face == "in_trio" else 8

    def asleep(effort):
        seconds, wake_ups = effort
        return wake_ups <= most and seconds < 0.1

    return asleep


def test_idle_ranks_use_no_cpu_time(job, all_do, face, asleep):
    ranks = job.world(2, face, ASYNCDIST_HEARTBEAT="0")
    all_do(ranks, "all_reduce", "world", 10)
    ranks[0].do("new_group", "again", [0, 1])
    ranks[1].do("new_group", "again", [0, 1])
    all_do(ranks, "all_reduce", "again", 100_000)
    for effort in all_do(ranks, "rest", 1.0):
        assert asleep(effort), effort
    ranks[0].tell("measured_receive", 1)
    ranks[1].do("rest", 1.0)
    ranks[1].do("pend_send", "world", 0)
    effort = ranks[0].hear()
    assert asleep(effort), effort
    # The same holds while a background operation waits for a peer.
    ranks[0].do("pend_receive", "world", 1)
    for effort in all_do(ranks, "rest", 1.0):
        assert asleep(effort), effort
    ranks[1].do("pend_send", "world", 0)
    assert ranks[0].do("settle") == [None]
