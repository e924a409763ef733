"""Ranks that share a core move to other cores while they wait."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from asyncdist.base import cores
from asyncdist.kernel.engine.drivers import core_placement
from asyncdist.kernel.engine.drivers.core_placement import CorePlacement

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not move threads")


class System:
    """The system that a `CorePlacement` sees: its core, the allowed cores, and the masks that it has set."""

    def __init__(self, monkeypatch, *, core, allowed):
        self.core, self.allowed, self.mask, self.now = core, set(allowed), set(allowed), 100.0
        self.asked = []
        self.published = -1
        self.removed = None
        monkeypatch.setattr(core_placement.os, "sched_getaffinity", lambda thread: set(self.mask))
        monkeypatch.setattr(core_placement.os, "sched_setaffinity", self._allow)
        monkeypatch.setattr(core_placement, "monotonic", lambda: self.now)
        monkeypatch.setattr(core_placement, "_core_finder", lambda: lambda: self.core)
        self.load, self.looks = 2.0, 0
        monkeypatch.setattr(core_placement, "threads_per_core", self._look)

    def _look(self):
        self.looks += 1
        return self.load

    def placement(self, rank, peer_cores):
        def cores(core):
            self.published = core
            return list(peer_cores)

        return CorePlacement(rank, cores)

    def _allow(self, thread, cores):
        assert thread == 0
        self.asked.append(set(cores))
        if set(cores) == {self.removed}:
            raise OSError("no such core")
        self.mask = set(cores)
        if self.core not in cores:
            (self.core,) = cores


@pytest.fixture
def system(monkeypatch):
    return lambda core, allowed=(0, 1): System(monkeypatch, core=core, allowed=allowed)


def sleep_in(placement, sleep):
    """Let a waker call ``sleep()`` where it would sleep."""
    return placement.sleep(SimpleNamespace(sleep=lambda waits, seconds: sleep()), (), 1.0)


def awake(cores, rank=-1):
    return [(peer, core, False) for peer, core in enumerate(cores) if peer != rank]


CASES = [
    pytest.param(3, (0, 1, 0), (0, 1), 1, id="highest rank on a crowded core"),
    pytest.param(2, (0, 1, 2, 0), (0, 1), None, id="a higher rank is on the core"),
    pytest.param(3, (0, 1, 1), (0, 1), None, id="equal load"),
    pytest.param(3, (1, 1, 1), (0, 1), None, id="lower load"),
    pytest.param(3, (0, 1, -1), (0, 1), None, id="a peer has published no core"),
    pytest.param(3, (0, 0, 1), (0,), None, id="only one core is allowed"),
    pytest.param(9, (0, 1, 0, 0), (0, 1, 2), 2, id="least loaded of several cores"),
    pytest.param(1, (0,), (0, 5, 3, 9), 3, id="the nearest of the least loaded cores"),
]


@pytest.mark.parametrize(("rank", "peer_cores", "allowed", "target"), CASES)
def test_highest_rank_on_a_crowded_core_moves_to_the_least_loaded_one(system, rank, peer_cores, allowed, target):
    seen = system(0, allowed)
    seen.placement(rank, awake(peer_cores, rank)).spread()
    assert seen.asked == ([] if target is None else [{target}, set(allowed)])
    assert seen.published == seen.core == (target or 0)


def test_sleeping_rank_does_not_count_as_load(system):
    seen = system(core=0)
    seen.placement(3, [(0, 0, True), (1, 0, False), (2, 1, False)]).spread()
    assert seen.asked == []


def test_rank_pauses_between_moves(system):
    seen = system(core=0)
    placement = seen.placement(2, awake((0, 0)))
    placement.spread()
    assert seen.core == 1
    # The scheduler moves it back.
    seen.core = 0
    placement.spread()
    assert (seen.core, seen.published) == (0, 0)
    seen.now += 1.0
    placement.spread()
    assert seen.core == 1


def test_core_removed_from_affinity_mask_is_ignored(system):
    seen = system(core=0)
    seen.removed = 1
    seen.placement(2, awake((0, 0))).spread()
    assert seen.asked == [{1}, {0, 1}]
    assert seen.core == 0


def test_without_getcpu_no_rank_moves(system, monkeypatch):
    seen = system(core=0)
    monkeypatch.setattr(core_placement, "_core_finder", lambda: None)
    placement = seen.placement(2, awake((0, 0)))
    placement.spread()
    placement.settle()
    assert (seen.asked, seen.published, placement.home) == ([], -1, None)


@pytest.mark.parametrize(
    ("rank", "peer", "home"),
    [
        pytest.param(1, (0, 0, True), 1, id="the higher rank goes to the other core"),
        pytest.param(0, (1, 0, True), 0, id="the lower rank stays where it is"),
        pytest.param(1, (0, 1, True), None, id="ranks on different cores are left to the scheduler"),
    ],
)
def test_ranks_that_share_a_core_each_sleep_on_their_own(system, rank, peer, home):
    seen = system(core=0)
    placement = seen.placement(rank, [peer])
    placement.settle()
    assert (placement.home, seen.asked) == (home, [])


def test_rank_is_on_its_home_core_only_while_it_sleeps(system):
    seen = system(core=0)
    placement = seen.placement(1, [(0, 0, True)])
    placement.settle()
    assert sleep_in(placement, lambda: (seen.core, seen.mask)) == (1, {1})
    assert (seen.core, seen.mask) == (1, {0, 1})
    with pytest.raises(KeyboardInterrupt):
        sleep_in(placement, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert seen.mask == {0, 1}


def test_home_core_that_is_no_longer_allowed_is_given_up(system):
    seen = system(core=0)
    placement = seen.placement(1, [(0, 0, True)])
    placement.settle()
    seen.removed = 1
    assert sleep_in(placement, lambda: "woken") == "woken"
    assert (placement.home, seen.mask) == (None, {0, 1})


def test_rank_sleeps_anywhere_where_several_threads_share_each_core(system):
    seen = system(core=0)
    placement = seen.placement(1, [(0, 0, True)])
    placement.settle()
    assert placement.home == 1
    seen.load = 4.0
    placement.settle()
    # The load is asked for now and then only.
    assert placement.home is not None
    assert seen.looks == 1
    seen.now += 0.1
    placement.settle()
    assert placement.home is None
    seen.load, seen.now = 2.0, seen.now + 0.1
    placement.settle()
    assert placement.home == 1


def test_rank_of_a_system_without_a_load_keeps_its_core(system):
    seen = system(core=0)
    seen.load = None
    placement = seen.placement(1, [(0, 0, True)])
    placement.settle()
    assert placement.home == 1


def test_threads_that_can_run_are_counted_for_each_core(monkeypatch, tmp_path):
    load = tmp_path / "loadavg"
    monkeypatch.setattr(cores, "_LOAD", str(load))
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 4)
    load.write_text("0.50 0.40 0.30 10/212 4711\n")
    assert cores.threads_per_core() == 2.5
    load.write_text("restricted\n")
    assert cores.threads_per_core() is None
    load.unlink()
    assert cores.threads_per_core() is None
