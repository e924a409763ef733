"""Many collectives in flight whose schedules are resumed in any order: none waits for one that was issued later.

Drivers may resume the schedules of a rank in any order, different on each rank. Here the test chooses the order. No other
driver runs, so the test detects a deadlock by the absence of progress instead of a clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from asyncdist.config import Config
from asyncdist.groups.group import Group
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.engine.operation import Channel, Plan
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.tracing.recorder import Entry
from asyncdist.kernel.transport.native import beginning
from asyncdist.testing.cluster import world_of
from asyncdist.testing.collective_cases import CollectiveCase, moving, reducing
from asyncdist_transports.shm.collectives.slot_table import SLOTS

SMALL = Config().with_(shm_area_nbytes=4096)
PIECE = 1024  # float32 elements of a small area
# Turns without progress that show a deadlock.
_DEADLOCK = 200


class Held:
    """The unfinished schedules that one rank has issued. Only the test drives them."""

    def __init__(self, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
        self.schedules: list[Schedule] = []
        monkeypatch.setattr(group.endpoint.progress, "attempt", lambda *call, **_: beginning(*call[:3]))
        monkeypatch.setattr(group.endpoint, "issue", self._hold)

    def _hold(self, channel: Channel, plan: Plan, entry: Entry, timeout: float, *, background: bool) -> Work:
        def whole() -> Schedule:
            for part in plan.parts:
                yield from part
            if plan.finish is not None:
                plan.finish()

        self.schedules.append(whole())
        return Work()

    def resume(self, schedule: Schedule) -> bool:
        """Resume a schedule once; return whether it has made progress."""
        try:
            return next(schedule) == ()
        except StopIteration:
            self.schedules.remove(schedule)
            return True


def run(ranks: Sequence[Held], orders: Sequence[Callable[[list[Schedule]], list[Schedule]]]) -> None:
    """Resume all schedules, each rank's in its own order, until they have finished."""
    idle_turns = 0
    while any(rank.schedules for rank in ranks):
        moved = [rank.resume(one) for rank, order in zip(ranks, orders, strict=True) for one in order(rank.schedules)]
        idle_turns = 0 if any(moved) else idle_turns + 1
        assert idle_turns < _DEADLOCK, f"a deadlock, with {[len(rank.schedules) for rank in ranks]} schedules left"


def start(groups: Sequence[Group], drills: Sequence[CollectiveCase], monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    ranks = [Held(group, monkeypatch) for group in groups]
    for group in groups:
        for drill in drills:
            drill.start(group)
    return ranks


def forwards(schedules: list[Schedule]) -> list[Schedule]:
    return list(schedules)


def backwards(schedules: list[Schedule]) -> list[Schedule]:
    return schedules[::-1]


@pytest.mark.parametrize("orders", [(forwards, backwards), (backwards, forwards), (backwards, backwards)])
async def test_large_all_reduces_complete_in_any_order(monkeypatch, orders):
    drills = [next(reducing(2, count * PIECE + 1, torch.float32)) for count in range(2, 2 * SLOTS + 4)]
    async with world_of(2, transport="shm", config=SMALL) as groups:
        run(start(groups, drills, monkeypatch), orders)
        for drill in drills:
            drill.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
async def test_every_collective_completes_in_any_order(monkeypatch, size, seed):
    chance = random.Random(seed)
    drills = [
        drill
        for count in (7, 3 * PIECE, 21 * PIECE + 5)
        for drill in (*reducing(size, count, torch.float32), *moving(size, count, torch.float32))
    ]
    chance.shuffle(drills)

    def some(schedules: list[Schedule]) -> list[Schedule]:
        return chance.sample(schedules, chance.randint(0, len(schedules)))

    async with world_of(size, transport="shm", config=SMALL) as groups:
        run(start(groups, drills, monkeypatch), [some] * size)
        for drill in drills:
            drill.check()
