"""Every collective against plain arithmetic: over each transport, at sizes around the splits."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

from asyncdist.config import Config
from asyncdist.kernel.algorithms.selection import CANDIDATES
from asyncdist.testing.cluster import world_of
from asyncdist.testing.collective_cases import between_two, collective_cases, moving, reducing
from asyncdist_transports.shm.collectives.native import ShmNative
from tests.support.ranks import run_at_once, run_cases

LARGE = 300_007


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
async def test_sizes_around_the_splits(transport, size):
    async with world_of(size, transport=transport) as groups:
        for count in sorted({0, 1, size - 1, size, size + 1, 33}):
            await run_cases(groups, collective_cases(size, count, torch.float32))


@pytest.mark.exhaustive
async def test_large_tensors(transport):
    async with world_of(3, transport=transport) as groups:
        await run_cases(groups, collective_cases(3, LARGE, torch.float32))


@pytest.mark.exhaustive
async def test_sixteen_ranks(transport):
    async with world_of(16, transport=transport) as groups:
        await run_cases(groups, [*reducing(16, 17, torch.int32), *between_two(16, 5, torch.int64)])
        await run_cases(groups, list(moving(16, 3, torch.int16))[-10:])


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [3, 4])
async def test_all_at_once(transport, size):
    async with world_of(size, transport=transport) as groups:
        cases = [case for count in (0, 5, 20_000) for case in collective_cases(size, count, torch.float32)]
        await run_at_once(groups, cases)


# Whether the n-th case of a rank runs in the background.
BACKGROUND = {
    "blocking": lambda number, rank: False,
    "background": lambda number, rank: True,
    "alternating": lambda number, rank: (number + rank) % 3 != 0,
}


@pytest.mark.parametrize(
    ("background", "size"),
    [
        pytest.param("blocking", 1, marks=pytest.mark.exhaustive),
        pytest.param("blocking", 5, marks=pytest.mark.exhaustive),
        ("background", 3),
        ("alternating", 4),
    ],
)
def test_threads_call_and_wait(together, transport, background, size):
    """The thread of each rank waits for the works in the reverse order."""
    cases = [case for count in (0, 1, size + 1, 30_000) for case in collective_cases(size, count, torch.float64)]

    def rank(group):
        works = []
        for number, case in enumerate(cases):
            works += case.start(group, background=BACKGROUND[background](number, group.rank()))
        for work in reversed(works):
            assert work.wait()

    together(size, rank, transport=transport)
    for case in cases:
        case.check()


# -- splits and schedules ---------------------------------------------------------------------------

SETTINGS = {
    "two lanes": Config(lanes=2, stripe_nbytes=16),
    "three lanes": Config(lanes=3, stripe_nbytes=1),
    "nothing is buffered": Config(eager_nbytes=0),
    "everything is buffered": Config(eager_nbytes=1 << 30),
    "small pieces": Config(eager_nbytes=8, piece_nbytes=64, segment_nbytes=100),
    "pieces of one byte, three lanes": Config(
        lanes=3, stripe_nbytes=0, piece_nbytes=1, eager_nbytes=1, segment_nbytes=1
    ),
    "all doubling": Config(algorithm="all_reduce=doubling,reduce=tree,broadcast=tree,all_gather=doubling"),
    "all rings": Config(
        algorithm="all_reduce=ring,reduce=pairwise,broadcast=chain,all_gather=ring", segment_nbytes=64, lanes=2,
        stripe_nbytes=100,
    ),
    "halving": Config(algorithm="all_reduce=halving,all_gather=direct", lanes=2, stripe_nbytes=100),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("size", [2, 5])
async def test_splits_and_schedules_do_not_change_results(transport, size, settings):
    async with world_of(size, transport=transport, config=SETTINGS[settings]) as groups:
        for count, dtype in ((1, torch.bfloat16), (size + 1, torch.uint8), (1000, torch.float32)):
            await run_at_once(groups, collective_cases(size, count, dtype))


FORCED = Config(algorithm=",".join(f"{collective}={last.name}" for collective, (*_, last) in CANDIDATES.items()))


async def test_forced_schedule_uses_links_despite_shared_memory(monkeypatch):
    async with world_of(2, transport="shm", config=FORCED) as groups:
        monkeypatch.setattr(ShmNative, "prepare", lambda _, signature: pytest.fail(f"{signature} in shared memory"))
        for _ in range(2):
            await run_cases(groups, collective_cases(2, 1000, torch.float32))


@pytest.mark.exhaustive
@pytest.mark.parametrize("lanes", [2, 3])
async def test_large_tensor_over_several_lanes(transport, lanes):
    async with world_of(2, transport=transport, config=Config(lanes=lanes, piece_nbytes=10_000)) as groups:
        await run_cases(groups, [*reducing(2, LARGE, torch.float32), *list(moving(2, LARGE, torch.float32))[5:]])


@pytest.mark.parametrize("schedule", ["doubling", "ring"])
async def test_narrow_floats_larger_than_a_segment(schedule):
    """At most 2^20 elements are widened at a time."""
    config = Config(algorithm=f"all_reduce={schedule},reduce={'pairwise' if schedule == 'ring' else 'tree'}")
    async with world_of(2, transport="tcp", config=config) as groups:
        await run_cases(groups, itertools.islice(reducing(2, (1 << 20) + 3, torch.bfloat16), 3))


# -- several groups and worlds ----------------------------------------------------------------------


@pytest.mark.exhaustive
async def test_concurrent_groups_in_a_different_order_on_every_rank(transport):
    """The calls of one group have one order on all ranks. Each rank begins with another group."""
    async with world_of(4, transport=transport) as world:
        members = [(0, 1, 2, 3), (3, 1), (2, 0, 3), (0, 1), (1, 2, 3, 0)]
        groups = [[group.world.new_group(ranks) for group in world] for ranks in members]
        cases = [
            [case for count in (3, 2000) for case in collective_cases(len(ranks), count, torch.float32)]
            for ranks in members
        ]
        works = []
        for rank, turn in itertools.product(range(4), range(len(members))):
            which = (turn + rank) % len(members)
            group = groups[which][rank]
            if group is not None:
                works += [work for case in cases[which] for work in case.start(group)]
        await asyncio.gather(*works)
        for case in itertools.chain(*cases):
            case.check()


@pytest.mark.exhaustive
async def test_independent_worlds_in_one_process(transport):
    async with world_of(3, transport=transport) as first, world_of(2, transport="tcp") as second:
        await asyncio.gather(
            run_cases(first, collective_cases(3, 50, torch.float32)),
            run_cases(second, collective_cases(2, 50, torch.float32)),
        )
