"""Collectives of tensors that do not fit into an area, staged near or far ahead by each member."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict

import pytest
import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.config import Config
from asyncdist.errors import SharedMemoryError
from asyncdist.kernel.memory.shared_arena import Arena
from asyncdist.testing.cluster import world_of
from asyncdist.testing.collective_cases import moving, reducing
from asyncdist_transports.shm.collectives import streaming
from asyncdist_transports.shm.collectives.slot_table import SLOTS, STREAM_PIECES
from tests.support.ranks import native_of, run_at_once

SMALL = Config().with_(shm_area_nbytes=4096)
PIECE = 1024  # float32 elements of a small area


def numbers(group, count):
    return (torch.arange(count) % 50 + group.rank()).float()


def total(groups, count):
    return (torch.arange(count) % 50 * len(groups) + sum(range(len(groups)))).float()


async def check(groups, *counts):
    """Start an all-reduce of each size on every rank, all of them before the first has finished, and compare."""
    tensors = [[numbers(group, count) for count in counts] for group in groups]
    works = [group.all_reduce(tensor) for group, row in zip(groups, tensors, strict=True) for tensor in row]
    await asyncio.gather(*works)
    for row in tensors:
        for tensor, count in zip(row, counts, strict=True):
            assert torch.equal(tensor, total(groups, count))


def stage(group, far):
    """Let a member always stage ``far`` rounds ahead."""
    native_of(group).large.tuners = defaultdict(type("Decided", (streaming.AheadTuner,), {"choose": lambda tried: far}))


async def test_concurrent_collectives_share_the_stream():
    async with world_of(2, transport="shm", config=SMALL) as groups:
        for _ in range(3):
            await check(groups, 40 * PIECE, 10, 21 * PIECE + 1, 2 * PIECE, 5, 70 * PIECE, *[3 * PIECE] * 10)


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
        # The first call stages near.
        await check(groups, 20 * PIECE)

        def full(arena, offset, nbytes):
            if len(refused) < 2:
                refused.append(nbytes)
                raise SharedMemoryError(os.strerror(28))
            reserve(arena, offset, nbytes)

        monkeypatch.setattr(Arena, "reserve", full)
        await check(groups, 20 * PIECE)
        assert len(refused) == 2


def test_tuner_keeps_the_faster_distance():
    tried = streaming.AheadTuner()
    far = streaming.AHEAD
    speed = {0: 5.0, far: 2.0}

    def turns(count):
        chosen = []
        for _ in range(count):
            chosen.append(tried.choose())
            tried.record(chosen[-1], [9.0, speed[chosen[-1]], 0.1])
        return chosen

    assert turns(32) == [0, far, 0, far, *[far] * 28]
    # The first of 32 calls tries the slower distance.
    assert turns(32) == [0, *[far] * 31]
    speed[0] = 1.0
    assert turns(32) == [0] * 32
    speed[far] = 0.5
    assert turns(32) == [far] * 32
    # Two slow calls in a row change the distance without a trial.
    speed[far] = 5.0
    assert turns(31) == [0, far, far, *[0] * 28]


def pieces_of(group):
    """Return a list to which a member adds each piece of the stream in which it stages from now on."""
    slots, pieces = native_of(group).slots, []
    wait_reusable = slots.wait_reusable

    def noted(number, round_index, readers):
        yield from wait_reusable(number, round_index, readers)
        pieces.append(slots.area_index(number, round_index, slots.words) - 2 * SLOTS)

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
    """The root of three broadcasts fills the stream, and waits until the other rank reads."""
    async with world_of(2, transport="shm", config=SMALL) as groups:
        stage(groups[0], streaming.AHEAD)
        pieces = pieces_of(groups[0])
        sent = [numbers(groups[0], 10 * PIECE) + call for call in range(3)]
        sends = [groups[0].broadcast(tensor, 0) for tensor in sent]
        await sends[0]
        await eventually(lambda: len(pieces) == STREAM_PIECES)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(pieces) == STREAM_PIECES
        received = [torch.empty(10 * PIECE) for _ in sent]
        await asyncio.gather(*sends, *[groups[1].broadcast(tensor, 0) for tensor in received])
        assert all(map(torch.equal, received, sent))
        assert len(pieces) == 30


async def check_all(groups, *counts):
    """Start every collective of a size on every rank, all of them before the first has finished, and compare."""
    for count in counts:
        cases = [*reducing(len(groups), count, torch.float32), *moving(len(groups), count, torch.float32)]
        await run_at_once(groups, cases)


@pytest.mark.parametrize(
    "ahead",
    [[0, 0], [streaming.AHEAD] * 2, [0, streaming.AHEAD], [streaming.AHEAD, 1], [2, 0], [streaming.AHEAD, 0, 3]],
)
async def test_every_collective_may_be_staged_ahead(ahead):
    names = {"all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter", "gather", "reduce"}
    async with world_of(len(ahead), transport="shm", config=SMALL) as groups:
        for group, far in zip(groups, ahead, strict=True):
            stage(group, far)
        await check_all(groups, PIECE + 1, 2 * PIECE, 17 * PIECE, 40 * PIECE + 5)
        for group in groups:
            assert names <= {name for name, _, _ in native_of(group).large.tuners}


async def test_collective_uses_slot_areas_while_a_later_one_has_the_stream():
    async with world_of(3, transport="shm", config=SMALL) as groups:
        for group in groups[:2]:
            native_of(group).slots.streamed = 1 << 20
        await check_all(groups, 20 * PIECE + 1)
        assert native_of(groups[0]).slots.streamed == 1 << 20
