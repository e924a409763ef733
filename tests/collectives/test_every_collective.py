"""Every collective against plain arithmetic: over each transport, on each loop, at sizes around the splits."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

from asyncdist.algorithms.selection import CANDIDATES
from asyncdist.config import Config
from asyncdist.testing.cluster import world_of
from asyncdist.testing.collective_cases import between_two, collective_cases, moving, reducing
from asyncdist_transports.shm.collectives.native import ShmNative

SIZES = [1, 2, 3, 4, 5, 8]
LARGE = 300_007


async def run(groups, drill):
    await asyncio.gather(*(work for group in groups for work in drill.start(group)))
    drill.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", SIZES)
async def test_sizes_around_the_splits(transport, size):
    async with world_of(size, transport=transport) as groups:
        for count in sorted({0, 1, size - 1, size, size + 1, 33}):
            for drill in collective_cases(size, count, torch.float32):
                await run(groups, drill)


@pytest.mark.exhaustive
async def test_large_tensors(transport):
    async with world_of(3, transport=transport) as groups:
        for drill in collective_cases(3, LARGE, torch.float32):
            await run(groups, drill)


@pytest.mark.exhaustive
async def test_sixteen_ranks(transport):
    async with world_of(16, transport=transport) as groups:
        for drill in [*reducing(16, 17, torch.int32), *between_two(16, 5, torch.int64)]:
            await run(groups, drill)
        for drill in list(moving(16, 3, torch.int16))[-10:]:
            await run(groups, drill)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [3, 4])
async def test_all_at_once(transport, size):
    """Every drill is started on every rank before any is awaited; some are awaited in another order."""
    async with world_of(size, transport=transport) as groups:
        started = [drill for count in (0, 5, 20_000) for drill in collective_cases(size, count, torch.float32)]
        works = [work for drill in started for group in groups for work in drill.start(group)]
        await asyncio.gather(*reversed(works))
        for drill in started:
            drill.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 5])
def test_blocking_calls(together, transport, size):
    started = [drill for count in (0, 1, size + 1, 30_000) for drill in collective_cases(size, count, torch.float64)]

    def rank(group):
        for drill in started:
            for work in drill.start(group, background=False):
                work.wait()

    together(size, rank, transport=transport)
    for drill in started:
        drill.check()


def test_background_works_are_waited_for_in_a_thread(together, transport):
    """Works that the runtime's loop drives are waited for, the last first, by the rank's own thread."""
    started = [drill for count in (1, 300, 30_000) for drill in collective_cases(3, count, torch.float32)]

    def rank(group):
        works = [work for drill in started for work in drill.start(group)]
        for work in reversed(works):
            assert work.wait()

    together(3, rank, transport=transport)
    for drill in started:
        drill.check()


def test_background_and_blocking_calls_alternate(together, transport):
    started = [drill for count in (1, 300, 30_000) for drill in collective_cases(4, count, torch.float32)]

    def rank(group):
        open_ = []
        for number, drill in enumerate(started):
            open_ += drill.start(group, background=(number + group.rank()) % 3 != 0)
        for work in open_:
            work.wait()

    together(4, rank, transport=transport)
    for drill in started:
        drill.check()


# -- the same under every way of cutting and every schedule ------------------------------------------

CUTS = {
    "two lanes": Config(lanes=2, stripe_nbytes=16),
    "three lanes": Config(lanes=3, stripe_nbytes=1),
    "nothing is put aside of its own accord": Config(eager_nbytes=0),
    "everything is put aside": Config(eager_nbytes=1 << 30),
    "small pieces": Config(eager_nbytes=8, piece_nbytes=64, segment_nbytes=100),
    "pieces of one, three lanes": Config(lanes=3, stripe_nbytes=0, piece_nbytes=1, eager_nbytes=1, segment_nbytes=1),
    "all doubling": Config(algorithm="all_reduce=doubling,reduce=tree,broadcast=tree,all_gather=doubling"),
    "all rings": Config(
        algorithm="all_reduce=ring,reduce=pairwise,broadcast=chain,all_gather=ring", segment_nbytes=64, lanes=2,
        stripe_nbytes=100,
    ),
    "halving": Config(algorithm="all_reduce=halving,all_gather=direct", lanes=2, stripe_nbytes=100),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("size", [2, 5])
async def test_segment_sizes_and_schedules_do_not_change_results(transport, size, cut):
    async with world_of(size, transport=transport, config=CUTS[cut]) as groups:
        for count, dtype in ((1, torch.bfloat16), (size + 1, torch.uint8), (1000, torch.float32)):
            started = list(collective_cases(size, count, dtype))
            works = [work for drill in started for group in groups for work in drill.start(group)]
            await asyncio.gather(*works)
            for drill in started:
                drill.check()


FORCED = Config(algorithm=",".join(f"{collective}={last.name}" for collective, (*_, last) in CANDIDATES.items()))


async def test_forced_schedule_uses_links_despite_shared_memory(monkeypatch):
    async with world_of(2, transport="shm", config=FORCED) as groups:
        monkeypatch.setattr(ShmNative, "prepare", lambda _, signature: pytest.fail(f"{signature} in shared memory"))
        for _ in range(2):
            for drill in collective_cases(2, 1000, torch.float32):
                await run(groups, drill)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lanes", [2, 3])
async def test_a_large_tensor_over_several_lanes(transport, lanes):
    async with world_of(2, transport=transport, config=Config(lanes=lanes, piece_nbytes=10_000)) as groups:
        for drill in [*reducing(2, LARGE, torch.float32), *list(moving(2, LARGE, torch.float32))[5:]]:
            await run(groups, drill)


@pytest.mark.asyncio(loop_factories=["asyncio-debug"])
@pytest.mark.parametrize("schedule", ["doubling", "ring"])
async def test_narrow_floats_larger_than_a_segment(schedule):
    """More than the 2^20 elements that are widened at a time."""
    config = Config(algorithm=f"all_reduce={schedule},reduce={'pairwise' if schedule == 'ring' else 'tree'}")
    async with world_of(2, transport="tcp", config=config) as groups:
        for drill in itertools.islice(reducing(2, (1 << 20) + 3, torch.bfloat16), 3):
            await run(groups, drill)


# -- several groups and worlds ----------------------------------------------------------------------


@pytest.mark.exhaustive
async def test_groups_in_flight_at_once_in_another_order_on_every_rank(transport):
    """Within a group calls come in one order; between groups every rank begins with another one."""
    async with world_of(4, transport=transport) as world:
        members = [(0, 1, 2, 3), (3, 1), (2, 0, 3), (0, 1), (1, 2, 3, 0)]
        groups = [[group.world.new_group(ranks) for group in world] for ranks in members]
        started = [
            [drill for count in (3, 2000) for drill in collective_cases(len(ranks), count, torch.float32)]
            for ranks in members
        ]
        works = []
        for rank in range(4):
            for turn in range(len(members)):
                which = (turn + rank) % len(members)
                group = groups[which][rank]
                if group is not None:
                    works += [work for drill in started[which] for work in drill.start(group)]
        await asyncio.gather(*works)
        for row in started:
            for drill in row:
                drill.check()


@pytest.mark.exhaustive
async def test_independent_worlds_in_one_process(transport):
    async with world_of(3, transport=transport) as first, world_of(2, transport="tcp") as second:
        for one, other in zip(
            collective_cases(3, 50, torch.float32), collective_cases(2, 50, torch.float32), strict=False
        ):
            works = [work for group in second for work in other.start(group)]
            await run(first, one)
            await asyncio.gather(*works)
            other.check()
