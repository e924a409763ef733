"""The thread of periodic calls: it starts with the first function, ends after the last, and survives an exception."""

import os
import threading

import pytest

from asyncdist.base.daemon_threads import PeriodicCalls, periodic_calls

LONG = 60.0


class Counting:
    """A function that counts its calls, and sets an event at the third."""

    def __init__(self):
        self.count = 0
        self.third = threading.Event()

    def __call__(self):
        self.count += 1
        if self.count == 3:
            self.third.set()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "asyncdist-periodic"]


def test_one_thread_calls_all_functions_and_ends_after_the_last(until):
    calls, first, second = PeriodicCalls(), Counting(), Counting()
    before = len(threads())
    calls.start(first, 0.001)
    calls.start(second, 0.002)
    assert len(threads()) == before + 1
    assert first.third.wait(LONG)
    assert second.third.wait(LONG)
    calls.stop(first)
    calls.stop(first)
    stopped = Counting()
    calls.start(stopped, 0.001)
    count = first.count
    assert stopped.third.wait(LONG)
    assert first.count <= count + 1
    calls.stop(second)
    calls.stop(stopped)
    until(lambda: len(threads()) == before)
    again = Counting()
    calls.start(again, 0.001)
    assert again.third.wait(LONG)
    calls.stop(again)


@pytest.mark.parametrize("raised", [ValueError, SystemExit])
def test_function_that_raises_is_logged_and_called_again(raised, caplog):
    calls, counting = PeriodicCalls(), Counting()

    def fail():
        counting()
        raise raised("out of order")

    calls.start(fail, 0.001)
    assert counting.third.wait(LONG)
    calls.stop(fail)
    assert "a periodic call failed" in caplog.text


def test_function_may_stop_itself(until):
    calls, counting = PeriodicCalls(), Counting()

    def once():
        calls.stop(once)
        counting()

    before = len(threads())
    calls.start(once, 0.001)
    until(lambda: counting.count == 1 and len(threads()) == before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_child_calls_only_its_own_functions():
    inherited, own = Counting(), Counting()
    periodic_calls.start(inherited, 0.001)
    assert inherited.third.wait(LONG)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        count = inherited.count
        periodic_calls.start(own, 0.001)
        ended = own.third.wait(LONG) and inherited.count == count
        os.write(writer, b"good" if ended else b"bad")
        os._exit(0)
    os.close(writer)
    with open(reader) as result:
        assert result.read() == "good"
    os.waitpid(child, 0)
    periodic_calls.stop(inherited)
