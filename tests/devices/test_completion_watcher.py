"""The thread that notices that a device has completed its operations."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from time import monotonic

import pytest
import torch

from asyncdist.devices import completion_watcher as watch_module
from asyncdist.devices.completion_watcher import CompletionWatcher, Pending
from asyncdist.devices.work import DeviceWork
from asyncdist.engine.operation import Plan
from asyncdist.tracing.recorder import Entry
from tests.support.devices import PretendStreams


@pytest.fixture(autouse=True)
def _lingering_thread(monkeypatch):
    """Keep the thread until it is told to end, so that references that it holds show."""
    monkeypatch.setattr(watch_module, "_LINGER", 1000.0)


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
    watch.remove_unfinished()
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
    event = streams.record_event()
    work.enqueued(None, event)
    one.event = event
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
    assert watch.remove_unfinished() == [late]
    streams, broken = pending()
    streams.broken = cause = RuntimeError("lost")
    watch.add(broken)
    broken.event = streams.record_event()
    until(lambda: ("broken", broken, cause) in told)


def test_a_watch_goes_on_after_a_failure_of_who_was_told(until, caplog):
    def fails(pending):
        raise ZeroDivisionError

    watch = CompletionWatcher("watch that goes on", lambda _: None, fails, lambda *_: None)
    _, late = pending(limit=0)
    streams, fine = pending()
    watch.add(fine)
    watch.add(late)
    until(lambda: "polling 'all_reduce' failed" in caplog.text)
    fine.event = streams.record_event()
    until(lambda: fine.work._done)
    watch.remove_unfinished()
    watch.close()
    until(lambda: not [each for each in threading.enumerate() if each.name == "watch that goes on"])
