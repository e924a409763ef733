"""Failures of devices: each raises an error that names the cause, or falls back to a slower backend."""

import asyncio
import logging

import pytest
import torch

from asyncdist.errors import GroupAbortedError, GroupError, PeerLostError
from asyncdist.kernel.devices.cuda_streams import CudaStreams
from asyncdist.testing.cluster import run_ranks, world_of
from asyncdist_transports.cuda_ipc import peer_memory
from tests.support.cuda import cuda_ipc_over
from tests.support.devices import PretendStreams, device_group, devices_of, weakly_held

LARGE = 100_000


@pytest.mark.parametrize("what", ["all_reduce", "recv"])
async def test_abort_reaches_device_operations_of_all_ranks(what):
    """The aborting rank has used no tensor on a device."""
    async with world_of(2) as (aborting, waiting):
        device = device_group(waiting)
        room = torch.zeros(3)
        work = device.all_reduce(room) if what == "all_reduce" else device.recv(room, 0)
        aborting.abort("on purpose")
        with pytest.raises(GroupAbortedError, match="rank 0 aborted: on purpose"):
            await work
        with pytest.raises(GroupAbortedError, match="rank 0 aborted: on purpose"):
            await device.send(room, 0)
        device.close()


@pytest.mark.parametrize("what", ["all_reduce", "recv"])
def test_survivor_keeps_memory_mapped_that_its_device_may_use(what, monkeypatch, caplog, until):
    """The event of a killed process never completes: no thread may wait for it without a limit, or unmap its memory."""
    monkeypatch.setattr(peer_memory, "_CLOSE_TIMEOUT", 0.2)
    made = {0: [], 1: []}
    streams = [PretendStreams() for _ in range(2)]

    def rank(group):
        rank = group.rank()
        device = device_group(group, [cuda_ipc_over(made[rank])], streams[rank])
        tensor = torch.ones(LARGE)
        device.all_reduce(tensor).synchronize()
        if rank == 1:
            device.send(tensor, 0).wait() if what == "recv" else device.all_reduce(tensor).wait()
            # Like a killed process, it does not end its device operations.
            group.world.leave()
            device.close()
            return None
        streams[0].hold()
        work = device.recv(tensor, 1) if what == "recv" else device.all_reduce(tensor)
        work.wait()
        with pytest.raises(PeerLostError) as caught:
            device.all_reduce(tensor).wait()
        assert caught.value.peer == 1
        device.close()
        # One warning for the collectives, and one for messages if there were any; perhaps by an executor's thread.
        until(lambda: caplog.text.count("stays mapped until this process ends") == len(made[0]))
        assert all(driver.mapped for driver in made[0]), "unmapped while the device may use it"
        streams[0].release()
        return "survived"

    assert run_ranks(2, rank)[0] == "survived"


@pytest.mark.parametrize("what", ["all_reduce", "messages"])
def test_lost_device_fails_all_ranks(what):
    streams = [PretendStreams(f"GPU-{rank}") for rank in range(2)]

    def rank(group):
        rank = group.rank()
        device = device_group(group, [cuda_ipc_over()], streams[rank])
        tensor = torch.ones(LARGE)
        device.all_reduce(tensor).synchronize()
        if rank == 1:
            streams[1].broken = RuntimeError("CUDA error: unspecified launch failure")

        def go_on():
            # An operation that has completed here before the other device failed succeeds.
            for _ in range(3):
                if what == "messages":
                    (device.recv(tensor, 1) if rank == 0 else device.send(tensor, 0)).synchronize()
                device.all_reduce(tensor).synchronize()

        with pytest.raises(GroupAbortedError, match="unspecified launch failure") as caught:
            go_on()
        assert caught.value.peer == 1
        device.close()

    run_ranks(2, rank)


def test_without_pinned_memory_copies_use_pageable_memory(monkeypatch, caplog):
    streams, plain = CudaStreams.__new__(CudaStreams), torch.empty
    asked = []

    def empty(*size, pin_memory=False, **keywords):
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return plain(*size, **keywords)

    monkeypatch.setattr(torch, "empty", empty)
    room = streams.pinned(10, torch.float64)
    assert (room.numel(), room.dtype) == (10, torch.float64)
    assert asked == [True, False]
    assert "80 bytes of pinned memory cannot be allocated" in caplog.text


@pytest.mark.parametrize("what", ["all_reduce", "messages"])
async def test_allocation_failure_reaches_all_ranks(what):
    class Full(PretendStreams):
        def pinned(self, count, dtype):
            raise RuntimeError("can't allocate memory")

    async with devices_of(2, [], [PretendStreams(), Full()]) as groups:
        if what == "messages":
            works = [groups[0].recv(torch.ones(5), 1), groups[1].send(torch.ones(5), 0)]
        else:
            works = [group.all_reduce(torch.ones(5)) for group in groups]
        for outcome in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(outcome, GroupAbortedError)
            assert "can't allocate memory" in str(outcome)
            assert outcome.peer == 1


@pytest.mark.parametrize("kinds", [[], [cuda_ipc_over()]], ids=["staged", "cuda_ipc"])
@pytest.mark.parametrize("background", [True, False])
def test_dropped_tensors_live_until_the_device_is_done(kinds, background, until):
    streams = [PretendStreams() for _ in range(2)]

    def rank(group):
        rank = group.rank()
        device = device_group(group, kinds, streams[rank])
        device.barrier().wait()
        seen, tensor = weakly_held(LARGE)
        # The staged backend waits for the device in the call.
        if kinds:
            streams[rank].hold()
        work = device.all_reduce(tensor, background=background)
        del tensor
        work.wait()
        if kinds:
            assert seen() is not None
            streams[rank].release()
        work.synchronize()
        del work
        until(lambda: seen() is None)
        device.close()

    run_ranks(2, rank)


@pytest.mark.parametrize(
    "reason",
    ["cudaErrorInvalidDevice: invalid device ordinal", "cudaErrorPeerAccessUnsupported: peer access is not supported",
     "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"],
    ids=["not visible", "no peer access", "versions"],
)  # fmt: skip
def test_memory_that_one_rank_cannot_map_is_staged(reason, caplog):
    caplog.set_level(logging.INFO, "asyncdist")

    def rank(group):
        rank = group.rank()
        kinds = [cuda_ipc_over(refuses=RuntimeError(reason) if rank == 1 else None)]
        device = device_group(group, kinds)
        device.all_reduce(tensor := torch.ones(LARGE)).wait()
        (device.recv(tensor, 0) if rank else device.send(tensor, 1)).wait()
        device.barrier().wait()
        device.close()
        return device.backend, tensor[0].item()

    assert run_ranks(2, rank) == [("staged", 2.0)] * 2
    told = [record.message for record in caplog.records if "tensors by staged" in record.message]
    assert len(told) == 2, "one line a rank"
    assert all(reason in line and "rank 1" in line for line in told)


def test_backend_that_cannot_be_created_is_not_used(caplog):
    caplog.set_level(logging.INFO, "asyncdist")

    class Broken(cuda_ipc_over()):
        @staticmethod
        def make_driver(device):
            raise RuntimeError("cudaErrorDevicesUnavailable")

    def rank(group):
        device = device_group(group, [Broken if group.rank() else cuda_ipc_over()])
        tensor = torch.full((LARGE,), float(group.rank()))
        (device.recv(tensor, 0) if group.rank() else device.send(tensor, 1)).wait()
        device.all_reduce(tensor).wait()
        device.close()
        return device.backend, tensor[0].item()

    assert run_ranks(2, rank) == [("staged", 0.0)] * 2
    assert "point-to-point over cuda_ipc is not available: RuntimeError: cudaErrorDevicesUnavailable" in caplog.text


async def test_failed_group_leaves_other_groups_usable():
    streams = [PretendStreams() for _ in range(2)]
    async with devices_of(2, [cuda_ipc_over()], streams) as groups:
        others = [device_group(group.host.world.group, [cuda_ipc_over()], name="other") for group in groups]
        await asyncio.gather(*(group.all_reduce(torch.ones(LARGE)) for group in [*groups, *others]))
        groups[0].host.abort("enough")
        for group in groups:
            with pytest.raises(GroupError):
                await group.all_reduce(torch.ones(LARGE))
        tensors = [torch.ones(LARGE) for _ in others]
        await asyncio.gather(*(group.all_reduce(tensor) for group, tensor in zip(others, tensors, strict=True)))
        assert all(tensor[0] == 2 for tensor in tensors)
        for group in others:
            group.close()
