"""Threads for calls that may block."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest

from asyncdist.base.daemon_threads import DaemonThreadPool

LONG = 20.0


@pytest.fixture
def errands():
    errands = DaemonThreadPool("errand", most=3)
    yield errands
    errands.shutdown()


def test_a_call_gives_its_value_or_raises(errands):
    assert errands.submit(max, 1, 2).result(LONG) == 2
    assert errands.submit(sorted, [1, 2], reverse=True).result(LONG) == [2, 1]
    with pytest.raises(ZeroDivisionError):
        errands.submit(divmod, 1, 0).result(LONG)


def test_calls_go_on_at_once_as_many_as_may(errands):
    together, last = threading.Barrier(4), threading.Event()
    calls = [errands.submit(together.wait, LONG) for _ in range(3)]
    late = errands.submit(last.set)
    together.wait(LONG)  # three are in their calls, and none is there for the fourth
    assert len({call.result(LONG) for call in calls}) == 3
    late.result(LONG)
    assert last.is_set()


def test_one_call_after_another_takes_one_thread(errands, until):
    names = set()
    for _ in range(5):
        errands.submit(lambda: names.add(threading.current_thread().name)).result(LONG)
        until(lambda: errands._idle == 1)
    assert names == {"errand_0"}


def test_threads_are_daemons_and_go_in_the_end(errands):
    errands.submit(int).result(LONG)
    (thread,) = [each for each in threading.enumerate() if each.name.startswith("errand")]
    assert thread.daemon
    errands.shutdown()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="let go"):
        errands.submit(int)


def test_what_is_let_go_of_ends_what_was_taken_or_cancels_it(errands):
    go_on = threading.Event()
    calls = [errands.submit(go_on.wait, LONG) for _ in range(4)]
    assert errands.open == set(calls)
    errands.shutdown(wait=False)
    go_on.set()
    assert [call.result(LONG) for call in calls] == [True] * 4
    assert errands.open == set()


def test_what_waits_for_a_thread_can_be_cancelled(errands):
    begun, go_on = threading.Barrier(4), threading.Event()
    calls = [errands.submit(lambda: begun.wait(LONG) >= 0 and go_on.wait(LONG)) for _ in range(3)]
    begun.wait(LONG)
    late = errands.submit(int)
    errands.shutdown(wait=False, cancel_futures=True)
    assert late.cancelled()
    go_on.set()
    assert [call.result(LONG) for call in calls] == [True] * 3


def test_a_cancelled_call_is_not_made(errands):
    go_on, made = threading.Event(), []
    busy = [errands.submit(go_on.wait, LONG) for _ in range(3)]
    waiting = errands.submit(made.append, 1)
    assert waiting.cancel()
    go_on.set()
    concurrent.futures.wait(busy, LONG)
    errands.shutdown()
    assert made == []
