"""Times that users pass, in the forms that system calls take."""

import math
import threading

import pytest

from asyncdist.base.deadline import LONGEST_POLL, poll_timeout, wait_until_set


@pytest.mark.parametrize(
    ("left", "milliseconds"),
    [(0.0, 0), (-1.0, 0), (0.0001, 1), (0.25, 250), (180_000_000.0, LONGEST_POLL), (math.inf, LONGEST_POLL)],
)
def test_seconds_become_the_milliseconds_of_a_poll(left, milliseconds):
    assert poll_timeout(left) == milliseconds


class Slept:
    """An event that is never set, and counts how long a thread sleeps at a time."""

    def __init__(self, monkeypatch):
        self.now, self.sleeps = 0.0, []
        monkeypatch.setattr("asyncdist.base.deadline.time.monotonic", lambda: self.now)

    def wait(self, timeout):
        self.sleeps.append(timeout)
        self.now += timeout
        return False


def test_thread_looks_for_signals_while_it_waits(monkeypatch):
    event = Slept(monkeypatch)
    assert not wait_until_set(event, 2.5)
    assert event.sleeps == [1.0, 1.0, 0.5]


def test_wait_for_an_event_that_is_set():
    event = threading.Event()
    assert not wait_until_set(event, 0.0)
    event.set()
    assert wait_until_set(event, math.inf)
