import socket

import pytest

from asyncdist.net import network
from asyncdist.net.network import InterfaceAddress, addresses_of_interface, choose_address, is_address, is_loopback

LO = InterfaceAddress("lo", "127.0.0.1")
LO6 = InterfaceAddress("lo", "::1")
ETH0 = InterfaceAddress("eth0", "10.0.0.7")
ETH0_6 = InterfaceAddress("eth0", "fd00::7")
ETH0_LINK = InterfaceAddress("eth0", "fe80::7")
ETH01 = InterfaceAddress("eth01", "10.1.0.7")
DOCKER = InterfaceAddress("docker0", "172.17.0.1")
EVERY = [LO, DOCKER, ETH0, ETH01, ETH0_6, ETH0_LINK, LO6]


LOOPBACK = ["localhost", "LOCALHOST.", "db.localhost", "127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"]
OTHERS = ["node0", "10.0.0.1", "fd00::1", "localhost.example.org", "0.0.0.0", "::", "fe80::1%eth0", "::ffff:10.0.0.1"]


@pytest.mark.parametrize("host", LOOPBACK + OTHERS)
def test_loopback_by_spelling(host):
    assert is_loopback(host) == (host in LOOPBACK)


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "fe80::1%eth0", "node0"])
def test_is_address(host):
    assert is_address(host) == (host != "node0")


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("eth", {"eth0", "eth01"}),
        ("eth0", {"eth0", "eth01"}),
        ("=eth0", {"eth0"}),
        ("=eth0,docker0", {"eth0", "docker0"}),
        ("^lo,docker", {"eth0", "eth01"}),
        ("^=eth0", {"lo", "docker0", "eth01"}),
        ("ib", set()),
    ],
)
def test_interface_rules(rule, names):
    assert {candidate.interface for candidate in addresses_of_interface(EVERY, rule)} == names


@pytest.mark.parametrize("rule", ["", "^", "=", "^=,", " , "])
def test_interface_rule_without_a_name_is_refused(rule):
    with pytest.raises(ValueError, match="names no interface"):
        addresses_of_interface(EVERY, rule)


def test_route_is_chosen_if_it_is_a_candidate():
    assert choose_address(EVERY, route="10.1.0.7") == "10.1.0.7"
    assert choose_address(addresses_of_interface(EVERY, "docker"), route="10.1.0.7") == "172.17.0.1"


def test_address_family_of_the_route_is_preferred():
    assert choose_address([ETH0, ETH0_6], route="fd00::99") == "fd00::7"
    assert choose_address([ETH0_6, ETH0], route="10.0.0.99") == "10.0.0.7"


def test_loopback_is_chosen_last_and_link_local_never():
    assert choose_address([LO, ETH0_6]) == "fd00::7"
    assert choose_address([LO6, LO]) == "127.0.0.1"
    assert choose_address([ETH0_LINK]) is None
    assert choose_address([]) is None


def test_interfaces_include_loopback():
    listed = network.interface_addresses()
    assert "127.0.0.1" in {each.host for each in listed}
    assert {each.interface for each in listed} <= {name for _, name in socket.if_nameindex()} | {"(by host name)"}


def test_ipv6_addresses_are_read_from_proc(tmp_path, monkeypatch):
    def ipv6_addresses():
        return [each for each in network.interface_addresses() if ":" in each.host]

    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe80000000000000000000fffe000001 04 40 20 80     eth0\n"
        "fd000000000000000000000000000002 04 40 00 82     eth0\n"
    )
    monkeypatch.setattr(network, "_LINUX", True)
    monkeypatch.setattr(network, "_IF_INET6", table)
    assert ipv6_addresses() == [
        InterfaceAddress("lo", "::1"),
        InterfaceAddress("eth0", "fe80::ff:fe00:1"),
        InterfaceAddress("eth0", "fd00::2"),
    ]
    table.unlink()
    assert ipv6_addresses() == []


def test_route_to_loopback_is_loopback():
    assert network.address_towards("127.0.0.1") == "127.0.0.1"


def test_is_local():
    assert network.is_local("127.0.0.1")
    assert not network.is_local("198.51.100.1")
