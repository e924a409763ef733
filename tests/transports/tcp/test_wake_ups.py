"""How few bytes wake a rank that sleeps while a large message arrives, and which connections a turn reads."""

from __future__ import annotations

import asyncio
import socket

import pytest
import torch

from asyncdist.testing.cluster import world_of
from asyncdist_transports.tcp.connection import Inbound

LARGE = 4 << 20


@pytest.fixture
def marks(monkeypatch):
    """Return the values to which the ranks set the least number of bytes, and the sockets."""
    values, sockets, plain = [], [], Inbound._wake_at

    def wake_at(self, nbytes):
        plain(self, nbytes)
        values.append(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT))
        sockets.append(self._sock)

    monkeypatch.setattr(Inbound, "_wake_at", wake_at)
    return values, sockets


async def test_large_messages_wake_for_larger_reads(marks):
    values, sockets = marks
    async with world_of(2, transport="tcp") as groups:
        tensors = [torch.ones(LARGE) for _ in groups]
        await asyncio.gather(*(group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)))
        assert all(tensor.eq(2).all() for tensor in tensors)
        assert max(values) == 128 << 10
        # A header wakes the rank again.
        assert {sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) for sock in sockets} == {1}


async def test_small_messages_change_no_option(marks):
    async with world_of(2, transport="tcp") as groups:
        await asyncio.gather(*(group.all_reduce(torch.ones(16_384)) for group in groups))
    assert marks == ([], [])


async def test_every_connection_is_read_among_several():
    """With more than one incoming connection, a turn asks all of them with one poll."""
    async with world_of(4, transport="tcp") as groups:
        for count in (1, 3000, 300_000):
            tensors = [torch.full((count,), float(group.rank())) for group in groups]
            works = [group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)]
            works += [group.barrier() for group in groups]
            await asyncio.gather(*works)
            assert all(tensor.eq(6).all() for tensor in tensors)
