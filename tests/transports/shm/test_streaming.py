"""All-reduces of tensors that do not fit into an area: staged at once or ahead, each member as it likes."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict

import pytest
import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.config import Config
from asyncdist.errors import SharedMemoryError
from asyncdist.memory.shared_arena import Arena
from asyncdist.testing.cluster import world_of
from asyncdist_transports.shm.collectives import streaming
from asyncdist_transports.shm.collectives.slot_table import SLOTS, STREAM_PIECES

SMALL = Config().with_(shm_area_nbytes=4096)
PIECE = 1024  # float32 elements of a small area


def numbers(group, count):
    return (torch.arange(count) % 50 + group.rank()).float()


def total(groups, count):
    return (torch.arange(count) % 50 * len(groups) + sum(range(len(groups)))).float()


async def check(groups, *counts):
    """Start an all-reduce of each size on every rank, all of them before the first is over, and compare."""
    tensors = [[numbers(group, count) for count in counts] for group in groups]
    works = [group.all_reduce(tensor) for group, row in zip(groups, tensors, strict=True) for tensor in row]
    await asyncio.gather(*works)
    for row in tensors:
        for tensor, count in zip(row, counts, strict=True):
            assert torch.equal(tensor, total(groups, count))


def stage(group, far):
    """Have a member stage so far ahead, always."""
    group._native._stream._tuners = defaultdict(
        type("Decided", (streaming._AheadTuner,), {"choose": lambda tried: far})
    )


@pytest.mark.parametrize("ahead", [[0, 0], [streaming.AHEAD] * 2, [0, streaming.AHEAD], [streaming.AHEAD, 1], [2, 0]])
async def test_members_stage_different_distances_ahead(ahead):
    async with world_of(2, transport="shm", config=SMALL) as groups:
        for group, far in zip(groups, ahead, strict=True):
            stage(group, far)
        for count in (2 * PIECE, PIECE + 1, 3 * PIECE - 1, 7 * PIECE + 5, STREAM_PIECES * PIECE, 50 * PIECE + 7):
            await check(groups, count)
        assert all(group._native._stream._tuners for group in groups)


async def test_concurrent_collectives_share_the_stream():
    async with world_of(2, transport="shm", config=SMALL) as groups:
        for _ in range(3):
            await check(groups, 40 * PIECE, 10, 21 * PIECE + 1, 2 * PIECE, 5, 70 * PIECE, *[3 * PIECE] * 10)


async def test_coalesced_tensors_share_the_stream():
    async with world_of(2, transport="shm", config=SMALL) as groups:
        counts = (30 * PIECE + 3, 17, 2 * PIECE, 45 * PIECE)
        for _ in range(3):
            rows = [[numbers(group, count) for count in counts] for group in groups]
            await asyncio.gather(*[
                group.all_reduce_coalesced(row) for group, row in zip(groups, rows, strict=True)
            ])  # fmt: skip
            for row in rows:
                assert all(torch.equal(t, total(groups, count)) for t, count in zip(row, counts, strict=True))


async def test_more_than_two_members_with_tiny_areas():
    async with world_of(3, transport="shm", config=SMALL) as groups:
        for _ in range(3):
            await check(groups, 20 * PIECE + 3, 2 * PIECE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
async def test_near_and_far_staging_give_identical_bits(dtype):
    op = ReduceOp.SUM if dtype is torch.int64 else ReduceOp.AVG
    async with world_of(2, transport="shm", config=SMALL) as groups:
        source = [(torch.randn(30 * PIECE, generator=torch.Generator().manual_seed(r)) * 9).to(dtype) for r in (0, 1)]
        seen = []
        for _ in range(3):
            tensors = [tensor.clone() for tensor in source]
            await asyncio.gather(*[g.all_reduce(t, op) for g, t in zip(groups, tensors, strict=True)])
            seen += tensors
        assert all(torch.equal(tensor, seen[0]) for tensor in seen)
        exact = source[0].double() + source[1].double()
        torch.testing.assert_close(seen[0], (exact if op is ReduceOp.SUM else exact / 2).to(dtype))


async def test_staging_ahead_falls_back_without_memory(monkeypatch):
    reserve, refused = Arena.reserve, []
    async with world_of(2, transport="shm", config=SMALL) as groups:
        await check(groups, 20 * PIECE)  # at once, as the first always is

        def full(arena, offset, nbytes):
            if len(refused) < 2:
                refused.append(nbytes)
                raise SharedMemoryError(os.strerror(28))
            reserve(arena, offset, nbytes)

        monkeypatch.setattr(Arena, "reserve", full)
        await check(groups, 20 * PIECE)
        assert len(refused) == 2


def test_tuner_keeps_the_faster_distance():
    tried = streaming._AheadTuner()
    far = streaming.AHEAD
    speed = {0: 5.0, far: 2.0}

    def turns(count):
        chosen = []
        for _ in range(count):
            chosen.append(tried.choose())
            tried.record(chosen[-1], [9.0, speed[chosen[-1]], 0.1])
        return chosen

    assert turns(32) == [0, far, 0, far, *[far] * 28]
    assert turns(32) == [0, *[far] * 31]  # a trial
    speed[0] = 1.0
    assert turns(32) == [0] * 32  # this one finds that it is better now
    speed[far] = 0.5
    assert turns(32) == [far] * 32
    speed[far] = 5.0
    assert turns(31) == [0, far, far, *[0] * 28]  # without a trial: once may be chance, twice is not


def pieces_of(group):
    """Return the pieces of the stream in which a member stages from now on, as they come."""
    slots, pieces = group._native._slots, []
    claim = slots.wait_reusable

    def noted(number, turn, takers):
        yield from claim(number, turn, takers)
        pieces.append(slots._area_index(number, turn, slots.words) - 2 * SLOTS)

    slots.wait_reusable = noted
    return pieces


async def test_calls_continue_in_the_stream_after_the_previous_call():
    async with world_of(2, transport="shm", config=SMALL) as groups:
        for group in groups:
            stage(group, streaming.AHEAD)
        pieces = [pieces_of(group) for group in groups]
        for _ in range(5):
            await check(groups, 5 * PIECE, 2 * PIECE)
        assert pieces == [[at % STREAM_PIECES for at in range(35)]] * 2
        for group in groups:
            stage(group, 0)
        await check(groups, 5 * PIECE, 2 * PIECE)
        assert all(set(of_rank[35:]) == {0, 1} for of_rank in pieces)


async def test_piece_is_not_overwritten_before_it_is_read(eventually):
    """The root of two broadcasts may stage as much as there is room for before anybody takes; not one piece more."""
    async with world_of(2, transport="shm", config=SMALL) as groups:
        stage(groups[0], streaming.AHEAD)
        pieces = pieces_of(groups[0])
        given = [numbers(groups[0], 10 * PIECE) + call for call in range(3)]
        sends = [groups[0].broadcast(tensor, 0) for tensor in given]
        await sends[0]
        await eventually(lambda: len(pieces) == STREAM_PIECES)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(pieces) == STREAM_PIECES
        got = [torch.empty(10 * PIECE) for _ in given]
        await asyncio.gather(*sends, *[groups[1].broadcast(tensor, 0) for tensor in got])
        assert all(torch.equal(result, tensor) for result, tensor in zip(got, given, strict=True))
        assert len(pieces) == 30


def exchanged(group, count):
    """Start every collective in which all stage and take; return the works, and the results with what they must be."""
    rank, size = group.rank(), group.size()
    each = [numbers(group, count) * 0 + 10 * rank + other for other in range(size)]
    rows = [torch.empty(count) for _ in range(size)]
    parts = [torch.empty(count - other) for other in range(size)]
    own = torch.empty(count)
    works = [
        group.all_gather(rows, numbers(group, count)),
        group.reduce_scatter(own, each),
        group.all_to_all(parts, [tensor[: count - rank] for tensor in each]),
    ]
    gathered = [(torch.arange(count) % 50 + other).float() for other in range(size)]
    sent = [torch.full((count - other,), 10.0 * other + rank) for other in range(size)]
    summed = torch.full((count,), float(sum(10 * other + rank for other in range(size))))
    return works, [*zip(rows, gathered, strict=True), *zip(parts, sent, strict=True), (own, summed)]


async def check_exchanges(groups, *counts):
    for count in counts:
        started = [exchanged(group, count) for group in groups]
        await asyncio.gather(*(work for works, _ in started for work in works))
        assert all(torch.equal(result, expected) for _, results in started for result, expected in results)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("ahead", [[0] * 3, [streaming.AHEAD] * 3, [streaming.AHEAD, 0, 3]])
async def test_every_exchange_may_be_staged_ahead(ahead, size):
    async with world_of(size, transport="shm", config=SMALL) as groups:
        for group in groups:
            stage(group, ahead[group.rank()])
        await check_exchanges(groups, PIECE + 1, 17 * PIECE, 40 * PIECE + 5)
        for group in groups:
            assert len({name for (name, _), _ in group._native._stream._tuners}) == 3


def sent(group, count):
    """Start every collective in which some only send; return the works, and the results with what they must be."""
    rank, size = group.rank(), group.size()
    everybody = [(torch.arange(count) % 50 + other).float() for other in range(size)]
    given, summed, own = numbers(group, count), numbers(group, count), torch.empty(count)
    rows = [torch.empty(count) for _ in range(size)]
    works = [
        group.broadcast(given, 1),
        group.reduce(summed, 0),
        group.gather(numbers(group, count), rows if rank == 0 else None, 0),
        group.scatter(own, everybody if rank == 1 else None, 1),
    ]
    results = [(given, everybody[1]), (own, everybody[rank])]
    if rank == 0:
        results += [(summed, sum(everybody)), *zip(rows, everybody, strict=True)]
    return works, results


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("ahead", [0, streaming.AHEAD, 3])
async def test_sending_only_members_stage_ahead(ahead, size):
    async with world_of(size, transport="shm", config=SMALL) as groups:
        for group in groups:
            stage(group, ahead)
        for count in (PIECE + 1, 17 * PIECE, 40 * PIECE + 5):
            started = [sent(group, count) for group in groups]
            await asyncio.gather(*(work for works, _ in started for work in works))
            assert all(torch.equal(result, expected) for _, results in started for result, expected in results)
        kinds = [{name for (name, _), _ in group._native._stream._tuners} for group in groups]
        assert kinds == [set(), {"broadcast", "scatter", "gather", "reduce"}, {"gather", "reduce"}][:size]


async def test_collective_uses_slot_areas_while_a_later_one_has_the_stream():
    async with world_of(3, transport="shm", config=SMALL) as groups:
        for group in groups[:2]:
            group._native._slots._streamed = 1 << 20
        await check_exchanges(groups, 20 * PIECE, 30 * PIECE + 1)
        assert groups[0]._native._slots._streamed == 1 << 20
