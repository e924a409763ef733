"""torch Work and Future objects of operations on a device; a fake device stands in for CUDA."""

import datetime

import pytest
import torch
import torch.distributed as dist

from asyncdist.errors import GroupAbortedError
from asyncdist.kernel.engine.work import joined
from asyncdist.torch_backend import ProcessGroup
from asyncdist.torch_backend.torch_work import Work
from tests.support.devices import PretendStreams, Queued, one_device


@pytest.fixture
def streams():
    return PretendStreams()


@pytest.fixture
def group(streams):
    """A group of one rank whose first operation has completed. The fake device then executes nothing."""
    with one_device(streams, [Queued]) as group:
        group.all_reduce(torch.ones(1)).synchronize()
        streams.hold()
        yield group


def test_wait_and_synchronize_return_after_ordering_the_stream(group, streams):
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


def test_future_completes_once_the_operation_is_queued_on_the_stream(group, streams):
    tensor = torch.ones(4)
    work = Work(group.all_reduce(tensor), [tensor])
    future = work.get_future()
    assert future is work.get_future()
    [found] = future.then(lambda done: [done.value()[0] * 3]).wait()
    assert torch.equal(found, torch.full((4,), 6.0))
    assert ("ordered_after", "caller") in streams.log
    assert not work.is_completed()


def test_future_of_a_failed_operation_raises_its_error(group, streams):
    streams.broken = RuntimeError("the device is lost")
    work = Work(group.barrier(), [])
    with pytest.raises(RuntimeError, match="the device is lost"):
        work.get_future().wait()
    with pytest.raises(GroupAbortedError, match="the device is lost"):
        work.wait()


def test_coalesced_works_order_the_stream_on_wait(group, streams):
    tensors = [torch.ones(4), torch.ones(2)]
    work = Work(joined([group.all_reduce(tensor) for tensor in tensors]), tensors)
    streams.log.clear()
    assert work.wait()
    assert streams.asked("caller") == ["wait_event"] * 2
    future = work.get_future()
    assert not future.done()
    streams.release()
    assert [tensor.sum().item() for tensor in future.wait()] == [8.0, 4.0]


def test_backend_for_cpu_and_cuda_is_accepted(tmp_path):
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
