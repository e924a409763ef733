"""Whether other programs keep the cores busy: pure readings, and the kernel's counters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from asyncdist.kernel.engine.drivers import core_use
from asyncdist.kernel.engine.drivers.core_use import CoreUse, Ticks, read_ticks
from asyncdist.net.process_identity import pids_of_machine

CORES, PIDS = frozenset({0, 1}), frozenset({7})


class Machine:
    """Two cores whose use the test sets, with a clock that it moves."""

    def __init__(self, monkeypatch):
        self.now, self.reading, self.pids = 0.0, Ticks(CORES, PIDS, 0, 0, 0), PIDS
        monkeypatch.setattr(core_use, "monotonic", lambda: self.now)
        monkeypatch.setattr(core_use, "read_ticks", lambda pids: self.reading)
        monkeypatch.setattr(core_use, "pids_of_machine", lambda identities, rank: self.pids)
        self.use = CoreUse(SimpleNamespace(processes={0: None}, rank=0))
        self.use.others_compete()

    def passes(self, *, ranks=0, others=0, seconds=1.0, cores=CORES, pids=PIDS):
        """Let time pass, of which the ranks and other programs use a share in percent; return whether they compete."""
        passed = round(200 * seconds)
        self.now += seconds
        self.reading = Ticks(
            cores, pids,
            self.reading.passed + passed,
            self.reading.busy + (ranks + others) * passed // 100,
            self.reading.ranks + ranks * passed // 100,
        )  # fmt: skip
        return self.use.others_compete()


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    ("ranks", "others", "due"), [(100, 0, False), (90, 8, False), (50, 50, True), (30, 40, False), (0, 95, True)]
)
def test_others_compete_if_no_core_is_free_and_they_use_a_quarter(machine, ranks, others, due):
    assert machine.passes(ranks=ranks, others=others) is due


def test_others_that_use_less_than_before_still_compete_for_a_while(machine):
    assert machine.passes(ranks=60, others=35)
    assert machine.passes(ranks=80, others=15)
    assert not machine.passes(ranks=95, others=5)
    assert not machine.passes(ranks=80, others=15)


def test_the_counters_are_read_again_only_after_a_while(machine):
    assert machine.passes(ranks=40, others=60)
    assert machine.passes(ranks=100, seconds=0.01)
    assert not machine.passes(ranks=100, seconds=1.0)


@pytest.mark.parametrize("change", [{"cores": frozenset({0})}, {"pids": frozenset({7, 8})}])
def test_readings_of_different_cores_or_ranks_are_not_compared(machine, change):
    assert machine.passes(ranks=40, others=60)
    assert not machine.passes(ranks=40, others=60, **change)


def test_nothing_is_known_of_ranks_that_are_not_visible(machine):
    assert machine.passes(ranks=40, others=60)
    machine.pids = None
    assert not machine.passes(ranks=40, others=60)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these counters")
def test_counters_of_the_kernel_tell_own_work_from_that_of_another_program():
    before = read_ticks([os.getpid()])
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    after = read_ticks([os.getpid()])
    assert after.ranks - before.ranks >= 15
    # The kernel samples the use of the cores, and sums up that of a process.
    assert after.busy - before.busy >= (after.ranks - before.ranks) // 2
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            # Each reading has the processor time of this process alone.
            own, until = read_ticks([os.getpid()]), time.monotonic() + 60.0
            while True:
                now = read_ticks([os.getpid()])
                if (now.busy - now.ranks) - (own.busy - own.ranks) >= 20 or time.monotonic() > until:
                    break
        finally:
            other.kill()
    assert (now.busy - now.ranks) - (own.busy - own.ranks) >= 20


def test_process_that_has_ended_gives_no_reading():
    assert read_ticks([2**22 + 1]) is None


def identity(host, pid, pids="pid:[1]"):
    return {"host": host, "pids": pids, "pid": pid, "started": 1}


def test_ranks_on_one_machine_are_known_whatever_the_names_of_their_hosts():
    here, named, elsewhere = identity("boot1 ", 1), identity("boot1 b", 2), identity("boot2 ", 3)
    assert pids_of_machine(dict(enumerate([here, named, elsewhere])), 0) == [1, 2]
    assert pids_of_machine(dict(enumerate([here, named, elsewhere])), 2) == [3]
    # In another container, or on a system without identities.
    assert pids_of_machine({0: here, 1: identity("boot1 ", 4, "pid:[2]")}, 0) is None
    assert pids_of_machine({0: here, 1: None}, 0) is None
