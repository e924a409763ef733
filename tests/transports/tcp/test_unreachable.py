"""A network that is down for a moment: TCP refuses at once to connect, and the transport tries again within the limit."""

from __future__ import annotations

import errno
import socket

import pytest
import torch

from asyncdist.config import Config
from asyncdist.errors import PeerLostError
from asyncdist.testing.cluster import world_of
from asyncdist_transports.tcp.connection import Outbound
from asyncdist_transports.tcp.sockets import set_options
from tests.support.stopwatch import Stopwatch


class Unreachable(socket.socket):
    """A socket without a route to anywhere."""

    def connect_ex(self, where):
        return errno.ENETUNREACH


@pytest.fixture
def network(monkeypatch):
    """The number of attempts that fail from now on."""
    left, new_socket = [0], Outbound._new_socket

    def make(connection):
        if left[0] <= 0:
            return new_socket(connection)
        left[0] -= 1
        sock = Unreachable(socket.AF_INET, socket.SOCK_STREAM)
        set_options(sock, connection._host)
        return sock

    monkeypatch.setattr(Outbound, "_new_socket", make)
    return left


async def test_message_arrives_after_the_network_has_come_back(network):
    async with world_of(2, transport="tcp") as (zero, one):
        network[0] = 3
        received = torch.zeros(4)
        sending = zero.send(torch.ones(4), 1)
        await one.recv(received, 0)
        await sending
        assert network[0] == 0
        assert received.sum() == 4


async def test_peer_is_lost_after_the_limit_with_the_reason(network):
    async with world_of(2, transport="tcp", config=Config(token="secret", heartbeat=0.5)) as (zero, _):
        network[0] = 10**6
        since = Stopwatch()
        with pytest.raises(PeerLostError, match=r"cannot connect to it at 127.0.0.1:\d+: Network is unreachable"):
            await zero.send(torch.ones(4), 1)
        assert 0.4 < since.seconds() < 1.5
        network[0] = 0


async def test_error_of_a_timeout_says_why_a_peer_is_not_reached(network):
    async with world_of(2, transport="tcp") as (zero, _):
        network[0] = 10**6
        with pytest.raises(
            Exception, match=r"no connection to rank 1 at .* yet, tried for \d s: Network is unreachable"
        ):
            await zero.send(torch.ones(4), 1, timeout=0.3)
        network[0] = 0


async def test_world_that_is_left_tries_no_more(network):
    async with world_of(2, transport="tcp") as (zero, _):
        network[0] = 10**6
        sending = zero.send(torch.ones(4), 1)
        zero.world.leave()
        with pytest.raises(Exception, match="destroyed while this operation was pending"):
            await sending
        left = network[0]
    assert network[0] == left
