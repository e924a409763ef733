"""A killed rank: ranks that share a group with it get an error that names it; other groups continue."""

import os
import signal

import pytest

pytestmark = pytest.mark.processes


def check_all_lost(told, answers, dead):
    for rank, answer in zip(told, answers, strict=True):
        assert answer.kind == "PeerLostError", (rank.process.pid, answer)
        assert answer.peer == dead, answer.text
        assert f"rank {dead} was lost" in answer.text


@pytest.mark.parametrize(
    ("order", "algorithm", "moments"),
    [
        (("all_reduce", "world", 10, 50), "all_reduce=doubling", (0, 3, 9)),
        (("all_reduce", "world", 300_000, 50), "all_reduce=ring", (0, 7, 20)),
        (("all_reduce_persistent", "world", 10, 50), "all_reduce=doubling", (1, 9)),
        (("broadcast", "world", 300_000, 2, 50), "broadcast=tree", (0, 1)),
        (("broadcast", "world", 300_000, 0, 50), "broadcast=tree", (1, 4)),
    ],
)
def test_death_in_the_middle_of_a_collective_reaches_every_rank(job, all_do, face, order, algorithm, moments):
    """The survivors of a death join a new world with a new rank."""
    survivors = job.start(3, face, ASYNCDIST_ALGORITHM=algorithm)
    dead = 2
    for moment in moments:
        victim = job.start(1, face, ASYNCDIST_ALGORITHM=algorithm)[0]
        job.meet([*survivors[:dead], victim, *survivors[dead:]])
        victim.do("die_at", moment)
        victim.tell(*order)
        answers = all_do(survivors, *order)
        assert victim.process.wait() == -9
        check_all_lost(survivors, answers, dead)
        assert all_do(survivors, "destroy") == [None, None, None]


def test_death_while_survivors_wait_in_different_ways(job, all_do, face):
    """One waits for a call, one has works in the background, and one calls only after the death."""
    waiting, background, later, victim = job.met(4, face)
    background.do("pend", "world", 10)
    background.do("pend", "world", 1_000_000)
    waiting.tell("all_reduce", "world", 10)
    background.tell("settle")
    victim.process.kill()
    check_all_lost([waiting], [waiting.hear()], 3)
    assert [(ended["kind"], ended["peer"]) for ended in background.hear()] == [("PeerLostError", 3)] * 2
    check_all_lost([later], all_do([later], "all_reduce", "world", 10), 3)


@pytest.mark.parametrize("dead", [0, 3])
def test_death_between_calls_fails_later_calls_and_survivors_continue_as_the_error_advises(job, all_do, face, dead):
    ranks = job.met(4, face)
    survivors = [rank for number, rank in enumerate(ranks) if number != dead]
    ranks[dead].process.kill()
    assert ranks[dead].process.wait() == -9
    for _ in range(2):
        answers = all_do(survivors, "all_reduce", "world", 10)
        check_all_lost(survivors, answers, dead)
        assert all("call regroup() on the other ranks" in answer.text for answer in answers)
    all_do(survivors, "new_group", "survivors", [number for number in range(4) if number != dead])
    for count in (10, 1_000_000):
        assert all_do(survivors, "all_reduce", "survivors", count) == [3.0] * 3


def test_idle_group_reports_the_abort_or_the_death_of_a_peer_without_a_call(job, all_do, until, face):
    ranks = job.world(3, face)
    all_do(ranks, "new_group", "aborted", [0, 1])
    ranks[0].do("abort", "aborted", "enough")
    until(lambda: ranks[1].do("error_of", "aborted") is not None)
    assert "rank 0 aborted: enough" in ranks[1].do("error_of", "aborted")["text"]
    ranks[0].process.kill()
    for told in ranks[1:]:
        until(lambda told=told: told.do("error_of", "world") is not None)
        error = told.do("error_of", "world")
        assert (error["kind"], error["peer"]) == ("PeerLostError", 0)


def test_forked_child_of_a_killed_rank_does_not_hide_its_death(job, all_do, face):
    *survivors, victim = ranks = job.world(3, face)
    all_do(ranks, "all_reduce", "world", 10)
    child = victim.do("leave_a_child")
    try:
        victim.process.kill()
        check_all_lost(survivors, all_do(survivors, "all_reduce", "world", 10), 2)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_death_fails_only_groups_with_the_dead_rank(job, all_do, face):
    ranks = job.world(4, face)
    for name, members in {"low": [0, 1], "mid": [1, 2], "high": [2, 3], "spare": [0, 1, 2]}.items():
        all_do(ranks, "new_group", name, members)
    all_do(ranks[:2], "all_reduce", "low", 10)
    all_do(ranks[2:], "all_reduce", "high", 10)
    ranks[2].do("pend", "high", 10)
    ranks[2].do("pend_receive", "high", 3)
    ranks[2].do("pend", "world", 1)
    ranks[3].process.kill()
    ranks[2].tell("settle")
    for ended in ranks[2].hear():
        assert (ended["kind"], ended["peer"]) == ("PeerLostError", 3)
    assert all_do(ranks[:3], "all_reduce", "spare", 1000) == [3.0, 3.0, 3.0]
    assert all_do(ranks[:2], "all_reduce", "low", 1_000_000) == [2.0, 2.0]
    assert all_do(ranks[1:3], "all_reduce", "mid", 10) == [2.0, 2.0]
    check_all_lost(ranks[:3], all_do(ranks[:3], "all_reduce", "world", 1), 3)
    all_do(ranks[:3], "new_group", "later", [0, 1, 2, 3])
    check_all_lost(ranks[:3], all_do(ranks[:3], "all_reduce", "later", 1), 3)


@pytest.mark.parametrize(("algorithm", "count"), [("all_reduce=doubling", 10), ("all_reduce=ring", 100_000)])
def test_survivor_that_leaves_after_a_death_is_not_reported_as_dead(job, all_do, face, algorithm, count):
    ranks = job.world(6, face, ASYNCDIST_ALGORITHM=algorithm)
    ranks[4].do("die_at", 11)
    ranks[4].tell("all_reduce", None, count, 50)
    survivors = ranks[:4] + ranks[5:]
    for ended in all_do(survivors, "all_reduce_or_leave", count, 50):
        assert (ended["kind"], ended["peer"]) == ("PeerLostError", 4), ended["text"]
