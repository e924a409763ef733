"""Deadlines do not depend on the wall clock, which jumps when a machine wakes or its time is set."""

import asyncio
import time

import pytest
import torch

import asyncdist
from asyncdist.errors import OperationTimeoutError, RendezvousTimeoutError, StoreTimeoutError
from asyncdist.store import HashStore
from asyncdist.testing.cluster import world_of
from tests.support.stopwatch import Stopwatch


@pytest.fixture(params=[1e9, -1e9, 0.0], ids=["ahead", "back", "stopped"])
def jumping(request, monkeypatch):
    """Let the wall clock jump at every reading."""
    readings = [time.time()]
    monkeypatch.setattr(time, "time", lambda: readings.append(readings[-1] + request.param) or readings[-1])
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))


@pytest.mark.exhaustive
async def test_operation_deadlines_survive_clock_jumps(jumping, transport):
    async with world_of(2, transport=transport, timeout=20) as groups:
        tensors = [torch.ones(1000), torch.ones(1000)]
        await asyncio.gather(*(group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)))
        assert tensors[0][0] == 2.0
        before, since = time.monotonic(), Stopwatch()
        with pytest.raises(OperationTimeoutError, match=r"after 0\.3 s"):
            await groups[0].all_reduce(tensors[0], timeout=0.3)
        assert time.monotonic() - before > 0.29
        assert since.seconds() < 2.0


async def test_rendezvous_deadline_survives_clock_jumps(jumping, tmp_path):
    before, since = time.monotonic(), Stopwatch()
    with pytest.raises(RendezvousTimeoutError):
        await asyncdist.init_process_group(init_method=f"file://{tmp_path}/world", rank=0, world_size=2, timeout=0.3)
    assert time.monotonic() - before > 0.29
    assert since.seconds() < 2.0


def test_store_deadline_survives_clock_jumps(jumping):
    before, since = time.monotonic(), Stopwatch()
    with pytest.raises(StoreTimeoutError):
        HashStore().wait(["never"], 0.2)
    assert time.monotonic() - before > 0.19
    assert since.seconds() < 2.0
