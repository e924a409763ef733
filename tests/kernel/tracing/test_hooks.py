"""Hooks on the operations of groups: what they get, when they are called, and that they break nothing."""

import asyncio
import logging
import sys
import threading
from functools import partial

import pytest
import torch

from asyncdist.errors import GroupError
from asyncdist.kernel.tracing.hooks import ObservedEntry, OperationRecord, register_hook
from asyncdist.kernel.tracing.metrics import GroupMetrics
from asyncdist.testing.cluster import run_ranks, world_of
from tests.support.devices import devices_of
from tests.support.frames import frames_of


class Calls(list):
    """The calls of a hook, as (event, record); `wait_for` waits until there are so many."""

    def __init__(self, group=None) -> None:
        super().__init__()
        self._changed = threading.Condition()
        if group is not None:
            self.register(group.register_hook)

    def add(self, event: str, record: OperationRecord) -> None:
        with self._changed:
            self.append((event, record))
            self._changed.notify_all()

    def register(self, on):
        return on(
            on_start=lambda record: self.add("start", record),
            on_end=lambda record: self.add("end", record),
            on_error=lambda record: self.add("error", record),
        )

    def wait_for(self, count: int) -> list[tuple[str, OperationRecord]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self) >= count, timeout=20)
        return list(self)


async def test_hook_gets_the_start_and_the_end_of_a_collective(transport, each):
    async with world_of(2, transport=transport) as groups:
        calls = Calls(groups[1])
        await each(groups, lambda group: group.all_reduce(torch.ones(6)))
        (begin, started), (finish, ended) = calls
    assert (begin, finish) == ("start", "end")
    assert started.end is None
    assert started.error is None
    assert not started.waits
    assert ended[:10] == started[:10]
    assert (ended.group, ended.ranks, ended.rank, ended.op, ended.seq) == ("world", (0, 1), 1, "all_reduce", 1)
    assert (ended.nbytes, ended.dtype, ended.peer, ended.error) == (24, torch.float32, None, None)
    assert ended.start <= ended.end
    assert ended.duration == ended.end - ended.start
    assert set(ended.waits) <= {0}
    with pytest.raises(AttributeError):
        ended.op = "other"
    with pytest.raises(TypeError):
        ended.waits[0] = 1.0


async def test_hook_gets_the_peer_of_a_message_as_global_rank(transport):
    async with world_of(3, transport=transport) as groups:
        part = [groups[rank].world.new_group([1, 2]) for rank in range(3)]
        calls = Calls()
        for group in part[1:]:
            calls.register(group.register_hook)
        await asyncio.gather(part[1].send(torch.ones(5), 1, tag=7), part[2].recv(torch.ones(5), 0, tag=7))
        await asyncio.gather(part[1].send(torch.ones(5), 1), part[2].recv(torch.ones(5), None))
        ends = [record for event, record in calls if event == "end"]
    assert {(one.op, one.seq, one.rank, one.peer) for one in ends} == {
        ("send", 7, 1, 2), ("recv", 7, 2, 1), ("send", 0, 1, 2), ("recv", 0, 2, None),
    }  # fmt: skip


async def test_hook_gets_the_error_of_a_failed_operation_instead_of_its_end(transport):
    async with world_of(2, transport=transport) as groups:
        calls = Calls(groups[0])
        pending = groups[0].all_reduce(torch.ones(3))
        groups[1].abort("enough")
        with pytest.raises(GroupError) as raised:
            await pending
        assert [event for event, _ in calls] == ["start", "error"]
        assert calls[1][1].error is raised.value
        # A failed group refuses the operation, which then has a start and an error too.
        with pytest.raises(GroupError):
            await groups[0].all_reduce(torch.ones(3))
    assert [event for event, _ in calls] == ["start", "error"] * 2


def test_each_thread_of_blocking_ranks_calls_the_hooks_of_its_operations(transport):
    def program(group):
        calls = Calls(group)
        for _ in range(5):
            group.all_reduce(torch.ones(2), background=False).result()
        group.barrier(background=False).result()
        return [record.op for event, record in calls.wait_for(12) if event == "end"]

    assert run_ranks(2, program, transport=transport) == [["all_reduce"] * 5 + ["barrier"]] * 2


async def test_exception_of_a_hook_is_logged_once_and_breaks_nothing(transport, each, caplog):
    async with world_of(2, transport=transport) as groups:

        def broken(record):
            raise ValueError("a broken hook")

        calls = Calls()
        groups[0].register_hook(broken, broken, broken)
        calls.register(groups[0].register_hook)
        with caplog.at_level(logging.ERROR, logger="asyncdist"):
            for _ in range(3):
                first, second = await each(groups, lambda group: group.all_reduce(torch.ones(2)))
        assert first.tolist() == second.tolist() == [2, 2]
    assert [event for event, _ in calls] == ["start", "end"] * 3
    (message,) = caplog.messages
    assert "all_reduce #1 of group 'world' on rank 0" in message
    assert "ValueError: a broken hook" in caplog.text
    caplog.clear()  # the frames of the traceback keep the group


def test_hook_that_leaves_its_thread_keeps_no_other_hook_from_its_call():
    calls = Calls()

    def rank(group):
        group.register_hook(lambda _: sys.exit("of a hook"))
        calls.register(group.register_hook)
        with pytest.raises(SystemExit, match="of a hook"):
            group.barrier(background=False).result()

    run_ranks(1, rank)
    assert [event for event, _ in calls] == ["start"]


async def test_removed_hook_is_not_called_and_leaves_no_work_behind(each):
    async with world_of(2) as groups:
        calls = Calls()
        with calls.register(groups[0].register_hook) as hook:
            await each(groups, lambda group: group.barrier())
            pending = groups[0].all_reduce(torch.ones(1))
        await asyncio.gather(pending, groups[1].all_reduce(torch.ones(1)))
        hook.remove()
        await each(groups, lambda group: group.barrier())
        assert [event for event, _ in calls] == ["start", "end", "start"]
        last = groups[0].endpoint.recorder.last
        assert not isinstance(last, ObservedEntry)
        assert not groups[0].hooks.pending


def test_hooks_and_metrics_enter_few_frames():
    """A native collective enters 12 Python functions; see `tests/groups/test_call_depth.py`."""

    def fewest_frames(group):
        tensor = torch.ones(1)
        return min(frames_of(partial(group.all_reduce, tensor, background=False)) for _ in range(100))

    def fewest():
        return min(run_ranks(2, fewest_frames, transport="shm"))

    # On a busy machine each call waits for the peer and wakes it: the threads of one process do not poll at the same time.
    waits, bare = 4, fewest()
    with register_hook(on_end=id):
        hooked = fewest()
    metrics = GroupMetrics()
    counted = fewest()
    metrics.close()
    assert hooked <= bare + waits + 8
    assert counted <= bare + waits + 8
    assert fewest() <= bare + waits


async def test_process_wide_hook_applies_to_existing_and_later_groups(each):
    async with world_of(2) as groups:
        calls = Calls()
        with calls.register(register_hook):
            await each(groups, lambda group: group.barrier())
            part = [group.world.new_group([0, 1], "later") for group in groups]
            await each(part, lambda group: group.barrier())
        await each(groups, lambda group: group.barrier())
        await each(part, lambda group: group.barrier())
    ends = {(record.group, record.rank) for event, record in calls if event == "end"}
    assert ends == {("world", 0), ("world", 1), ("later", 0), ("later", 1)}
    assert len(calls) == 8


async def test_hook_may_start_an_operation_of_another_group(each):
    async with world_of(2) as groups:
        part = [group.world.new_group([0, 1], "other") for group in groups]
        started = []
        for rank in range(2):
            groups[rank].register_hook(on_end=lambda record, rank=rank: started.append(part[rank].barrier()))
        await each(groups, lambda group: group.all_reduce(torch.ones(1)))
        await asyncio.gather(*started)
    assert len(started) == 2


async def test_record_says_for_which_rank_an_operation_waited(transport):
    async with world_of(2, transport=transport) as groups:
        calls = Calls(groups[0])
        pending = groups[0].all_reduce(torch.ones(100))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not pending.is_completed()
        await asyncio.gather(pending, groups[1].all_reduce(torch.ones(100)))
        ended = calls[-1][1]
    assert set(ended.waits) == {1}
    assert 0 < ended.waits[1] <= ended.duration


async def test_receive_from_any_rank_counts_the_wait_for_the_sender(transport):
    async with world_of(3, transport=transport) as groups:
        calls = Calls(groups[0])
        pending = groups[0].recv(torch.ones(4), None)
        await asyncio.gather(groups[2].send(torch.ones(4), 0), pending)
        assert list(calls[-1][1].waits) == [2]


async def test_waits_of_parts_that_run_at_once_do_not_exceed_the_duration(each):
    async with world_of(3, transport="tcp") as groups:
        calls = Calls(groups[0])
        await each(groups, lambda group: group.all_reduce(torch.ones(3 << 20)))
        await each(groups, lambda group: group.all_gather([torch.ones(5) for _ in range(3)], torch.ones(5)))
        await each(groups, lambda group: group.all_gather_object([None] * 3, {"rank": group.rank()}))
        ends = [record for event, record in calls if event == "end"]
    assert len(ends) == 3
    for record in ends:
        assert set(record.waits) <= {1, 2}
        assert all(seconds <= record.duration for seconds in record.waits.values())


async def test_parts_that_wait_for_the_same_rank_at_once_count_once():
    async with world_of(3) as groups:
        calls = Calls(groups[0])
        entry = groups[0].hooks.new_entry("world", "all_reduce", 1, 0, 4)
        observed = groups[0].hooks.record(entry)
        assert observed is entry
        entry.spans += [(1, 4.0, 6.0), (2, 0.0, 1.0), (1, 0.0, 3.0), (1, 2.0, 2.5), (1, 2.0, 5.0), (2, 7.0, 9.0)]
        entry.finish()
        entry.run_hooks()
    assert calls[-1][1].waits == {1: 6.0, 2: 3.0}


async def test_hooks_see_operations_on_devices():
    async with devices_of(2) as groups:
        calls = Calls()
        for group in groups:
            calls.register(group.host.register_hook)
        await asyncio.gather(*(group.all_reduce(torch.ones(3)) for group in groups))
        ops = [(event, record.op, record.rank) for event, record in calls.wait_for(4) if record.op == "all_reduce"]
    assert sorted(ops) == [(event, "all_reduce", rank) for event in ("end", "start") for rank in (0, 1)]
