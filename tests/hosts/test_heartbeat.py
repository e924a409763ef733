"""The network between two hosts fails without a word: each side finds out by the missing heartbeats of the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncdist.testing.stopwatch import Stopwatch

PROGRAM = Path(__file__).parent / "program_on_host.py"


@pytest.fixture
def ranks():
    """The ranks that `failures_after` has started."""
    return []


@pytest.fixture
def failures_after(hosts, nursery, tmp_path, ranks):
    """Return a function that lets the network of a host fail, and returns how each rank noticed, by rank."""

    def failures_after(host, fault, placed=(0, 0, 1, 1), heartbeat=1, before=("reduced", 100_000)):
        where = f"file://{tmp_path}/world"
        for rank, at in enumerate(placed):
            settings = {
                "ASYNCDIST_TOKEN": "for this test only", "ASYNCDIST_HOST": f"host{at}",
                "ASYNCDIST_HEARTBEAT": str(heartbeat),
            }  # fmt: skip
            arguments = (hosts.namespaces[at], where, rank, len(placed))
            ranks.append(nursery.start(PROGRAM, "on_host", *arguments, environment=settings))
        for rank in ranks:
            rank.hear()
        for rank in ranks:
            rank.say(before)
        for rank in ranks:
            rank.hear()
        for rank in ranks:
            rank.say(("wait_for_failure",))
        getattr(hosts, fault)(host)
        return [rank.hear() for rank in ranks]

    return failures_after


def check(failures):
    """Check that the ranks of each host have lost a rank of the other host; ranks 0 and 1 are on the first."""
    for rank, (kind, peer, noticed, text, _) in enumerate(failures):
        assert (kind, noticed) == ("PeerLostError", "heartbeat"), text
        # A rank may receive the notice of a rank of the other host, about a rank of its own.
        assert (peer < 2) is not (rank < 2) or "noticed by" in text, text


def test_both_sides_of_a_link_that_goes_down_lose_each_other(failures_after):
    check(failures_after(1, "cut"))


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_packets_lost_in_one_direction_are_noticed_on_both_sides(failures_after, host):
    check(failures_after(host, "drop"))


@pytest.mark.exhaustive
def test_rank_without_a_network_says_that_it_hears_nobody(failures_after):
    failures = failures_after(1, "cut", (0, 0, 1))
    check(failures)
    assert "nor from any other rank over tcp: the network of rank 2 may be down" in failures[2][3]


@pytest.mark.parametrize("fault", ["cut", pytest.param("drop", marks=pytest.mark.exhaustive)])
def test_regroup_does_not_wait_for_members_that_only_others_had_connections_to(failures_after, ranks, fault):
    """TCP would try to connect to them for two minutes. The first host has half of the members, with the first one."""
    failures_after(1, fault, (0, 0, 0, 1, 1, 1))
    for rank in ranks:
        rank.say(("regroup", 1000))
    assert [rank.hear(timeout=20.0) for rank in ranks[:3]] == [((0, 1, 2), 3.0)] * 3
    assert [rank.hear(timeout=20.0) for rank in ranks[3:]] == ["NoQuorumError"] * 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["cut", "drop"])
def test_ranks_of_a_vanished_host_are_lost_together_also_those_that_nobody_had_a_connection_to(
    failures_after, ranks, fault
):
    """Small all-reduces of two hosts use one rank of each. Without the rule the other rank is lost a limit later."""
    heartbeat = 4.0
    failures_after(1, fault, heartbeat=heartbeat, before=("all_reduced", 1))
    for rank in ranks:
        rank.say(("regroup", 1000))
    since = Stopwatch()
    assert [rank.hear(timeout=20.0) for rank in ranks[:2]] == [((0, 1), 2.0)] * 2
    assert since.seconds() < heartbeat / 2
    assert [rank.hear(timeout=20.0) for rank in ranks[2:]] == ["NoQuorumError"] * 2


def test_link_that_is_down_for_a_moment_costs_no_rank(hosts, nursery, tmp_path):
    """A connection that a rank opens meanwhile fails at once, and is tried again; one that is open carries on."""
    ranks = []
    for rank in range(3):
        settings = {
            "ASYNCDIST_TOKEN": "for this test only", "ASYNCDIST_HOST": f"host{rank % 2}", "ASYNCDIST_HEARTBEAT": "2",
            # The measurement at the start would open the connection already.
            "ASYNCDIST_CALIBRATE": "0",
        }  # fmt: skip
        where = f"file://{tmp_path}/world"
        ranks.append(
            nursery.start(PROGRAM, "on_host", hosts.namespaces[rank % 2], where, rank, 3, environment=settings)
        )
    for rank in ranks:
        rank.hear()
    hosts.cut(1)
    for rank in ranks:
        rank.say(("passed_on", 1000))
    # Longer than it takes to begin.
    with pytest.raises(TimeoutError):
        ranks[0].hear(timeout=0.4)
    hosts.restore(1)
    assert [rank.hear() for rank in ranks] == [[2.0], [0.0], [1.0]]
