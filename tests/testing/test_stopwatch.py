"""`Stopwatch`: seconds in which a process sleeps or runs count, seconds in which it waits for a processor do not."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from benchmarks.processes import Nursery
from tests.support.stopwatch import Stopwatch

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the kernel does not report waiting time"
)


def test_sleep_counts_as_elapsed():
    """After a sleep on a busy machine the thread may wait for a processor: such a sleep shows nothing."""
    for _ in range(100):
        since, before = Stopwatch(), time.monotonic()
        time.sleep(0.2)
        seconds, elapsed = since.seconds(), time.monotonic() - before
        assert seconds <= elapsed
        if seconds > 0.1:
            return
    raise AssertionError("no sleep has counted")


def test_seconds_until_a_time_from_another_process():
    since = Stopwatch()
    assert 99.0 < since.seconds(time.monotonic() + 100.0) <= 100.1


def _spin(cores: set[int], started) -> None:
    os.sched_setaffinity(0, cores)
    started.set()
    while True:
        pass


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_time_waiting_for_a_processor_does_not_count(until):
    """Two processes share one core; the time of one does not count for the other."""
    fork, cores = multiprocessing.get_context("fork"), {min(os.sched_getaffinity(0))}
    started = [fork.Event() for _ in range(2)]
    processes = [fork.Process(target=_spin, args=(cores, event), daemon=True) for event in started]
    try:
        for process in processes:
            process.start()
        for event in started:
            assert event.wait(60)
        since, before = Stopwatch(*(process.pid for process in processes)), time.monotonic()
        until(lambda: time.monotonic() - before - since.seconds() > 0.3)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


PROGRAM = """
import os, time
def spin(test, core, seconds):
    os.sched_setaffinity(0, {core})
    test.send("started")
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
"""


@pytest.mark.processes
def test_waiting_time_of_ended_process_is_known(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    core = min(os.sched_getaffinity(0))
    with Nursery(()) as nursery:
        ranks = [nursery.start(program, "spin", core, 0.3) for _ in range(2)]
        assert [rank.hear() for rank in ranks] == ["started"] * 2
        since, before = Stopwatch.of(nursery), time.monotonic()
        assert [rank.wait() for rank in ranks] == [0, 0]
        assert time.monotonic() - before - since.seconds() > 0.2
