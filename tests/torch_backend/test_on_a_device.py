"""What torch gets of an operation on a device; the device is a pretended one."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from asyncdist.engine.work import joined
from asyncdist.errors import GroupAbortedError
from asyncdist.torch_backend import ProcessGroup
from asyncdist.torch_backend.torch_work import Work
from tests.support.devices import PretendStreams, Queued, device_group


@pytest.fixture
def held(together):
    """Run a program on a device that is held, once the group has met: ``held(lambda group, streams: ...)``."""

    def held(program):
        def rank(group):
            streams = PretendStreams()
            on = device_group(group, [Queued], streams)
            try:
                on.all_reduce(torch.ones(1)).synchronize()
                streams.hold()
                program(on, streams)
            finally:
                streams.release()
                on.close()

        together(1, rank)

    return held


def test_wait_and_synchronize_order_the_stream_and_return(held):
    def program(group, streams):
        tensor = torch.ones(4)
        work = Work(group.all_reduce(tensor), [tensor])
        streams.log.clear()
        assert work.wait()
        assert work.wait(datetime.timedelta(seconds=1))
        work.synchronize()
        assert streams.asked("caller") == ["wait_event"] * 3
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        assert work.result() == [tensor]
        streams.release()
        assert work.is_completed()
        assert work.is_success()

    held(program)


def test_a_future_is_complete_when_the_operation_is_queued_and_ordered_behind_it(held):
    def program(group, streams):
        tensor = torch.ones(4)
        work = Work(group.all_reduce(tensor), [tensor])
        future = work.get_future()
        assert future is work.get_future()
        [found] = future.then(lambda done: [done.value()[0] * 3]).wait()
        assert torch.equal(found, torch.full((4,), 6.0))
        assert ("ordered_after", "caller") in streams.log
        assert not work.is_completed()

    held(program)


def test_a_future_of_what_failed_raises_from_what_hangs_on_it(held):
    def program(group, streams):
        streams.broken = RuntimeError("the device is lost")
        work = Work(group.barrier(), [])
        with pytest.raises(RuntimeError, match="the device is lost"):
            work.get_future().wait()
        with pytest.raises(GroupAbortedError, match="the device is lost"):
            work.wait()

    held(program)


def test_several_as_one_are_waited_for_in_the_stream(held):
    def program(group, streams):
        tensors = [torch.ones(4), torch.ones(2)]
        work = Work(joined([group.all_reduce(tensor) for tensor in tensors]), tensors)
        streams.log.clear()
        assert work.wait()
        assert streams.asked("caller") == ["wait_event"] * 2
        future = work.get_future()
        assert not future.done()
        streams.release()
        assert [tensor.sum().item() for tensor in future.wait()] == [8.0, 4.0]

    held(program)


def test_both_devices_may_be_named(tmp_path):

    dist.init_process_group(
        "cpu:asyncdist,cuda:asyncdist", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1
    )
    try:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.ones(3))
        assert isinstance(dist.group.WORLD, ProcessGroup)
        dist.barrier()
    finally:
        dist.destroy_process_group()
