"""The work of a device operation: order of streams, waiting, refusals and failures."""

import asyncio
import gc
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asyncdist.errors import (
    GroupAbortedError,
    LoopThreadError,
    NotInitializedError,
    OperationTimeoutError,
    UnsupportedError,
    UsageError,
    WaitTimeoutError,
)
from asyncdist.kernel.engine.work import joined
from tests.support.devices import PretendStreams, Queued, device_group, devices_of, one_device

pytestmark = pytest.mark.each_loop


@pytest.fixture
def streams():
    return PretendStreams()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture(params=["queued"])
def group(request, streams):
    """A device group of this rank alone, over the back end `Queued` or ``"staged"``."""
    with one_device(streams, [Queued] if request.param == "queued" else []) as group:
        yield group


# -- streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["staged", "queued"], indirect=True)
def test_communication_stream_first_waits_for_the_callers_stream(group, streams):
    group.all_reduce(torch.ones(4)).wait()
    assert streams.log[:2] == [("record_event", "caller"), ("wait_event", "ours")]
    ours = streams.asked("ours")
    assert ours.index("wait_event") < ours.index("record_event")
    assert ours[-1] == "record_event"


def test_wait_orders_the_callers_stream_after_the_operation(group, streams):
    group.all_reduce(torch.ones(4)).synchronize()
    streams.hold()
    work = group.all_reduce(torch.ones(4))
    streams.log.clear()
    assert work.wait()
    assert streams.asked("caller") == ["wait_event"]
    assert not work.is_completed()
    streams.release()
    work.synchronize()
    assert work.is_completed()
    assert work.is_success()


def test_ordered_after_orders_after_one_operation(group, streams):
    work = group.all_reduce(torch.ones(4))
    work.wait()
    with work.ordered_after():
        pass
    assert streams.log[-1] == ("ordered_after", "caller")


def test_blocking_call_orders_the_callers_stream(group, streams):
    group.all_reduce(torch.ones(4)).wait()
    streams.hold()
    before = len(streams.log)
    group.all_reduce(torch.ones(4), background=False)  # returns although the device is held
    assert streams.log[before] == ("record_event", "caller")
    assert streams.log[-1] == ("wait_event", "caller")


def test_calls_are_enqueued_in_issue_order(group):
    tensor = torch.zeros(1)
    works = [group.all_reduce(tensor) for _ in range(50)]
    for work in works:
        work.wait()
    assert tensor.item() == 50


# -- waiting ----------------------------------------------------------------------------------------


async def test_loop_runs_while_the_device_is_busy(eventually):
    streams = [PretendStreams() for _ in range(2)]
    async with devices_of(2, streams=streams) as groups:
        await asyncio.gather(*(group.all_reduce(torch.ones(4)) for group in groups))
        for each in streams:
            each.hold()
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticker = asyncio.create_task(tick())
        tensors = [torch.ones(4) for _ in groups]
        waiting = [asyncio.ensure_future(_awaited(g.all_reduce(t))) for g, t in zip(groups, tensors, strict=True)]
        await eventually(lambda: ticks > 200)
        assert not any(one.done() for one in waiting)
        for each in streams:
            each.release()
        for value, tensor in zip(await asyncio.gather(*waiting), tensors, strict=True):
            assert value is tensor
            assert torch.equal(tensor, torch.full((4,), 2.0))
        ticker.cancel()


async def _awaited(work):
    return await work


async def test_cancelled_await_leaves_the_operation_running():
    streams = PretendStreams()
    async with devices_of(1, [Queued], [streams]) as [group]:
        await group.all_reduce(torch.ones(1))
        streams.hold()
        work = group.all_reduce(torch.ones(1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_awaited(work), 0.01)
        streams.release()
        assert torch.equal(await work, torch.full((1,), 2.0))


@pytest.mark.parametrize("group", ["staged"], indirect=True)
def test_result_and_timeouts_before_the_operation_is_enqueued(group, streams):
    streams.hold()
    # The staged backend waits for the copy to the host, so the call is not enqueued.
    work = group.all_reduce(torch.ones(4))
    with pytest.raises(UsageError, match="not completed"):
        work.result()
    with pytest.raises(WaitTimeoutError, match=r"timed out after 0\.01 s"):
        work.wait(0.01)
    with pytest.raises(WaitTimeoutError):
        work.synchronize(0.01)
    assert work.exception() is None
    streams.release()
    work.synchronize()
    assert torch.equal(work.result(), torch.ones(4))


def test_future_completes_with_the_data(group, streams):
    group.all_reduce(torch.ones(4)).wait()
    streams.hold()
    future = group.all_reduce(torch.ones(4)).get_future()
    assert not future.done()
    streams.release()
    assert torch.equal(future.wait(), torch.full((4,), 2.0))


def test_wait_of_joined_works(group, streams):
    group.all_reduce(torch.ones(4)).wait()
    streams.hold()
    tensors = [torch.ones(4), torch.zeros(2)]
    whole = joined([group.all_reduce(tensor) for tensor in tensors])
    streams.log.clear()
    assert whole.wait()
    assert streams.asked("caller") == ["wait_event"] * 2
    assert not whole.is_completed()
    assert [tensor.sum().item() for tensor in whole.result()] == [8.0, 2.0]


async def test_await_of_joined_works(threads):
    async with devices_of(2) as groups:
        tensors = [[torch.ones(4), torch.ones(3)] for _ in groups]
        works = [joined([g.all_reduce(one) for one in pair]) for g, pair in zip(groups, tensors, strict=True)]
        await asyncio.gather(*works)
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(threads, work.synchronize, 20.0) for work in works))
        assert all(torch.equal(one, torch.full_like(one, 2)) for pair in tensors for one in pair)


async def test_blocking_on_the_driving_loop_is_refused():
    streams = [PretendStreams() for _ in range(2)]
    async with devices_of(2, streams=streams) as groups:
        work = groups[0].all_reduce(torch.ones(1))  # its peer has not called it
        for wait in (work.wait, work.synchronize):
            with pytest.raises(LoopThreadError):
                wait()
        with pytest.raises(LoopThreadError):
            groups[0].barrier(background=False)
        await asyncio.gather(work, groups[1].all_reduce(torch.ones(1)))
        for wait in (work.wait, work.synchronize):
            with pytest.raises(LoopThreadError):
                wait()


async def test_wait_is_allowed_on_the_driving_loop_if_the_host_waits_for_no_peer():
    """It orders streams. The first call connects the devices, for which it needs the loop."""
    async with devices_of(1, [Queued]) as (group,):
        first = group.all_reduce(torch.ones(1))
        await first
        with pytest.raises(LoopThreadError):
            first.wait()
        assert group.all_reduce(torch.ones(1)).wait()


# -- refusals and failures --------------------------------------------------------------------------


def test_capture_into_a_cuda_graph_is_refused(group, streams):
    streams.captures = True
    for call in (lambda: group.all_reduce(torch.ones(1)), group.barrier):
        with pytest.raises(UnsupportedError, match="cannot be captured into a CUDA graph"):
            call()
    streams.captures = False
    group.all_reduce(torch.ones(1)).wait()


@pytest.mark.parametrize("background", [True, False])
def test_stuck_device_times_out_on_all_ranks(together, until, background):
    """A rank may receive the other rank's timeout before its own."""
    held = [PretendStreams() for _ in range(2)]

    def program(group):
        streams = held[group.rank()]
        on = device_group(group, (), streams)
        on.all_reduce(torch.ones(4)).wait()
        streams.hold()

        def release_once_it_has_failed():
            until(lambda: on.error is not None)
            streams.release()

        # A blocking call waits in the event, until this thread releases the device.
        releasing = threading.Thread(target=release_once_it_has_failed)
        releasing.start()
        work = on.all_reduce(torch.ones(4), background=background, timeout=0.3)
        with pytest.raises((OperationTimeoutError, GroupAbortedError), match=r"not completed after \d") as late:
            work.synchronize()
        assert 0.3 <= float(re.search(r"not completed after (\d+\.\d) s", str(late.value))[1]) < on.timeout
        with pytest.raises((OperationTimeoutError, GroupAbortedError)):
            on.all_reduce(torch.ones(4)).wait()
        releasing.join()
        on.close()
        return late.type

    assert OperationTimeoutError in together(2, program)


async def test_destroyed_group_fails_pending_operations():
    streams = [PretendStreams() for _ in range(2)]
    async with devices_of(2, streams=streams) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))
        streams[0].hold()
        works = [groups[0].all_reduce(torch.ones(4)) for _ in range(3)]
        groups[0].close()
        for outcome in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(outcome, GroupAbortedError)
            assert "the group was destroyed" in str(outcome)
        with pytest.raises(NotInitializedError, match="was destroyed"):
            groups[0].barrier()
        streams[0].release()


@pytest.mark.parametrize("wait", ["await", "wait", "synchronize", "exception", "never"])
async def test_failures_of_joined_works_are_logged_only_if_the_whole_is_not_waited_for(caplog, threads, wait):
    # Works of other tests log their errors now.
    gc.collect()
    caplog.clear()
    streams = [PretendStreams() for _ in range(2)]
    async with devices_of(2, streams=streams) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))
        streams[0].hold()
        whole = joined([groups[0].all_reduce(torch.ones(4)) for _ in range(3)])
        groups[0].close()
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        whole.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
        await ended.wait()
        if wait == "await":
            with pytest.raises(GroupAbortedError):
                await whole
        elif wait == "exception":
            assert isinstance(whole.exception(), GroupAbortedError)
        elif wait != "never":
            with pytest.raises(GroupAbortedError):
                await loop.run_in_executor(threads, getattr(whole, wait))
        streams[0].release()
        del whole
    gc.collect()
    logged = [message for message in caplog.messages if "never retrieved" in message]
    assert len(logged) == (wait == "never")
