"""Networks other than two hosts on a plain link: IPv6 only, interfaces that lead nowhere, small packets, several rates."""

import contextlib

import pytest

from asyncdist.testing.hosts import DEAD_LINK, Hosts
from tests.hosts.conftest import Job


def sums_on(hosts, nursery, where, placed, count=300_000):
    """Let ranks placed on hosts meet and reduce; return the distinct values of each rank's sum."""
    job = Job(hosts, nursery, where, placed)
    found = [values[0] for values in job.all_do("reduced", count)]
    job.end()
    return found


@pytest.fixture
def network():
    """Return a function that makes hosts, which the end of the test removes."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Hosts(*args, **options))


def test_ranks_meet_where_there_is_only_ipv6(network, nursery):
    hosts = network(2, ipv6=True)
    where = f"tcp://[{hosts.addresses[0]}]:29500"
    assert sums_on(hosts, nursery, where, (0, 0, 1)) == [[6.0]] * 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("ipv6", [False, True])
def test_ranks_find_the_interface_that_leads_to_the_others(network, nursery, ipv6):
    hosts = network(3, ipv6=ipv6, dead_links=(0, 1))
    address = f"[{hosts.addresses[0]}]" if ipv6 else hosts.addresses[0]
    assert sums_on(hosts, nursery, f"tcp://{address}:29500", (0, 1, 2)) == [[6.0]] * 3
    assert hosts.sent_nbytes(1, DEAD_LINK) < 10_000  # questions for addresses


@pytest.mark.exhaustive
def test_one_link_may_have_smaller_packets_than_the_others(network, nursery):
    hosts = network(3, mtu={1: 1280})
    assert sums_on(hosts, nursery, f"tcp://{hosts.addresses[0]}:29500", (0, 1, 2)) == [[6.0]] * 3


@pytest.mark.exhaustive
def test_eight_hosts_with_two_ranks_each_on_links_of_several_rates(network, nursery):
    hosts = network(8)
    hosts.shape("1gbit")
    hosts.shape("200mbit", 3, 5)
    placed = [host for host in range(8) for _ in range(2)]
    assert sums_on(hosts, nursery, f"tcp://{hosts.addresses[0]}:29500", placed) == [[136.0]] * 16
