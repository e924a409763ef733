"""The completion watcher: what it keeps alive, which callbacks it calls, and that it survives their errors."""

import contextlib
import gc
import threading
import weakref
from time import monotonic

import pytest
import torch

from asyncdist.kernel.devices import completion_watcher as watch_module
from asyncdist.kernel.devices.completion_watcher import CompletionWatcher, Pending
from asyncdist.kernel.devices.work import DeviceWork
from asyncdist.kernel.engine.operation import Plan
from asyncdist.kernel.tracing.recorder import Entry
from tests.support.devices import PretendStreams


@pytest.fixture(autouse=True)
def _lingering_thread(monkeypatch):
    """Keep the idle thread, so that references that it holds show."""
    monkeypatch.setattr(watch_module, "_IDLE_TIMEOUT", 1000.0)


class Told(list):
    """What the group is told."""

    def check_health(self, pending):
        self.append(("slow", pending))

    def on_timeout(self, pending):
        self.append(("late", pending))

    def fail(self, pending, cause):
        self.append(("broken", pending, cause))

    def on_calm(self):
        pass


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def watch(told):
    watch = CompletionWatcher("watch of a test", told)
    yield watch
    watch.remove_unfinished()
    watch.close()


def pending(tensor=None, limit=60.0):
    streams = PretendStreams()
    plan = Plan(finish=lambda: tensor, nbytes=4)
    return streams, Pending(
        DeviceWork(streams), plan, Entry("group", "all_reduce", 1, 0, 4), monotonic(), monotonic() + limit
    )


def test_tensors_live_until_the_completion_event_and_no_longer(watch, told, until):
    tensor = torch.ones(4)
    streams, one = pending(tensor)
    seen, finished = weakref.ref(tensor), threading.Event()
    one.work.add_done_callback(lambda _: finished.set())
    streams.hold()
    watch.add(one)
    event = streams.record_event()
    one.enqueued(None, event)
    del tensor, one
    gc.collect()
    assert seen() is not None
    assert not finished.is_set()
    streams.release()
    assert finished.wait(60)
    # On a busy machine the operation was slow.
    told.clear()
    with contextlib.suppress(AssertionError):
        until(lambda: seen() is None)
    assert seen() is None, f"held by {gc.get_referrers(seen())}"


def test_callbacks_for_slow_late_and_failed_operations(watch, told, until):
    streams, late = pending(limit=0.08)
    watch.add(late)
    until(lambda: ("late", late) in told and ("slow", late) in told)
    assert watch.remove_unfinished() == [late]
    streams, broken = pending()
    streams.broken = cause = RuntimeError("lost")
    watch.add(broken)
    broken.event = streams.record_event()
    until(lambda: ("broken", broken, cause) in told)


@pytest.mark.parametrize("raised", [ZeroDivisionError, SystemExit])
def test_watcher_continues_after_its_group_raises(raised, until, caplog):
    class Failing(Told):
        def on_timeout(self, pending):
            raise raised

    watch = CompletionWatcher("watch that goes on", Failing())
    _, late = pending(limit=0)
    streams, fine = pending()
    watch.add(fine)
    watch.add(late)
    until(lambda: "polling 'all_reduce' failed" in caplog.text)
    finished = threading.Event()
    fine.work.add_done_callback(lambda _: finished.set())
    fine.event = streams.record_event()
    assert finished.wait(60)
    watch.remove_unfinished()
    watch.close()
    until(lambda: not [each for each in threading.enumerate() if each.name == "watch that goes on"])


def test_steps_and_operations_end_although_a_callback_raises_system_exit(watch, monkeypatch, caplog):
    def leave(*_):
        raise SystemExit

    streams, one = pending()
    streams.hold()
    finished = [threading.Event() for _ in range(3)]
    steps = [watch.when_passed(streams.record_event()) for _ in range(2)]
    steps[0].add_done_callback(leave)
    for step, event in zip(steps, finished, strict=False):
        step.add_done_callback(lambda _, event=event: event.set())
    one.work.add_done_callback(lambda _: finished[2].set())
    monkeypatch.setattr(Entry, "has_hooks", True)
    monkeypatch.setattr(Entry, "run_hooks", leave)
    watch.add(one)
    one.event = streams.record_event()
    streams.release()
    assert all(event.wait(60) for event in finished)


def test_events_are_polled_without_an_operation(until):
    watch = CompletionWatcher("watch of events")
    streams = PretendStreams()
    streams.hold()
    held, abandoned = (watch.when_passed(streams.record_event()) for _ in range(2))
    passed = watch.when_passed(PretendStreams().record_event())
    until(passed.is_completed)
    assert not held.is_completed()
    # A caller that does not want to wait any more finishes the work itself.
    abandoned.finish()
    streams.release()
    until(held.is_completed)
    streams.broken = RuntimeError("lost")
    failed = watch.when_passed(streams.record_event())
    until(failed.is_completed)
    assert str(failed.exception()) == "lost"
    watch.close()
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("watch of events")])
