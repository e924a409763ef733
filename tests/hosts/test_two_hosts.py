"""Ranks on two hosts: real processes, in network namespaces that only a veth pair joins."""

import pytest

from tests.hosts.conftest import Job

MIB = 1 << 20
# The rank that dies, and its step.
_MOMENTS = [(0, 50), (0, 333), (0, 1200), (3, 3), (3, 50), (3, 1200)]


@pytest.mark.parametrize("placed", [(0, 0, 1, 1), pytest.param((0, 1, 0, 1), marks=pytest.mark.exhaustive), (0, 1, 1)])
def test_collectives_between_two_hosts(hosts, nursery, tmp_path, placed):
    size = len(placed)
    job = Job(hosts, nursery, f"file://{tmp_path}/world", placed)
    total = size * (size + 1) / 2
    for count in (1, 1000, 300_000):
        tensor, part, whole = [total], [total * size], [total * size * rank for rank in range(1, size + 1)]
        assert job.all_do("reduced", count) == [(tensor, part, whole)] * size
    job.end()


def test_ranks_of_one_host_in_different_networks_and_folders_share_memory(hosts, nursery, tmp_path):
    """Abstract socket names do not connect network namespaces. No data goes through a network."""
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    job = Job(hosts, nursery, f"file://{tmp_path}/world", (0, 1, 1), named=False, folders=folders)
    assert job.all_do("links") == [["ShmLink"]] * 3
    networks = [(host, interface) for host in (0, 1) for interface in hosts.interfaces]
    before = [hosts.sent_nbytes(*network) for network in networks]
    for count in (1, 300_000):
        whole = [6.0 * 3 * rank for rank in (1, 2, 3)]
        assert job.all_do("reduced", count) == [([6.0], [18.0], whole)] * 3
        assert job.all_do("passed_on", count) == [[2.0], [0.0], [1.0]]
    assert all(right for _, right in job.all_do("timed", 8 * MIB))
    sent = [hosts.sent_nbytes(*network) - nbytes for network, nbytes in zip(networks, before, strict=True)]
    # The kernel itself sends a few packets.
    assert max(sent) < 1000, sent
    job.end()
    assert all(list(folder.iterdir()) == [] for folder in folders)


def test_all_reduce_sends_each_byte_once_between_hosts(hosts, nursery, tmp_path):
    job = Job(hosts, nursery, f"file://{tmp_path}/world")
    job.all_do("timed", 4)
    before = [hosts.sent_nbytes(host) for host in (0, 1)]
    assert all(right for _, right in job.all_do("timed", 8 * MIB))
    for host in (0, 1):
        sent = hosts.sent_nbytes(host) - before[host]
        # Headers and acknowledgements are added.
        assert 8 * MIB <= sent < 1.15 * 8 * MIB
    job.end()


def test_killed_rank_is_named_on_both_hosts(hosts, nursery, tmp_path):
    job = Job(hosts, nursery, f"file://{tmp_path}/world")
    job.all_do("timed", MIB)
    for rank in job.ranks[:3]:
        rank.say(("all_reduce_in_vain", 100_000))
    job.ranks[3].kill()
    assert [rank.hear() for rank in job.ranks[:3]] == [("PeerLostError", 3)] * 3


@pytest.mark.parametrize(
    ("lost", "dies_at"), [(0, 3), (3, 333), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in _MOMENTS)]
)
def test_rank_that_dies_during_a_collective_is_named_on_both_hosts(hosts, nursery, tmp_path, lost, dies_at):
    job = Job(hosts, nursery, f"file://{tmp_path}/world")
    for number, rank in enumerate(job.ranks):
        rank.say(("reduce_until_it_fails", [200_000, 5, 3000, 50_000], dies_at if number == lost else -1))
    others = [rank for number, rank in enumerate(job.ranks) if number != lost]
    assert [rank.hear() for rank in others] == [("PeerLostError", lost)] * 3
