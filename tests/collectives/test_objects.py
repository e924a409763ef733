"""Collectives of Python objects: what arrives is what was given, of any size, without pickle unless it is allowed."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
import torch

from asyncdist import sync as dist
from asyncdist.collectives import p2p
from asyncdist.config import Config
from asyncdist.errors import GroupError, UsageError
from asyncdist.memory.serialization import pack
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


async def test_objects_that_need_pickle_are_refused(transport):
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
        zero.context = dataclasses.replace(zero.context, config=Config(allow_pickle=True))
        room = [None]
        sent = zero.broadcast_object_list([Fraction(1, 2)], 0)
        with pytest.raises(GroupError, match="ASYNCDIST_ALLOW_PICKLE is not set here"):
            async with asyncio.timeout(10):
                await one.broadcast_object_list(room, 0)
        assert room == [None]
        await asyncio.gather(sent, return_exceptions=True)


class Executes:
    """What a pickle can be: reading it calls a function of the sender's choice."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was read",)


WEIGHTS = OrderedDict(weight=torch.eye(2), count=torch.tensor(3))
CALLS = {  # what root 0 sends to rank 1, and the room into which rank 1 receives
    "all_gather": lambda g, value, room: g.all_gather_object(room, value, weights_only=True),
    "gather": lambda g, value, room: g.gather_object(value, room if g.rank() else None, 1, weights_only=True),
    "scatter": lambda g, value, room: g.scatter_object_list(
        room, None if g.rank() else [None, value], 0, weights_only=True
    ),
    "broadcast": lambda g, value, room: g.broadcast_object_list(
        room if g.rank() else [value, None], 0, weights_only=True
    ),
    "send": lambda g, value, room: (
        g.recv_object_list(room, 0, weights_only=True)
        if g.rank()
        else g.send_object_list([value, None], 1, weights_only=True)
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_weights_only_types_need_no_pickle(transport, call):
    async with world_of(2, transport=transport) as groups:
        rooms = [[None, None], [None, None]]
        await done(*(call(group, WEIGHTS, rooms[group.rank()]) for group in groups))
        got = rooms[1][0]
        assert type(got) is OrderedDict
        assert all(torch.equal(got[name], WEIGHTS[name]) for name in WEIGHTS)


def sent_without_a_look(call, by, forger):
    """Send, as a rank would that does not care, what executes where it is read."""
    if by == "a pickle":
        forger.setattr(p2p, "pack", lambda value, **_: pack(value, allow_pickle=True))
    else:
        forger.setattr("asyncdist.memory.serialization._load", lambda saved: None)
    return call()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("by", ["a pickle", "torch.save"])
async def test_weights_only_refuses_executable_pickles(call, by, monkeypatch):
    """Every rank allows pickles, and one sends what executes: the call fails where that would be read, and the group."""
    async with world_of(2, config=Config(allow_pickle=True)) as (zero, one):
        with pytest.raises(UsageError, match=r"Executes cannot be sent with weights_only=True"):
            call(zero, Executes(), [None, None])
        with monkeypatch.context() as forger:
            sent = sent_without_a_look(lambda: call(zero, Executes(), [None, None]), by, forger)
        room = ["kept", "kept"]
        async with asyncio.timeout(20):
            _, refused = await asyncio.gather(sent, call(one, "harmless", room), return_exceptions=True)
            with pytest.raises(GroupError):  # a sender that had nothing left to wait for hears of it, too
                await zero.barrier()
        assert isinstance(refused, GroupError)
        assert re.search(
            r"failed on rank .*(a peer sent a pickle, and|refuses it: .*not an allowed global)", str(refused)
        )
        assert room == ["kept", "kept"]


async def test_lists_of_different_lengths(transport):
    async with world_of(3, transport=transport) as groups:
        works = [g.broadcast_object_list([0] * (2 + (g.rank() == 1)), 0) for g in groups]
        async with asyncio.timeout(10):
            await asyncio.gather(*works, return_exceptions=True)
        with pytest.raises(GroupError, match="broadcasts 2 objects, but this rank's list has 3"):
            works[1].result()


def with_weights(group):
    """Call every one with what is carried with ``weights_only=True`` alone."""
    mine, size, value = group.rank(), group.size(), torch.Size((1, 2))
    how = {"group": group, "weights_only": True}
    gathered, room, told = [None] * size, [None], [value if mine == 1 else None]
    dist.all_gather_object(gathered, value, **how)
    assert gathered == [value] * size
    collected = [None] * size if mine == 1 else None
    dist.gather_object(value, collected, dst=1, **how)
    assert collected == ([value] * size if mine == 1 else None)
    dist.scatter_object_list(room, [value] * size if mine == 2 else None, src=2, **how)
    dist.broadcast_object_list(told, src=1, **how)
    assert [*room, *told] == [value, value]
    if mine == 0:
        dist.send_object_list([value], dst=1, **how)
    elif mine == 1:
        dist.recv_object_list(room, src=0, **how)
    assert type(room[0]) is torch.Size


def test_blocking_calls(together, transport):
    def rank(group):
        mine, size = group.rank(), group.size()
        gathered, room, told = [None] * size, [None], [mine, None]
        assert dist.all_gather_object(gathered, {"rank": mine}, group=group) is None
        collected = [None] * size if mine == 1 else None
        dist.gather_object(mine, collected, dst=1, group=group)
        dist.scatter_object_list(room, list("abc") if mine == 2 else None, src=2, group=group)
        dist.broadcast_object_list(told, src=1, group=group)
        with_weights(group)
        return gathered, collected, room, told

    results = together(3, rank, transport=transport)
    for mine, (gathered, collected, room, told) in enumerate(results):
        assert gathered == [{"rank": other} for other in range(3)]
        assert collected == ([0, 1, 2] if mine == 1 else None)
        assert room == ["abc"[mine]]
        assert told == [1, None]
