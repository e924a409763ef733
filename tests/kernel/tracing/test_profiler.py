"""What torch's profiler shows of operations."""

import asyncio
import threading
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from asyncdist.testing.cluster import run_ranks, world_of


def profiled():
    return profile(activities=[ProfilerActivity.CPU])


def spans(profiler):
    return [event for event in profiler.events() if event.name.startswith("asyncdist:")]


async def test_profiler_shows_each_operation_once_per_rank(transport):
    async with world_of(2, transport=transport) as groups:
        with profiled() as profiler:
            for _ in range(2):  # the second goes by what is known of the first
                await asyncio.gather(*(group.all_reduce(torch.ones(4)) for group in groups))
            await asyncio.gather(*(group.broadcast(torch.ones(1_000_000), 0) for group in groups))
            await asyncio.gather(groups[0].send(torch.ones(1), 1), groups[1].recv(torch.ones(1), 0))
        assert [entry.op for group in groups for entry in group.endpoint.recorder if entry.span is not None] == []
        seen = Counter(event.name for event in spans(profiler))
        assert seen == {
            "asyncdist:all_reduce": 4, "asyncdist:broadcast": 2, "asyncdist:send": 1, "asyncdist:recv": 1,
        }  # fmt: skip


async def test_span_ends_with_the_operation_and_contains_no_other_operator():
    async with world_of(2) as (early, late):
        with profiled() as profiler:
            waiting = early.recv(torch.ones(1), 1)
            torch.ones(100) + 1
            await late.send(torch.ones(1), 0)
            await waiting
        (span,) = (event for event in spans(profiler) if event.name == "asyncdist:recv")
        (between,) = (event for event in profiler.events() if event.name == "aten::add")
        assert span.time_range.start < between.time_range.start
        assert span.time_range.end > between.time_range.end


@pytest.mark.parametrize("background", [False, True])
def test_only_the_profiled_thread_is_recorded(together, transport, background):
    def program(group):
        if group.rank() == 1:
            group.all_reduce(torch.ones(300_000), background=background).wait()
            return []
        with profiled() as profiler:
            over = threading.Event()
            work = group.all_reduce(torch.ones(300_000), background=background)
            work.add_done_callback(lambda _: over.set())
            assert over.wait(60)
        return [event.name for event in spans(profiler)]

    assert together(2, program, transport=transport) == [["asyncdist:all_reduce"], []]


async def test_profiler_shows_late_and_failed_operations():
    async with world_of(2) as (first, second):
        with profiled() as profiler:
            waiting = first.recv(torch.ones(1), 1)
            failing = second.recv(torch.ones(1), 0, tag=1)
            second.abort("as a test")
            assert await asyncio.gather(waiting, failing, return_exceptions=True)
            beyond = first.recv(torch.ones(1), 1)
        assert beyond.exception() is not None
        assert [event.name for event in spans(profiler)] == ["asyncdist:recv"] * 3


def test_no_span_without_profiler(monkeypatch):
    monkeypatch.setattr("asyncdist.kernel.tracing.recorder.enter_span", None)
    run_ranks(2, lambda group: group.all_reduce(torch.ones(4), background=False).wait())
