"""Exponential backoff: the pauses, their jitter, and the deadline."""

import asyncio
import time

import pytest

from asyncdist.base.backoff import Backoff
from asyncdist.base.deadline import Deadline


def test_pauses_double_up_to_the_longest_and_are_jittered_by_at_most_half():
    backoff = Backoff(0.01, 0.05)
    for nominal in (0.01, 0.02, 0.04, 0.05, 0.05):
        assert 0.5 * nominal <= backoff.next_pause() <= nominal
    backoff.reset()
    assert backoff.next_pause() <= 0.01


def test_pause_does_not_exceed_the_time_left_until_the_deadline():
    assert Backoff(10.0, 10.0, Deadline.after(0)).next_pause() == 0.0


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances only while something sleeps."""

    class Clock:
        now = 0.0

        def sleep(self, seconds):
            self.now += seconds

        async def asleep(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def test_for_loop_attempts_at_once_and_a_last_time_at_the_deadline(clock):
    times = [clock.now for _ in Backoff(0.1, 1.0, Deadline.after(5))]
    assert (times[0], times[-1]) == (0, 5)
    assert len(times) >= 6


def test_async_for_loop_makes_the_same_attempts(clock, monkeypatch):
    async def attempts():
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", clock.asleep)
            return [number async for number in Backoff(0.1, 0.1, Deadline.after(0.3))]

    numbers = asyncio.run(attempts())
    assert numbers == list(range(len(numbers)))
    assert clock.now == pytest.approx(0.3)


def test_expired_deadline_leaves_one_attempt(clock):
    assert list(Backoff(0.1, 1.0, Deadline.after(0))) == [0]
