"""When a waiting rank polls and when it sleeps at once, on a clock of the test's own."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from asyncdist.base import cores
from asyncdist.base.cores import run_delay
from asyncdist.kernel.engine.drivers import waiting as waiting_module
from asyncdist.kernel.engine.drivers.wait_policy import FIRST_PAUSE, LONGEST_PAUSE, WaitMode, WaitPolicy
from asyncdist.kernel.engine.drivers.waiting import LOOK_EVERY, Waiting

TICK = 1e-3


class Thread:
    """A thread of a rank that waits all the time, and the policy of the rank, which observes it every millisecond."""

    def __init__(self, polling=WaitMode.SPIN):
        self.policy = WaitPolicy(polling)
        self.now = 1000.0
        self.modes = []

    def run(self, seconds, *, delay=0.0, slices=0):
        """Let time pass, with a delay and a number of time slices in each tick; return the mode afterwards."""
        until = self.now + seconds
        while self.now < until:
            self.now += TICK + delay
            self.modes.append(self.policy.observe(self.now, TICK + delay, delay, slices))
        return self.policy.mode

    def compete(self, seconds):
        """Share a core with a process. A polling thread loses its core for 3 ms each; a sleeper runs at once."""
        until = self.now + seconds
        while self.now < until:
            delay = 0.0 if self.policy.mode is WaitMode.SLEEP else 3e-3
            self.run(TICK, delay=delay, slices=1)


@pytest.mark.parametrize(
    ("mode", "delay", "slices"),
    [
        pytest.param(WaitMode.SPIN, 0.0, 0, id="a core of its own"),
        pytest.param(WaitMode.SPIN, 30e-6, 1, id="threads of the system that run for a moment now and then"),
        pytest.param(WaitMode.YIELD, 1e-3, 20, id="ranks that outnumber the cores, and wait for each other"),
        pytest.param(WaitMode.SLEEP, 0.0, 0, id="no spinning"),
    ],
)
def test_rank_always_waits_as_it_began(mode, delay, slices):
    thread = Thread(mode)
    thread.run(5.0, delay=delay, slices=slices)
    assert set(thread.modes) == {mode}


@pytest.mark.parametrize("polling", [WaitMode.SPIN, WaitMode.YIELD])
def test_rank_sleeps_as_soon_as_it_has_lost_its_core(polling):
    thread = Thread(polling)
    thread.run(1.0)
    assert thread.run(TICK, delay=3e-3, slices=1) is WaitMode.SLEEP
    assert thread.modes.count(WaitMode.SLEEP) == 1


def test_rank_polls_again_when_cores_are_free():
    thread = Thread()
    thread.run(TICK, delay=3e-3, slices=1)
    assert thread.run(FIRST_PAUSE - 2 * TICK) is WaitMode.SLEEP
    assert thread.run(3 * TICK) is WaitMode.SPIN
    assert thread.run(1.0) is WaitMode.SPIN


def test_trials_that_fail_become_rare_and_one_that_succeeds_makes_them_frequent_again():
    thread = Thread()
    thread.compete(10.0)
    polled = thread.modes.count(WaitMode.SPIN)
    assert polled <= 20
    # The last trial fails at once, so the rank polls again after the longest pause.
    assert thread.run(LONGEST_PAUSE + 2 * TICK) is WaitMode.SPIN
    thread.run(LONGEST_PAUSE)
    thread.run(TICK, delay=3e-3, slices=1)
    assert thread.run(FIRST_PAUSE + TICK) is WaitMode.SPIN


def test_rank_makes_no_trial_while_its_computation_competes():
    thread = Thread()
    assert thread.run(3.0, delay=3e-3, slices=1) is WaitMode.SLEEP
    assert set(thread.modes) == {WaitMode.SLEEP}


def test_short_delays_count_when_they_take_up_much_of_the_time():
    """Two ranks that poll on one core take turns of some 50 µs."""
    thread = Thread()
    assert thread.run(5e-3, delay=1e-3, slices=20) is WaitMode.SPIN
    assert thread.run(18e-3, delay=1e-3, slices=20) is WaitMode.SLEEP


def test_delays_long_ago_do_not_count():
    """The first observation after minutes of computation, in which the thread lost its core now and then."""
    policy = WaitPolicy(WaitMode.SPIN)
    assert policy.observe(1000.0, 100.0, 0.5, 200) is WaitMode.SPIN


# -- what the drivers use ---------------------------------------------------------------------------


@pytest.fixture
def scheduler(monkeypatch):
    """Set what the scheduler says of each thread: ``scheduler[thread] = (delay, slices)``."""
    said = {}
    monkeypatch.setattr(waiting_module, "run_delay", lambda: said.get(waiting_module.get_ident()))
    monkeypatch.setattr(waiting_module, "get_ident", lambda: said.get("thread", 1))
    return said


def test_drivers_poll_until_they_compete_and_sleep_then(scheduler):
    waiting = Waiting()
    waiting.configure(300e-6, 100e-6)
    scheduler[1] = (0.0, 10)
    waiting.look(100.0)
    assert (waiting.spin, waiting.await_spin) == (300e-6, 100e-6)
    scheduler[1] = (5e-3, 11)
    waiting.look(100.01)
    assert (waiting.mode, waiting.spin, waiting.await_spin) == (WaitMode.SLEEP, 0.0, 0.0)
    assert waiting.look_at == 100.01 + LOOK_EVERY
    waiting.look(100.2)
    assert (waiting.mode, waiting.spin, waiting.await_spin) == (WaitMode.SPIN, 300e-6, 100e-6)


def test_statistics_of_different_threads_are_not_compared(scheduler):
    waiting = Waiting()
    waiting.configure(300e-6, 100e-6)
    scheduler[1], scheduler[2] = (0.0, 10), (50.0, 90000)
    waiting.look(100.0)
    scheduler["thread"] = 2
    waiting.look(100.001)
    assert waiting.mode is WaitMode.SPIN
    # A new thread has the identifier of one that has ended.
    scheduler[2] = (0.001, 1)
    waiting.look(100.002)
    assert waiting.mode is WaitMode.SPIN
    scheduler[2] = (0.011, 2)
    waiting.look(100.02)
    assert waiting.mode is WaitMode.SLEEP


def test_system_without_statistics_always_polls(scheduler):
    waiting = Waiting()
    waiting.configure(300e-6, 100e-6)
    for now in range(100):
        waiting.look(float(now))
    assert waiting.mode is WaitMode.SPIN


def test_mode_of_this_machine_is_that_of_a_polling_thread(monkeypatch):
    clock = iter(1000.0 + count * 1e-4 for count in range(10**6))
    monkeypatch.setattr(waiting_module, "monotonic", lambda: next(clock))
    readings = iter([(0.0, 1), (0.0, 1), (3e-3, 2)])
    monkeypatch.setattr(waiting_module, "run_delay", lambda: next(readings))
    mode, share = waiting_module.mode_here(0.05)
    assert mode is WaitMode.SLEEP
    assert share == pytest.approx(1.5, rel=0.2)
    monkeypatch.setattr(waiting_module, "run_delay", lambda: (7.0, 30))
    assert waiting_module.mode_here(0.05) == (WaitMode.SPIN, 0.0)
    monkeypatch.setattr(waiting_module, "run_delay", lambda: None)
    assert waiting_module.mode_here(0.05) is None


# -- what the system says ---------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="this system keeps no statistics")
def test_each_thread_has_statistics_of_its_own_and_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    found = []

    def look():
        first = run_delay()
        while run_delay() == first:
            os.sched_yield()
            threading.Event().wait(1e-4)
        found.append((first, run_delay()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    ((first, later),) = found
    assert later[0] >= first[0] >= 0.0
    assert later[1] > first[1] > 0
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="this system keeps no statistics")
def test_forked_child_reads_its_own_statistics():
    reader, writer = os.pipe()
    run_delay()
    child = os.fork()
    if child == 0:
        try:
            expected = int(Path("/proc/self/schedstat").read_text().split()[2])
            read = run_delay()
            os.write(writer, b"1" if read is not None and expected <= read[1] <= expected + 100 else b"0")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(writer)


def test_system_without_the_file_says_nothing(monkeypatch):
    monkeypatch.setattr(cores, "_RUN_DELAYS", "/nowhere/schedstat")
    found = []
    thread = threading.Thread(target=lambda: found.append(run_delay()))
    thread.start()
    thread.join()
    assert found == [None]
