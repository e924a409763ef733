"""`Stopwatch`: seconds in which a process sleeps or runs count, seconds in which it waits for a processor do not."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from asyncdist.testing.processes import Nursery
from asyncdist.testing.stopwatch import Stopwatch

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not say who waits")


def test_sleep_counts_as_elapsed():
    since, before = Stopwatch(), time.monotonic()
    time.sleep(0.2)
    assert 0.1 < since.seconds() <= time.monotonic() - before


def test_seconds_until_a_time_from_another_process():
    since = Stopwatch()
    assert 99.0 < since.seconds(time.monotonic() + 100.0) <= 100.1


def _run(cores: set[int], going) -> None:
    os.sched_setaffinity(0, cores)
    going.set()
    while True:
        pass


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_time_waiting_for_a_processor_does_not_count(until):
    """Two processes share one core; the time of one does not count for the other."""
    fork, cores = multiprocessing.get_context("fork"), {min(os.sched_getaffinity(0))}
    going = [fork.Event() for _ in range(2)]
    runners = [fork.Process(target=_run, args=(cores, each), daemon=True) for each in going]
    try:
        for runner in runners:
            runner.start()
        for each in going:
            assert each.wait(20)
        since, before = Stopwatch(*(runner.pid for runner in runners)), time.monotonic()
        until(lambda: time.monotonic() - before - since.seconds() > 0.3)
    finally:
        for runner in runners:
            runner.kill()
            runner.join()
            runner.close()


RUNS = """
import os, sys, time
def run_on(test, core, seconds):
    os.sched_setaffinity(0, {core})
    test.send("going")
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
"""


@pytest.mark.processes
def test_waiting_time_of_ended_process_is_known(tmp_path):
    (tmp_path / "runs.py").write_text(RUNS)
    core = min(os.sched_getaffinity(0))
    with Nursery(()) as nursery:
        ranks = [nursery.start(tmp_path / "runs.py", "run_on", core, 0.3) for _ in range(2)]
        assert [rank.hear() for rank in ranks] == ["going"] * 2
        since, before = nursery.stopwatch(), time.monotonic()
        assert [rank.wait() for rank in ranks] == [0, 0]
        assert time.monotonic() - before - since.seconds() > 0.2
