"""Collectives on registered tensors: correct for every choice of registered tensors, and without staging."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
import torch

import asyncdist
from asyncdist.memory.registered import register
from asyncdist.memory.shared_arena import unavailable
from asyncdist.testing.cluster import run_ranks, world_of
from asyncdist.testing.collective_cases import collective_cases
from asyncdist_transports.shm.collectives.slot_table import SlotTable
from asyncdist_transports.shm.collectives.small import MOST_NBYTES
from asyncdist_transports.shm.collectives.zero_copy import MIN_NBYTES

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


@pytest.mark.exhaustive
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", [2, 3])
async def test_every_collective(size, dtype, who):
    async with world_of(size, transport="shm") as groups:
        seen = [Registering(group) if WHO[who](group.rank()) else group for group in groups]
        for drill in collective_cases(size, MOST_NBYTES // dtype.itemsize + 7, dtype):
            await asyncio.gather(*(work for group in seen for work in drill.start(group)))
            drill.check()


TABLE_NBYTES = 64
"""What the table may take in which a rank of these tests says where its tensors lie."""


@pytest.fixture
def staged(monkeypatch):
    """The bytes of areas that data was staged in, one entry a piece."""
    entries = []
    lock = threading.Lock()
    reserve = SlotTable._reserve

    def note(window, which, nbytes):
        with lock:
            if nbytes > TABLE_NBYTES:
                entries.append(nbytes)
        reserve(window, which, nbytes)

    monkeypatch.setattr(SlotTable, "_reserve", note)
    return entries


SIZES = [
    (MIN_NBYTES // 4 + 16, torch.float32),
    (MIN_NBYTES // 2 + 1, torch.bfloat16),
    (100_003, torch.int32),
    (1_000_001, torch.float32),
]


def filled(tensor, value):
    return tensor.copy_(torch.arange(len(tensor)) % 50 + value)


def holds(tensor, value, times=1):
    return torch.equal(tensor, (torch.arange(len(tensor)) % 50 * times + value).to(tensor.dtype))


def sum_of_ranks(group):
    return sum(range(group.size()))


def all_reduce(group, empty, count):
    tensor = filled(empty(count), group.rank())
    group.all_reduce(tensor, background=False).wait()
    return holds(tensor, sum_of_ranks(group), group.size())


def all_reduce_coalesced(group, empty, count):
    tensors = [filled(empty(each), group.rank()) for each in (count, 7, 0, count // 2)]
    group.all_reduce_coalesced(tensors, background=False).wait()
    return all(holds(tensor, sum_of_ranks(group), group.size()) for tensor in tensors)


def reduce(group, empty, count):
    tensor = filled(empty(count), group.rank())
    group.reduce(tensor, 0, background=False).wait()
    return group.rank() != 0 or holds(tensor, sum_of_ranks(group), group.size())


def reduce_scatter(group, empty, count):
    own, blocks = empty(count), [filled(empty(count), group.rank() + peer) for peer in range(group.size())]
    group.reduce_scatter(own, blocks, background=False).wait()
    return holds(own, sum_of_ranks(group) + group.size() * group.rank(), group.size())


def reduce_scatter_single(group, empty, count):
    own, everybodys = empty(count), filled(empty(count * group.size()), group.rank())
    group.reduce_scatter_single(own, everybodys, background=False).wait()
    first = torch.arange(count * group.size()) % 50 * group.size() + sum_of_ranks(group)
    return torch.equal(own, first[group.rank() * count : (group.rank() + 1) * count].to(own.dtype))


def broadcast(group, empty, count):
    tensor = filled(empty(count), group.rank())
    group.broadcast(tensor, 1, background=False).wait()
    return holds(tensor, 1)


def all_gather(group, empty, count):
    everybodys = [empty(count) for _ in range(group.size())]
    group.all_gather(everybodys, filled(empty(count), group.rank()), background=False).wait()
    return all(map(holds, everybodys, range(group.size())))


def all_gather_single(group, empty, count):
    everybodys = empty(count * group.size())
    group.all_gather_single(everybodys, filled(empty(count), group.rank()), background=False).wait()
    return all(map(holds, everybodys.chunk(group.size()), range(group.size())))


def all_gather_coalesced(group, empty, count):
    inputs = [filled(empty(each), group.rank()) for each in (count, 7)]
    outputs = [[empty(len(tensor)) for tensor in inputs] for _ in range(group.size())]
    group.all_gather_coalesced(outputs, inputs, background=False).wait()
    return all(holds(tensor, peer) for peer in range(group.size()) for tensor in outputs[peer])


def gather(group, empty, count):
    everybodys = [empty(count) for _ in range(group.size())] if group.rank() == 1 else None
    group.gather(filled(empty(count), group.rank()), everybodys, 1, background=False).wait()
    return all(map(holds, everybodys or (), range(group.size())))


def gather_single(group, empty, count):
    everybodys = empty(count * group.size()) if group.rank() == 1 else None
    group.gather_single(filled(empty(count), group.rank()), everybodys, 1, background=False).wait()
    return everybodys is None or all(map(holds, everybodys.chunk(group.size()), range(group.size())))


def scatter(group, empty, count):
    own = empty(count)
    blocks = [filled(empty(count), peer) for peer in range(group.size())] if group.rank() == 1 else None
    group.scatter(own, blocks, 1, background=False).wait()
    return holds(own, group.rank())


def all_to_all(group, empty, count):
    incoming = [empty(count) for _ in range(group.size())]
    outgoing = [filled(empty(count), group.rank() + 10 * peer) for peer in range(group.size())]
    group.all_to_all(incoming, outgoing, background=False).wait()
    return all(holds(incoming[peer], peer + 10 * group.rank()) for peer in range(group.size()))


def all_to_all_single(group, empty, count):
    counts = [count + group.rank() + peer for peer in range(group.size())]
    incoming, outgoing = empty(sum(counts)), empty(sum(counts))
    for peer, block in enumerate(outgoing.split(counts)):
        filled(block, group.rank() + 10 * peer)
    group.all_to_all_single(incoming, outgoing, counts, counts, background=False).wait()
    return all(holds(block, peer + 10 * group.rank()) for peer, block in enumerate(incoming.split(counts)))


COLLECTIVES = [
    all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_single, broadcast, all_gather,
    all_gather_single, all_gather_coalesced, gather, gather_single, scatter, all_to_all, all_to_all_single,
]  # fmt: skip


def large(collective, count, dtype):
    """Return a count from which on open tensors are not staged by a collective."""
    return count if collective is all_reduce else count + MOST_NBYTES // dtype.itemsize


def tried(group, empty, count, dtype, staged):
    """Try every collective: return the names of those that went wrong, and of those that staged anything on any rank."""
    wrong, stage = [], []
    for collective in COLLECTIVES:
        before = len(staged)
        group.barrier(background=False).wait()
        if not collective(group, lambda each: empty(each, dtype), large(collective, count, dtype)):
            wrong.append(collective.__name__)
        group.barrier(background=False).wait()
        if len(staged) > before:
            stage.append(collective.__name__)
    return wrong, stage


def whole(count, dtype):
    return asyncdist.empty(count, dtype=dtype)


def slice_of_one(count, dtype):
    return asyncdist.empty(count + 30, dtype=dtype)[13 : 13 + count]


@pytest.mark.exhaustive
@pytest.mark.parametrize("empty", [whole, slice_of_one])
@pytest.mark.parametrize(("count", "dtype"), SIZES)
@pytest.mark.parametrize("size", [2, 3])
def test_nothing_is_staged(staged, size, count, dtype, empty):
    assert (
        run_ranks(size, lambda group: tried(group, empty, count, dtype, staged), transport="shm") == [([], [])] * size
    )


def ordinary(count, dtype):
    return torch.empty(count, dtype=dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize("registers", ["nobody", "rank 0", "rank 1", "both, in turns"])
@pytest.mark.parametrize(("count", "dtype"), SIZES)
def test_ranks_may_differ_in_what_they_have_registered(staged, count, dtype, registers):
    def program(group):
        turns = itertools.cycle([whole, ordinary] if "turns" in registers else [ordinary])
        empty = whole if registers == f"rank {group.rank()}" else lambda *form: next(turns)(*form)
        return tried(group, empty, count, dtype, staged)

    for wrong, stage in run_ranks(2, program, transport="shm"):
        assert wrong == []
        assert registers != "nobody" or stage == [collective.__name__ for collective in COLLECTIVES]


def test_coalesced_tensors_that_overlap_are_reduced_one_after_the_other():
    def program(group):
        whole = asyncdist.empty(MIN_NBYTES).fill_(1)
        group.all_reduce_coalesced([whole[:-10], whole[10:]], background=False).wait()
        return whole.unique().tolist()

    assert run_ranks(2, program, transport="shm") == [[2.0, 4.0]] * 2
