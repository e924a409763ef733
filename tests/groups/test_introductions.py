"""What the ranks of a world of several blocks tell each other at the start."""

import asyncio
from types import SimpleNamespace

import pytest

from asyncdist.config import Config
from asyncdist.errors import RendezvousError
from asyncdist.groups import introductions
from asyncdist.groups.world import open_world
from asyncdist.rendezvous import BLOCK
from asyncdist.store import AsyncStore, HashStore, StoreServer
from asyncdist.testing.cluster import world_of
from tests.support.ranks import sums

SIZE = BLOCK + 3
"""The ranks of two blocks."""


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
async def test_ranks_of_several_blocks_reach_each_other(transport):
    async with world_of(SIZE, transport=transport) as groups:
        assert set(await sums(groups)) == {SIZE * (SIZE - 1) / 2}
        endpoints = [group.endpoint for group in groups]
        assert len({endpoint.hosts[SIZE - 1] for endpoint in endpoints}) == 1
        assert all(sorted(endpoint.processes) == list(range(SIZE)) for endpoint in endpoints)
        with pytest.raises(IndexError):
            endpoints[0].hosts[SIZE]


async def test_ranks_of_another_block_with_other_settings_are_named():
    store, home = HashStore(), asyncio.get_running_loop()
    settings = [
        Config(segment_nbytes=1 << 20 if rank == SIZE - 1 else 2 << 20, calibrate=False) for rank in range(SIZE)
    ]
    opening = (
        open_world(backend="inproc", store=store, rank=rank, world_size=SIZE, timeout=20.0, home=home, config=each)
        for rank, each in enumerate(settings)
    )
    outcomes = await asyncio.gather(*opening, return_exceptions=True)
    assert {type(each) for each in outcomes} == {RendezvousError}
    assert f"rank {SIZE - 1} runs with" in str(outcomes[0])
    assert str(1 << 20) in str(outcomes[0])
    assert str(2 << 20) in str(outcomes[0])
    assert str(outcomes[-1]).startswith("rank 0 runs with")


async def test_rank_that_ends_before_it_tells_its_settings_is_named(monkeypatch):
    monkeypatch.setattr(introductions, "_MOST_SECONDS", 0.01)
    async with (
        await StoreServer.start("127.0.0.1", 0) as server,
        await AsyncStore.connect("127.0.0.1", server.port) as store,
    ):
        error = await introductions.difference(SimpleNamespace(rank=1, store=store), {}, 3)
    assert str(error).startswith("rank 3 runs with another version or other settings than rank 1, and has ended before")
