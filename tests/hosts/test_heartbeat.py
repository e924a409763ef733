"""The network between two hosts fails without a word: each side finds out by the missing heartbeats of the other."""

import pytest

from tests.hosts.conftest import Job
from tests.support.stopwatch import Stopwatch


@pytest.fixture
def failing(hosts, nursery, tmp_path):
    """Start a job and let the network of a host fail: ``failing(host, fault)`` returns it and what each rank noticed."""

    def failing(host, fault, placed=(0, 0, 1, 1), heartbeat=1, before=("reduced", 100_000)):
        job = Job(hosts, nursery, f"file://{tmp_path}/world", placed, ASYNCDIST_HEARTBEAT=str(heartbeat))
        job.all_do(*before)
        job.all_say("wait_for_failure")
        getattr(hosts, fault)(host)
        return job, job.all_hear()

    return failing


def check(failures):
    """Check that the ranks of each host have lost a rank of the other host; ranks 0 and 1 are on the first."""
    for rank, (kind, peer, noticed, text, _) in enumerate(failures):
        assert (kind, noticed) == ("PeerLostError", "heartbeat"), text
        # A rank may receive the notice of a rank of the other host, about a rank of its own.
        assert (peer < 2) is not (rank < 2) or "noticed by" in text, text


def test_both_sides_of_a_link_that_goes_down_lose_each_other(failing):
    check(failing(1, "cut")[1])


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_packets_lost_in_one_direction_are_noticed_on_both_sides(failing, host):
    check(failing(host, "drop")[1])


@pytest.mark.exhaustive
def test_rank_without_a_network_says_that_it_hears_nobody(failing):
    _, failures = failing(1, "cut", (0, 0, 1))
    check(failures)
    assert "nor from any other rank over tcp: the network of rank 2 may be down" in failures[2][3]


@pytest.mark.parametrize("fault", ["cut", pytest.param("drop", marks=pytest.mark.exhaustive)])
def test_regroup_does_not_wait_for_members_that_only_others_had_connections_to(failing, fault):
    """TCP would try to connect to them for two minutes. The first host has half of the members, with the first one."""
    job, _ = failing(1, fault, (0, 0, 0, 1, 1, 1))
    job.all_say("regroup", 1000)
    assert [rank.hear(timeout=20.0) for rank in job.ranks[:3]] == [((0, 1, 2), 3.0)] * 3
    assert [rank.hear(timeout=20.0) for rank in job.ranks[3:]] == ["NoQuorumError"] * 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["cut", "drop"])
def test_ranks_of_a_vanished_host_are_lost_together_also_those_that_nobody_had_a_connection_to(failing, fault):
    """Small all-reduces of two hosts use one rank of each. Without the rule the other rank is lost a limit later."""
    heartbeat = 4.0
    job, _ = failing(1, fault, heartbeat=heartbeat, before=("all_reduced", 1))
    job.all_say("regroup", 1000)
    since = Stopwatch()
    assert [rank.hear(timeout=20.0) for rank in job.ranks[:2]] == [((0, 1), 2.0)] * 2
    assert since.seconds() < heartbeat / 2
    assert [rank.hear(timeout=20.0) for rank in job.ranks[2:]] == ["NoQuorumError"] * 2


def test_link_that_is_down_for_a_moment_costs_no_rank(hosts, nursery, tmp_path):
    """A connection that a rank opens in that time fails at once, and is tried again; one that is open carries on."""
    # The measurement at the start would open the connection already.
    settings = {"ASYNCDIST_HEARTBEAT": "2", "ASYNCDIST_CALIBRATE": "0"}
    job = Job(hosts, nursery, f"file://{tmp_path}/world", (0, 1, 0), **settings)
    hosts.cut(1)
    job.all_say("passed_on", 1000)
    # Longer than it takes to begin.
    with pytest.raises(TimeoutError):
        job.ranks[0].hear(timeout=0.4)
    hosts.restore(1)
    assert job.all_hear() == [[2.0], [0.0], [1.0]]
