"""Collectives of Python objects of any size, which need no pickle unless the objects do."""

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
from asyncdist.config import Config
from asyncdist.errors import GroupError, UsageError
from asyncdist.kernel.collectives import p2p
from asyncdist.kernel.memory.serialization import pack
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
    async with asyncio.timeout(60):
        return await asyncio.gather(*works)


async def every_collective(groups, given, root):
    """Return what the ranks receive, of which each gives one object, in an all-gather, a gather and a scatter."""
    gathered, collected = [[None] * len(given) for _ in groups], [None] * len(given)
    results = await done(*(g.all_gather_object(gathered[g.rank()], given[g.rank()]) for g in groups))
    assert all(result is row for result, row in zip(results, gathered, strict=True))
    await done(*(g.gather_object(given[g.rank()], collected if g.rank() == root else None, root) for g in groups))
    rooms = [["kept", "kept"] for _ in groups]
    await done(*(g.scatter_object_list(rooms[g.rank()], given if g.rank() == root else None, root) for g in groups))
    return gathered, collected, rooms


@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_every_object_collective(transport, size):
    async with world_of(size, transport=transport) as groups:
        # Every rank has a different object of a different size; the object of rank 0 is large.
        given = [PLAIN[-1 - rank] for rank in range(size)]
        for root in range(size):
            gathered, collected, rooms = await every_collective(groups, given, root)
            assert gathered == [given] * size
            assert collected == given
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
        # The receiver may change what it has received.
        got["weights"][0].add_(1)
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
    """One rank allows pickles and sends one. The other rank does not, and must not read it."""
    monkeypatch.setattr("pickle.loads", lambda *_: pytest.fail("a pickle was read"))
    async with world_of(2, transport=transport) as (zero, one):
        zero.context = dataclasses.replace(zero.context, config=Config(allow_pickle=True))
        room = [None]
        sent = zero.broadcast_object_list([Fraction(1, 2)], 0)
        with pytest.raises(GroupError, match="ASYNCDIST_ALLOW_PICKLE is not set here"):
            async with asyncio.timeout(60):
                await one.broadcast_object_list(room, 0)
        assert room == [None]
        await asyncio.gather(sent, return_exceptions=True)


class Executes:
    """An object whose pickle calls a function of the sender's choice."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was read",)


WEIGHTS = OrderedDict(weight=torch.eye(2), count=torch.tensor(3))
# Calls that send a value from rank 0 into the list of rank 1.
CALLS = {
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


LONG = {
    "tensor": torch.arange(50_000.0).view(2, -1).t(),
    "parameter": torch.nn.Parameter(torch.ones(40_000)),
    "array": np.arange(30_000),
    "nested": [(1, b"ab" * 50_000)],
    "weights": OrderedDict(weight=torch.full((20_000,), 2.0), short=torch.ones(2)),
}


def is_equal(got, given):
    assert type(got) is type(given)
    if isinstance(given, dict):
        assert list(got) == list(given)
        return all(map(is_equal, got.values(), given.values()))
    if isinstance(given, (list, tuple)):
        return len(got) == len(given) and all(map(is_equal, got, given))
    return bool(np.all(np.asarray(got == given)))


@pytest.mark.parametrize("root", [0, 2])
async def test_long_content_in_every_object_collective(transport, root):
    """Ranks send different numbers of buffers, some none. Nobody receives memory that another rank has."""
    async with world_of(3, transport=transport) as groups:
        given = [LONG, [LONG["array"], "short"], {"n": 1}]
        gathered, collected, rooms = await every_collective(groups, given, root)
        for row in (*gathered, collected):
            assert is_equal(row, given)
        assert is_equal([room[0] for room in rooms], given)
        lists = [list(given) if rank == root else [None] * 3 for rank in range(3)]
        await done(*(g.broadcast_object_list(lists[g.rank()], root) for g in groups))
        assert all(is_equal(each, given) for each in lists)
        received = [each[0] if type(each[0]) is dict else each[0][0] for each in (*gathered, collected, rooms[0])]
        received += [each[0] for rank, each in enumerate(lists) if rank != root]
        starts = [each["array"].__array_interface__["data"][0] for each in (LONG, *received)]
        assert len(set(starts)) == len(starts)


@pytest.mark.parametrize("source", [0, None])
async def test_concurrent_messages_with_long_content_keep_their_order(transport, source):
    messages = [[LONG], [1], [LONG["array"]], [LONG["weights"], LONG["tensor"]], ["short"]]
    async with world_of(2, transport=transport) as (zero, one):
        rooms = [[None] * len(message) for message in messages]
        received = [one.recv_object_list(room, source) for room in rooms]
        await done(*(zero.send_object_list(message, 1) for message in messages), *received)
        assert is_equal(rooms, messages)
        assert [work.result() for work in received] == [0] * len(messages)


def send_unchecked(call, by, forger):
    """Call as a malicious rank would: with a pickle that executes code where it is read."""
    if by == "a pickle":
        forger.setattr(p2p, "pack", lambda value, **_: pack(value, allow_pickle=True))
    else:
        forger.setattr("asyncdist.kernel.memory.serialization._load", lambda saved: None)
    return call()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("by", ["a pickle", "torch.save"])
async def test_weights_only_refuses_executable_pickles(call, by, monkeypatch):
    """Every rank allows pickles, and one sends code: the call and the group fail, and no rank executes the code."""
    async with world_of(2, config=Config(allow_pickle=True)) as (zero, one):
        with pytest.raises(UsageError, match=r"Executes cannot be sent with weights_only=True"):
            call(zero, Executes(), [None, None])
        with monkeypatch.context() as forger:
            sent = send_unchecked(lambda: call(zero, Executes(), [None, None]), by, forger)
        room = ["kept", "kept"]
        async with asyncio.timeout(60):
            _, refused = await asyncio.gather(sent, call(one, "harmless", room), return_exceptions=True)
            # The sender may have completed its call before the group failed.
            with pytest.raises(GroupError):
                await zero.barrier()
        assert isinstance(refused, GroupError)
        assert re.search(
            r"failed on rank .*(a peer sent a pickle, and|refuses it: .*not an allowed global)", str(refused)
        )
        assert room == ["kept", "kept"]


async def test_lists_of_different_lengths_fail_the_group(transport):
    async with world_of(3, transport=transport) as groups:
        works = [g.broadcast_object_list([0] * (2 + (g.rank() == 1)), 0) for g in groups]
        async with asyncio.timeout(60):
            await asyncio.gather(*works, return_exceptions=True)
            with pytest.raises(GroupError, match="broadcasts 2 objects, but this rank's list has 3") as failed:
                works[1].result()
            assert isinstance(failed.value.__cause__, UsageError)
            with pytest.raises(GroupError):
                await groups[0].barrier()


@pytest.mark.parametrize("value", [{"k": 1}, torch.Size((1, 2))], ids=["plain", "weights only"])
def test_blocking_calls(together, transport, value):
    def rank(group):
        own, size = group.rank(), group.size()
        options = {"group": group, "weights_only": isinstance(value, torch.Size)}
        gathered, scattered, received = [None] * size, [None], [None]
        collected = [None] * size if own == 1 else None
        broadcast = [value if own == 1 else None]
        assert dist.all_gather_object(gathered, value, **options) is None
        assert dist.gather_object(value, collected, dst=1, **options) is None
        assert dist.scatter_object_list(scattered, [value] * size if own == 2 else None, src=2, **options) is None
        assert dist.broadcast_object_list(broadcast, src=1, **options) is None
        if own == 0:
            assert dist.send_object_list([value], dst=1, **options) is None
        elif own == 1:
            assert dist.recv_object_list(received, src=0, **options) == 0
        assert gathered == [value] * size
        assert collected == (gathered if own == 1 else None)
        assert scattered == broadcast == [value]
        assert received == [value if own == 1 else None]

    together(3, rank, transport=transport)
