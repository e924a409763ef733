"""The two threads of a device: who does the calls in order, and who notices that they are over."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from time import monotonic

import pytest
import torch

from asyncdist.devices import completion_watcher as watch_module
from asyncdist.devices import serial_executor as line_module
from asyncdist.devices.completion_watcher import CompletionWatcher, Pending
from asyncdist.devices.serial_executor import SerialExecutor
from asyncdist.devices.work import DeviceWork
from asyncdist.engine.operation import Plan
from asyncdist.tracing.recorder import Entry
from tests.support.devices import PretendStreams

# -- the line ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Have both threads stay until they are told to go, so that what they hold on to shows."""
    monkeypatch.setattr(line_module, "_LINGER", 1000.0)
    monkeypatch.setattr(watch_module, "_LINGER", 1000.0)


@pytest.fixture
def line():
    line = SerialExecutor("line of a test")
    yield line
    line.close(lambda: None)


def test_calls_of_many_threads_never_overlap_and_keep_each_threads_order(line):
    done, inside, everything = [], threading.Lock(), threading.Semaphore(0)

    def call(who, number):
        assert inside.acquire(blocking=False), "two calls at a time"
        done.append((who, number))
        inside.release()
        everything.release()

    def put(who):
        for number in range(200):
            line.put(lambda number=number: call(who, number), here=number % 3 == 0)

    threads = [threading.Thread(target=put, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(everything.acquire(timeout=10) for _ in range(800))
    for who in range(4):
        assert [number for one, number in done if one == who] == list(range(200))


def test_a_call_is_done_here_unless_one_is_before_it(line):
    where, go, ended = [], threading.Event(), threading.Event()
    line.put(lambda: where.append(threading.current_thread()), here=True)
    line.put(go.wait)
    line.put(lambda: where.append(threading.current_thread()), here=True)  # returns: it stands in line
    line.put(ended.set)
    assert len(where) == 1
    go.set()
    assert ended.wait(10)
    assert where[0] is threading.current_thread()
    assert where[1].name == "line of a test"


def test_a_call_that_raises_does_not_stop_the_line(line, caplog):
    ended = threading.Event()
    line.put(lambda: 1 / 0)
    line.put(ended.set)
    assert ended.wait(10)
    assert "a call on a device's line failed" in caplog.text


def test_nothing_of_a_call_lives_on_in_the_line(line, until):
    tensor = torch.ones(4)
    seen = weakref.ref(tensor)
    line.put(functools.partial(tensor.add_, 1))
    del tensor
    until(lambda: seen() is None)


def test_the_thread_goes_when_the_line_is_closed_and_its_calls_are_done(until):
    line, go, done = SerialExecutor("line that ends"), threading.Event(), []
    line.put(go.wait)
    line.put(lambda: done.append("call"))
    line.close(lambda: done.append("last"))
    assert done == []
    go.set()
    until(lambda: not [each for each in threading.enumerate() if each.name == "line that ends"])
    assert done == ["call", "last"]


# -- the watch --------------------------------------------------------------------------------------


class Told(list):
    def tells(self, what):
        return lambda *args: self.append((what, *args))


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def watch(told):
    watch = CompletionWatcher("watch of a test", told.tells("slow"), told.tells("late"), told.tells("broken"))
    yield watch
    watch.take_all()
    watch.close()


def pending(tensor=None, limit=60.0):
    streams = PretendStreams()
    plan = Plan(finish=lambda: tensor, nbytes=4)
    return streams, Pending(
        DeviceWork(streams), plan, Entry("group", "all_reduce", 1, 0, 4), monotonic(), monotonic() + limit
    )


def test_tensors_are_held_until_the_mark_and_no_longer(watch, told, until):
    tensor = torch.ones(4)
    streams, one = pending(tensor)
    seen, work = weakref.ref(tensor), one.work
    streams.hold()
    watch.add(one)
    mark = streams.mark()
    work.queued(None, mark)
    one.mark = mark
    del tensor, one
    gc.collect()
    assert seen() is not None
    assert not work.is_completed()
    streams.release()
    until(lambda: work._done)
    told.clear()  # on a busy machine it has been told of as slow
    with contextlib.suppress(AssertionError):
        until(lambda: seen() is None)
    assert seen() is None, f"held by {gc.get_referrers(seen())}"


def test_what_is_late_slow_or_broken_is_told(watch, told, until):
    streams, late = pending(limit=0.08)
    watch.add(late)
    until(lambda: ("late", late) in told and ("slow", late) in told)  # both again and again
    assert watch.take_all() == [late]
    streams, broken = pending()
    streams.broken = cause = RuntimeError("lost")
    watch.add(broken)
    broken.mark = streams.mark()
    until(lambda: ("broken", broken, cause) in told)


def test_a_watch_goes_on_after_a_failure_of_who_was_told(until, caplog):
    def fails(pending):
        raise ZeroDivisionError

    watch = CompletionWatcher("watch that goes on", lambda _: None, fails, lambda *_: None)
    _, late = pending(limit=0)
    streams, fine = pending()
    watch.add(fine)
    watch.add(late)
    until(lambda: "looking after 'all_reduce' failed" in caplog.text)
    fine.mark = streams.mark()
    until(lambda: fine.work._done)
    watch.take_all()
    watch.close()
    until(lambda: not [each for each in threading.enumerate() if each.name == "watch that goes on"])
