"""The status of each rank: its call, the ranks that it waits for, its rates."""

import asyncio

import pytest
import torch

from asyncdist.errors import GroupError
from asyncdist.kernel.tracing.job_status import statuses, wait_edges
from asyncdist.kernel.tracing.recorder import Entry, Recorder
from asyncdist.kernel.tracing.trace_record import parse
from asyncdist.testing.cluster import world_of


def observed(groups, most=None):
    return statuses([parse(group.endpoint.recorder.content("a test", most)) for group in groups])


async def test_chain_of_waiting_ranks_ends_at_the_rank_that_has_not_called():
    async with world_of(4) as groups:
        pair = [group.world.new_group([2, 3], "pair") for group in groups[2:]]
        await asyncio.gather(*(group.barrier() for group in groups))
        works = [group.all_reduce(torch.ones(10)) for group in groups[:2]]
        works.append(pair[0].broadcast(torch.ones(5), src=0))
        found = observed(groups)
        assert [status.waits_for for status in found] == [[2, 3], [2, 3], [3], []]
        assert [status.waited_for_by for status in found] == [[], [], [0, 1], [0, 1, 2]]
        assert [status.state for status in found] == ["pending"] * 3 + ["idle"]
        assert [status.call.call for status in found[1:3]] == [
            "all_reduce(10 x float32, SUM)",
            "broadcast(5 x float32, root 0)",
        ]
        edges = [(edge.waiting, edge.call.group, edge.call.seq, edge.awaited) for edge in wait_edges(found)]
        assert edges == [([0, 1], "world", 2, [2, 3]), ([2], "pair (ranks 2-3)", 1, [3])]
        works += [group.all_reduce(torch.ones(10)) for group in groups[2:]]
        works.append(pair[1].broadcast(torch.ones(5), src=0))
        await asyncio.gather(*works)
        assert wait_edges(observed(groups)) == []


async def test_receive_waits_for_its_source_and_silent_rank_is_awaited():
    async with world_of(3) as groups:
        message = groups[0].recv(torch.ones(1), 2, tag=7)
        anyone = groups[1].recv(torch.ones(1), tag=8)
        first, second = observed(groups[:2])
        assert (first.waits_for, first.call.seq, second.waits_for) == ([2], 7, [])
        barrier = groups[0].barrier()
        assert observed(groups[:1])[0].pending == 2
        await asyncio.gather(groups[2].send(torch.ones(1), 0, tag=7), groups[2].send(torch.ones(1), 1, tag=8))
        await asyncio.gather(message, anyone)
        # Nothing is known about ranks 1 and 2.
        assert observed(groups[:1])[0].waits_for == [1, 2]
        await asyncio.gather(barrier, *(group.barrier() for group in groups[1:]))


async def test_rank_with_a_different_call_is_marked():
    async with world_of(3) as groups:
        works = [group.all_reduce(torch.ones(4)) for group in groups[:2]]
        works.append(groups[2].all_reduce(torch.ones(8)))
        with pytest.raises(GroupError):
            await asyncio.gather(*works)
        await asyncio.gather(*works, return_exceptions=True)
        found = observed(groups)
        assert [status.state for status in found] == ["failed"] * 3
        marked = [[remark for remark in status.remarks if remark.startswith("mismatch")] for status in found]
        assert marked == [[], [], ["mismatch: other ranks called all_reduce(4 x float32, SUM)"]]
        assert "while rank" in found[0].remarks[-1]


async def test_limit_of_completed_calls_keeps_the_pending_ones():
    async with world_of(2) as groups:
        pending = groups[0].recv(torch.ones(1), 1)
        for _ in range(5):
            await asyncio.gather(*(group.barrier() for group in groups))
        content = groups[0].endpoint.recorder.content("a test", most=2)
        assert [(entry["op"], entry["seq"]) for entry in content["entries"]] == [
            ("recv", 0), ("barrier", 4), ("barrier", 5),
        ]  # fmt: skip
        (status, _) = observed(groups, most=2)
        assert status.waits_for == [1]
        await asyncio.gather(groups[1].send(torch.ones(1), 0), pending)


def recorded(monkeypatch, ranks, at=200.0):
    """Return the status of ranks whose barriers have these (start, end) times, on a clock that shows ``at``."""
    records = []
    for rank, calls in enumerate(ranks):
        recorder = Recorder(rank, len(ranks), 100, "w")
        recorder.add_group("world", tuple(range(len(ranks))), lambda calls=calls: len(calls))
        for number, (issued, finished) in enumerate(calls, 1):
            entry = Entry("world", "barrier", number, 0, 1000)
            entry.issued, entry.finished = issued, finished
            recorder.add(entry)
        monkeypatch.setattr("time.perf_counter", lambda: at)
        monkeypatch.setattr("time.time", lambda: 1_000_000.0)
        records.append(parse(recorder.content("a test")))
        monkeypatch.undo()
    return statuses(records)


def test_rates_cover_ten_seconds_or_the_recorded_calls(monkeypatch):
    busy, idle, new, none = recorded(
        monkeypatch,
        [[(150.0 + each, 150.5 + each) for each in range(50)], [(100.0, 101.0)], [(198.0, 198.5), (199.0, 199.5)], []],
    )
    assert busy.calls_per_second == 1.0
    assert busy.bytes_per_second == 1000.0
    assert (idle.calls_per_second, idle.seconds) == (0.0, 99.0)
    assert new.calls_per_second == 1.0
    assert (none.state, none.calls_per_second) == ("idle", 0.0)


def test_rank_that_arrives_last_is_a_straggler(monkeypatch):
    def calls(behind):
        return [(100.0 + each + behind, 100.5 + each) for each in range(20)]

    prompt, late = recorded(monkeypatch, [calls(0.0), calls(0.25)])
    assert prompt.remarks == []
    assert late.remarks == ["straggler: last in 100% of 20 collectives of 'world', 250.0 ms behind the first (median)"]
    assert not any(status.remarks for status in recorded(monkeypatch, [calls(0.0), calls(0.0005)]))
