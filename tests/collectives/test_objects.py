"""Collectives of Python objects: what arrives is what was given, of any size, without pickle unless it is allowed."""

from __future__ import annotations

import asyncio
import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import torch

from asyncdist import sync as dist
from asyncdist.config import Config
from asyncdist.errors import GroupError, UsageError
from asyncdist.testing.cluster import world_of

PLAIN = [
    None,
    True,
    -5,
    2**70,
    1.5,
    "ü",
    b"\0\xff",
    [1, [2, []]],
    (3, ("a",)),
    {"k": {1: 2}},
    {1, 2},
    3 + 4j,
    "x" * 200_000,
]


async def done(*works):
    async with asyncio.timeout(20):
        return await asyncio.gather(*works)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_every_object_collective(transport, size):
    async with world_of(size, transport=transport) as groups:
        # Every rank has another object of another size; the last ones are large.
        given = [PLAIN[-1 - rank] for rank in range(size)]
        gathered = [[None] * size for _ in groups]
        results = await done(*(g.all_gather_object(gathered[g.rank()], given[g.rank()]) for g in groups))
        assert gathered == [given] * size
        assert all(result is row for result, row in zip(results, gathered, strict=True))
        for root in range(size):
            output = [None] * size
            await done(*(g.gather_object(given[g.rank()], output if g.rank() == root else None, root) for g in groups))
            assert output == given
            rooms = [["kept", "kept"] for _ in groups]
            await done(
                *(g.scatter_object_list(rooms[g.rank()], given if g.rank() == root else None, root) for g in groups)
            )
            assert rooms == [[value, "kept"] for value in given]
            lists = [list(PLAIN) if rank == root else [0] * len(PLAIN) for rank in range(size)]
            await done(*(g.broadcast_object_list(lists[g.rank()], root) for g in groups))
            assert lists == [PLAIN] * size


async def test_several_at_once(transport):
    async with world_of(3, transport=transport) as groups:
        outputs = [[[None] * 3 for _ in range(6)] for _ in groups]
        works = [
            group.all_gather_object(outputs[group.rank()][turn], "y" * (turn * 50_000 + group.rank()))
            for turn in range(6)
            for group in groups
        ]
        await done(*reversed(works))
        assert all(
            row[turn] == ["y" * (turn * 50_000 + rank) for rank in range(3)] for row in outputs for turn in range(6)
        )


async def test_tensors_and_arrays_in_objects(transport):
    value = {"weights": [torch.arange(6.0).view(2, 3).t(), torch.tensor(2.0)], "mask": np.eye(2, dtype=bool), "n": 1}
    async with world_of(2, transport=transport) as groups:
        rooms = [[value], [None]]
        await done(*(g.broadcast_object_list(rooms[g.rank()], 0) for g in groups))
        got = rooms[1][0]
        assert torch.equal(got["weights"][0], value["weights"][0])
        assert got["weights"][1].shape == ()
        assert (got["mask"] == np.eye(2, dtype=bool)).all()
        got["weights"][0].add_(1)  # it is ours to change
        got["mask"][:] = False


async def test_what_only_a_pickle_could_carry_is_refused(transport):
    async with world_of(2, transport=transport) as (zero, one):
        for call in (
            lambda: zero.all_gather_object([None] * 2, Fraction(1, 2)),
            lambda: zero.broadcast_object_list([1, [Fraction(1, 2)]], 0),
            lambda: zero.send_object_list([{"f": Fraction(1, 2)}], 1),
            lambda: zero.scatter_object_list([None], [1, Fraction(1, 2)], 0),
        ):
            with pytest.raises(UsageError, match=r"fractions\.Fraction cannot be sent .*ASYNCDIST_ALLOW_PICKLE=1"):
                call()
        await done(zero.barrier(), one.barrier())


async def test_pickles_are_carried_where_every_rank_allows_them(transport):
    async with world_of(2, transport=transport, config=Config(allow_pickle=True)) as groups:
        rooms = [[None, None] for _ in groups]
        await done(*(g.all_gather_object(rooms[g.rank()], Fraction(1, 2 + g.rank())) for g in groups))
        assert rooms == [[Fraction(1, 2), Fraction(1, 3)]] * 2


async def test_a_pickle_from_a_peer_is_not_read(transport, monkeypatch):
    """One rank allows pickles and sends one; the other has not and must not open it."""
    monkeypatch.setattr("pickle.loads", lambda *_: pytest.fail("a pickle was read"))
    async with world_of(2, transport=transport) as (zero, one):
        zero._who = dataclasses.replace(zero._who, config=Config(allow_pickle=True))
        room = [None]
        sent = zero.broadcast_object_list([Fraction(1, 2)], 0)
        with pytest.raises(GroupError, match="ASYNCDIST_ALLOW_PICKLE is not set here"):
            async with asyncio.timeout(10):
                await one.broadcast_object_list(room, 0)
        assert room == [None]
        await asyncio.gather(sent, return_exceptions=True)


async def test_lists_of_different_lengths(transport):
    async with world_of(3, transport=transport) as groups:
        works = [g.broadcast_object_list([0] * (2 + (g.rank() == 1)), 0) for g in groups]
        async with asyncio.timeout(10):
            await asyncio.gather(*works, return_exceptions=True)
        with pytest.raises(GroupError, match="broadcasts 2 objects, but this rank's list has 3"):
            works[1].result()


def test_blocking_calls(together, transport):
    def rank(group):
        mine, size = group.rank(), group.size()
        gathered, room, told = [None] * size, [None], [mine, None]
        assert dist.all_gather_object(gathered, {"rank": mine}, group=group) is None
        collected = [None] * size if mine == 1 else None
        dist.gather_object(mine, collected, dst=1, group=group)
        dist.scatter_object_list(room, list("abc") if mine == 2 else None, src=2, group=group)
        dist.broadcast_object_list(told, src=1, group=group)
        return gathered, collected, room, told

    results = together(3, rank, transport=transport)
    for mine, (gathered, collected, room, told) in enumerate(results):
        assert gathered == [{"rank": other} for other in range(3)]
        assert collected == ([0, 1, 2] if mine == 1 else None)
        assert room == ["abc"[mine]]
        assert told == [1, None]
