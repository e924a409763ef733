"""Ranks that outnumber the cores move to other cores while they wait."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncdist_transports.shm import core_placement
from asyncdist_transports.shm.core_placement import CorePlacement

PROGRAM = Path(__file__).parent / "program_waits.py"

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not move threads")


def peer_at(core, *, asleep=False):
    return SimpleNamespace(core=core, asleep=[int(asleep)])


class System:
    """The system that a `CorePlacement` sees: its core, the allowed cores, and the masks that it has set."""

    def __init__(self, monkeypatch, *, core, allowed):
        self.core, self.allowed, self.now = core, set(allowed), 100.0
        self.asked = []
        self.removed = None
        monkeypatch.setattr(core_placement.os, "sched_getaffinity", lambda thread: set(self.allowed))
        monkeypatch.setattr(core_placement.os, "sched_setaffinity", self._allow)
        monkeypatch.setattr(core_placement, "monotonic", lambda: self.now)
        monkeypatch.setattr(core_placement, "_core_finder", lambda: lambda: self.core)

    def _allow(self, thread, cores):
        assert thread == 0
        self.asked.append(set(cores))
        if set(cores) == {self.removed}:
            raise OSError("no such core")
        if self.core not in cores:
            (self.core,) = cores


@pytest.fixture
def system(monkeypatch):
    return lambda core, allowed=(0, 1): System(monkeypatch, core=core, allowed=allowed)


@pytest.mark.parametrize(
    ("rank", "peer_cores", "allowed", "target"),
    [
        pytest.param(3, (0, 1, 0), (0, 1), 1, id="highest rank on a crowded core"),
        pytest.param(2, (0, 1, 2, 0), (0, 1), None, id="a higher rank is on the core"),
        pytest.param(3, (0, 1, 1), (0, 1), None, id="equal load"),
        pytest.param(3, (1, 1, 1), (0, 1), None, id="lower load"),
        pytest.param(3, (0, 1, -1), (0, 1), None, id="a peer has published no core"),
        pytest.param(3, (0, 0, 1), (0,), None, id="only one core is allowed"),
        pytest.param(9, (0, 1, 0, 0), (0, 1, 2), 2, id="least loaded of several cores"),
    ],
)
def test_highest_rank_on_a_crowded_core_moves_to_the_least_loaded_one(system, rank, peer_cores, allowed, target):
    seen, own = system(0, allowed), peer_at(-1)
    CorePlacement(rank, own)([(peer, peer_at(core)) for peer, core in enumerate(peer_cores) if peer != rank])
    assert seen.asked == ([] if target is None else [{target}, set(allowed)])
    assert own.core == seen.core == (target or 0)


def test_sleeping_rank_does_not_count_as_load(system):
    seen = system(core=0)
    CorePlacement(3, peer_at(-1))([(0, peer_at(0, asleep=True)), (1, peer_at(0)), (2, peer_at(1))])
    assert seen.asked == []


def test_rank_pauses_between_moves(system):
    seen, own = system(core=0), peer_at(-1)
    crowd, move = [(0, peer_at(0)), (1, peer_at(0))], CorePlacement(2, own)
    move(crowd)
    assert seen.core == 1
    # The scheduler moves it back.
    seen.core = 0
    move(crowd)
    assert (seen.core, own.core) == (0, 0)
    seen.now += 1.0
    move(crowd)
    assert seen.core == 1


def test_core_removed_from_affinity_mask_is_ignored(system):
    seen = system(core=0)
    seen.removed = 1
    CorePlacement(2, peer_at(-1))([(0, peer_at(0)), (1, peer_at(0))])
    assert seen.asked == [{1}, {0, 1}]
    assert seen.core == 0


def test_without_getcpu_no_rank_moves(system, monkeypatch):
    seen, own = system(core=0), peer_at(-1)
    monkeypatch.setattr(core_placement, "_core_finder", lambda: None)
    CorePlacement(2, own)([(0, peer_at(0)), (1, peer_at(0))])
    assert (seen.asked, own.core) == ([], -1)


@pytest.mark.processes
def test_waiting_ranks_on_one_core_spread_over_cores(nursery, tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    where = f"file://{tmp_path}/world"
    ranks = [nursery.start(PROGRAM, "start_on_one_core", where, rank, 3) for rank in range(3)]
    lower, higher = sorted(os.sched_getaffinity(0))[:2]
    first, _, last = [rank.hear() for rank in ranks]
    assert (first, last) == ([], [[higher], [lower, higher]])
