"""Ranks of a crowded host, which meet when they first need each other, and whose small collectives go along a tree."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket

import pytest
import torch

from asyncdist.errors import MismatchError, PeerLostError
from asyncdist.kernel.algorithms import selection
from asyncdist.testing.cluster import world_of
from asyncdist_transports.shm import meetings, transport
from asyncdist_transports.shm.local_listener import PeerRefused

SIZE = 6


@pytest.fixture(autouse=True)
def crowded(monkeypatch):
    """Six ranks are a crowd, on one core."""
    monkeypatch.setattr(selection, "CROWD", 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(transport.ShmTransport, "_is_crowded", property(lambda shm: len(shm._cores) > 4))


def shm_of(group):
    return next(each for each in group.endpoint.transport_selector.transports if each.name == "shm")


def met(groups):
    return [sorted(shm_of(group).local_peers) for group in groups]


async def check_sums(groups, count=10):
    tensors = [torch.full((count,), group.rank() + 1.0) for group in groups]
    await asyncio.gather(*[group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)])
    assert {tensor[-1].item() for tensor in tensors} == {len(groups) * (len(groups) + 1) / 2}


async def test_ranks_meet_those_of_their_tree_at_the_start_and_others_when_they_need_them():
    async with world_of(SIZE, transport="shm") as groups:
        joined = [[1, 2, 4], [0], [0, 3], [2], [0, 5], [4]]
        assert met(groups) == joined
        await asyncio.gather(*[group.barrier() for group in groups])
        await check_sums(groups)
        assert met(groups) == joined
        await check_sums(groups, 100_000)
        assert met(groups) == [[each for each in range(SIZE) if each != rank] for rank in range(SIZE)]
        # Slots are reused in turn by calls of both kinds.
        for number in range(40):
            await check_sums(groups, 100_000 if number % 3 else 10)


async def test_ranks_that_send_to_each_other_at_the_same_time_connect_once():
    async with world_of(SIZE, transport="shm") as groups:
        pairs = list(itertools.permutations(range(SIZE), 2))
        received = {pair: torch.zeros(100) for pair in pairs}
        sends = [groups[source].send(torch.full((100,), float(source)), target) for source, target in pairs]
        receives = [groups[target].recv(received[source, target], source) for source, target in pairs]
        await asyncio.gather(*sends, *receives)
        assert all(tensor[-1] == source for (source, _), tensor in received.items())
        await check_sums(groups, 100_000)


@pytest.mark.parametrize("packet", [b"garbage", bytes(68), b""])
async def test_stranger_that_connects_later_is_refused(packet):
    async with world_of(SIZE, transport="shm") as groups:
        name = shm_of(groups[0])._listener.name
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(f"\0asyncdist-{name}")
            stranger.send(packet)
            await check_sums(groups, 100_000)


@pytest.mark.parametrize("counts", [(10, 11), (10, 100_000), (100_000, 100_001)])
@pytest.mark.parametrize("other", [0, 3, 5])
async def test_different_calls_are_a_mismatch(counts, other):
    async with world_of(SIZE, transport="shm") as groups:
        await check_sums(groups, counts[0])
        calls = [group.all_reduce(torch.ones(counts[group.rank() == other]), timeout=20) for group in groups]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(result) for result in results} == {MismatchError}


async def test_rank_that_cannot_be_met_is_lost(monkeypatch):
    async def refuse(*_):
        raise PeerRefused("its memory is smaller than announced")

    async with world_of(SIZE, transport="shm") as groups:
        monkeypatch.setattr(meetings, "connect_peer", refuse)
        with pytest.raises(PeerLostError, match="rank 5 was lost"):
            await groups[0].send(torch.ones(10), 5, timeout=20)


async def test_rank_that_has_left_cannot_be_met():
    async with world_of(SIZE, transport="shm") as groups:
        groups[5].world.leave()
        with pytest.raises(PeerLostError, match="rank 5 was lost"):
            await groups[0].send(torch.ones(10), 5, timeout=20)
