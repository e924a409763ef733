"""Collectives on registered tensors: the right result, whoever has registered what, and nothing staged on the way."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import asyncdist
from asyncdist.arena import unavailable
from asyncdist.registered import register
from asyncdist.testing.cluster import run_ranks, world_of
from asyncdist.testing.drills import drills
from asyncdist_transports.shm.direct import MIN_NBYTES
from asyncdist_transports.shm.small import MOST_NBYTES
from asyncdist_transports.shm.window import Window

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no shared memory: {unavailable()}")


class Registering:
    """A group that registers every tensor it is called with, in place."""

    def __init__(self, group):
        self._group = group

    def __getattr__(self, name):
        method = getattr(self._group, name)
        if not callable(method):
            return method

        def call(*arguments, **how):
            for argument in arguments:
                _register(argument)
            return method(*arguments, **how)

        return call


def _register(value):
    if isinstance(value, torch.Tensor):
        register(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _register(item)


WHO = {"all": lambda rank: True, "some": lambda rank: rank % 2 == 1}


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", [2, 3])
async def test_every_collective(size, dtype, who):
    async with world_of(size, transport="shm") as groups:
        seen = [Registering(group) if WHO[who](group.rank()) else group for group in groups]
        for drill in drills(size, MOST_NBYTES // dtype.itemsize + 7, dtype):
            await asyncio.gather(*(work for group in seen for work in drill.start(group)))
            drill.check()


@pytest.fixture
def staged(monkeypatch):
    """The bytes of areas that data was staged in, one entry a piece."""
    entries = []
    lock = threading.Lock()
    reserve = Window._reserve

    def note(window, which, nbytes):
        with lock:
            entries.append(nbytes)
        reserve(window, which, nbytes)

    monkeypatch.setattr(Window, "_reserve", note)
    return entries


SIZES = [
    (MIN_NBYTES // 4 + 16, torch.float32),
    (MIN_NBYTES // 2 + 1, torch.bfloat16),
    (100_003, torch.int32),
    (1_000_001, torch.float32),
]


def all_reduce(group, empty, count, dtype):
    tensor = empty(count, dtype)
    tensor.copy_(torch.arange(count) % 50 + group.rank())
    group.all_reduce(tensor, background=False).wait()
    expected = torch.arange(count) % 50 * group.size() + sum(range(group.size()))
    return torch.equal(tensor, expected.to(dtype))


def broadcast(group, empty, count, dtype):
    tensor = empty(count, dtype)
    tensor.copy_(torch.arange(count) % 50 * (group.rank() == 1))
    group.broadcast(tensor, 1, background=False).wait()
    return torch.equal(tensor, (torch.arange(count) % 50).to(dtype))


def reduce(group, empty, count, dtype):
    tensor = empty(count, dtype)
    tensor.copy_(torch.arange(count) % 50 + group.rank())
    group.reduce(tensor, 0, background=False).wait()
    expected = torch.arange(count) % 50 * group.size() + sum(range(group.size()))
    return group.rank() != 0 or torch.equal(tensor, expected.to(dtype))


def all_gather_into_tensor(group, empty, count, dtype):
    own, everybodys = empty(count, dtype), empty(count * group.size(), dtype)
    own.copy_(torch.arange(count) % 50 + group.rank())
    group.all_gather_single(everybodys, own, background=False).wait()
    expected = torch.cat([torch.arange(count) % 50 + rank for rank in range(group.size())])
    return torch.equal(everybodys, expected.to(dtype))


def reduce_scatter_tensor(group, empty, count, dtype):
    own, everybodys = empty(count, dtype), empty(count * group.size(), dtype)
    everybodys.copy_(torch.arange(count * group.size()) % 50 + group.rank())
    group.reduce_scatter_single(own, everybodys, background=False).wait()
    first = torch.arange(count * group.size()) % 50 * group.size() + sum(range(group.size()))
    return torch.equal(own, first[group.rank() * count : (group.rank() + 1) * count].to(dtype))


COLLECTIVES = [all_reduce, broadcast, reduce, all_gather_into_tensor, reduce_scatter_tensor]


def large(collective, count, dtype):
    """Return a count from which on open tensors are not staged by a collective."""
    return count if collective is all_reduce else count + MOST_NBYTES // dtype.itemsize


def whole(count, dtype):
    return asyncdist.empty(count, dtype=dtype)


def slice_of_one(count, dtype):
    return asyncdist.empty(count + 30, dtype=dtype)[13 : 13 + count]


@pytest.mark.parametrize("empty", [whole, slice_of_one])
@pytest.mark.parametrize(("count", "dtype"), SIZES)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("size", [2, 3])
def test_nothing_is_staged(staged, collective, size, count, dtype, empty):
    count = large(collective, count, dtype)
    assert run_ranks(size, lambda group: collective(group, empty, count, dtype), transport="shm") == [True] * size
    assert staged == []


def ordinary(count, dtype):
    return torch.empty(count, dtype=dtype)


@pytest.mark.parametrize("registers", ["nobody", "rank 0", "rank 1"])
@pytest.mark.parametrize(("count", "dtype"), SIZES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_ranks_may_differ_in_what_they_have_registered(staged, collective, count, dtype, registers):
    count = large(collective, count, dtype)

    def program(group):
        empty = whole if registers == f"rank {group.rank()}" else ordinary
        return collective(group, empty, count, dtype)

    assert run_ranks(2, program, transport="shm") == [True, True]
    if registers == "nobody":
        assert staged != []
