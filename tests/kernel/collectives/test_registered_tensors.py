"""Collectives on registered tensors: correct for every choice of registered tensors, and without staging."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
import torch

import asyncdist
from asyncdist.kernel.memory.shared_arena import unavailable
from asyncdist.testing.cluster import run_ranks, world_of
from asyncdist.testing.collective_cases import moving, reducing
from asyncdist_transports.shm.collectives.slot_table import SlotTable
from asyncdist_transports.shm.collectives.small import MOST_NBYTES
from asyncdist_transports.shm.collectives.zero_copy import MIN_NBYTES
from tests.support.placing import Placing

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no shared memory: {unavailable()}")

TABLE_NBYTES = 64
"""Most bytes of the table in which a rank of these tests publishes the locations of its tensors."""

SIZES = [(MIN_NBYTES // 4 + 16, torch.float32), (MIN_NBYTES // 2 + 1, torch.bfloat16), (100_003, torch.int32)]


@pytest.fixture
def staged(monkeypatch):
    """The bytes of the areas in which ranks staged data, one entry for each piece."""
    entries = []
    lock = threading.Lock()
    reserve = SlotTable.back

    def note(slots, which, nbytes):
        with lock:
            if nbytes > TABLE_NBYTES:
                entries.append(nbytes)
        reserve(slots, which, nbytes)

    monkeypatch.setattr(SlotTable, "back", note)
    return entries


def whole(count, dtype):
    return asyncdist.empty(count, dtype=dtype)


def part(count, dtype):
    return asyncdist.empty(count + 30, dtype=dtype)[13 : 13 + count]


def ordinary(count, dtype):
    return torch.empty(count, dtype=dtype)


def cases(size, count, dtype):
    """Yield the collectives with the sizes from which on registered tensors are not staged."""
    large = count + MOST_NBYTES // dtype.itemsize
    yield next(reducing(size, count, dtype))
    yield from itertools.islice(reducing(size, large, dtype), 1, None)
    yield from moving(size, large, dtype)


async def run_cases(groups, count, dtype, staged):
    """Check every collective; return the names of those that staged data on any rank, and of all."""
    names, stage = [], []
    for case in cases(len(groups), count, dtype):
        staged.clear()
        await asyncio.gather(*(work for group in groups for work in case.start(group)))
        case.check()
        names.append(case.name)
        if staged:
            stage.append(case.name)
    return stage, names


@pytest.mark.exhaustive
@pytest.mark.parametrize("allocate", [whole, part])
@pytest.mark.parametrize(("count", "dtype"), SIZES)
@pytest.mark.parametrize("size", [2, 3])
async def test_nothing_is_staged(staged, size, count, dtype, allocate):
    async with world_of(size, transport="shm") as groups:
        stage, _ = await run_cases([Placing(group, allocate) for group in groups], count, dtype, staged)
    assert stage == []


@pytest.mark.parametrize(
    ("registers", "count", "dtype"),
    [
        pytest.param(
            registers, *size, marks=() if (registers, size) == ("in turns", SIZES[0]) else pytest.mark.exhaustive
        )
        for registers in ("none", "rank 0", "rank 1", "in turns")
        for size in SIZES
    ],
)
async def test_ranks_may_differ_in_what_they_have_registered(staged, registers, count, dtype):
    turns = itertools.cycle([whole, ordinary] if registers == "in turns" else [ordinary])

    def in_turns(count, dtype):
        return next(turns)(count, dtype)

    async with world_of(2, transport="shm") as groups:
        placed = [Placing(group, whole if registers == f"rank {group.rank()}" else in_turns) for group in groups]
        stage, names = await run_cases(placed, count, dtype, staged)
    assert registers != "none" or stage == names


def test_coalesced_tensors_that_overlap_are_reduced_one_after_the_other():
    def program(group):
        whole = asyncdist.empty(MIN_NBYTES).fill_(1)
        group.all_reduce_coalesced([whole[:-10], whole[10:]], background=False).wait()
        return whole.unique().tolist()

    assert run_ranks(2, program, transport="shm") == [[2.0, 4.0]] * 2
