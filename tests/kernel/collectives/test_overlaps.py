"""Inputs that overlap outputs: the results are those of copies of the inputs."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asyncdist.kernel.memory.buffers import Memory, TensorBlocks, copy_overlapping_inputs
from asyncdist.kernel.memory.registered import register
from asyncdist.kernel.memory.shared_arena import unavailable
from asyncdist.kernel.transport import registry
from asyncdist.testing.arithmetic import noise
from asyncdist.testing.cluster import world_of
from asyncdist_transports.shm.collectives.small import MOST_NBYTES

SIZE = 3
ROOT = SIZE - 1
# Elements of a block: for a small exchange, and for several pieces.
COUNTS = (6, MOST_NBYTES // 4 + 8)


def parts(whole):
    return list(whole.chunk(SIZE))


def next_part(group, whole):
    return parts(whole)[(group.rank() + 1) % SIZE]


def across(whole):
    """Return the second half of the first part and the first half of the second part."""
    count = len(whole) // SIZE
    return whole[count // 2 : count // 2 + count]


def at_root(group, value):
    return value if group.rank() == ROOT else None


def unequal_rows(group, whole, read, **how):
    rows = whole[: len(whole) // 6 * 6].view(6, -1)
    outgoing = [1 + (peer - group.rank()) % SIZE for peer in range(SIZE)]
    incoming = [1 + (group.rank() - peer) % SIZE for peer in range(SIZE)]
    return group.all_to_all_single(rows, read(rows), incoming, outgoing, **how)


def exchange_in_turns(group, whole, read, **how):
    first, *others = parts(whole)
    return group.all_to_all([*others, first], [read(part) for part in parts(whole)], **how)


def coalesced(group, whole, read, **how):
    """The input of one gather is in the output of another gather."""
    halves = [part.chunk(2) for part in parts(whole)]
    return group.all_gather_coalesced(halves, [read(half) for half in halves[group.rank()][::-1]], **how)


# Functions of a group, the memory of a rank, and a function that is applied to each input.
CASES = {
    "all_to_all": lambda group, whole, read, **how: group.all_to_all(parts(whole), list(map(read, parts(whole))), **how),
    "all_to_all in turns": exchange_in_turns,
    "all_to_all_single": lambda group, whole, read, **how: group.all_to_all_single(whole, read(whole), **how),
    "all_to_all_single of unequal rows": unequal_rows,
    "reduce_scatter to the next": lambda group, whole, read, **how: group.reduce_scatter(
        next_part(group, whole), list(map(read, parts(whole))), **how
    ),
    "reduce_scatter_single to the first": lambda group, whole, read, **how: group.reduce_scatter_single(
        parts(whole)[0], read(whole), **how
    ),
    "reduce_scatter_single across": lambda group, whole, read, **how: group.reduce_scatter_single(
        across(whole), read(whole), **how
    ),
    "all_gather of the next": lambda group, whole, read, **how: group.all_gather(
        parts(whole), read(next_part(group, whole)), **how
    ),
    "all_gather_single across": lambda group, whole, read, **how: group.all_gather_single(
        whole, read(across(whole)), **how
    ),
    "all_gather_coalesced": coalesced,
    "gather of the next": lambda group, whole, read, **how: group.gather(
        read(next_part(group, whole)), at_root(group, parts(whole)), ROOT, **how
    ),
    "gather_single across": lambda group, whole, read, **how: group.gather_single(
        read(across(whole)), at_root(group, whole), ROOT, **how
    ),
    "scatter to the next": lambda group, whole, read, **how: group.scatter(
        next_part(group, whole), at_root(group, list(map(read, parts(whole)))), ROOT, **how
    ),
    "scatter across": lambda group, whole, read, **how: group.scatter(
        across(whole), at_root(group, list(map(read, parts(whole)))), ROOT, **how
    ),
}  # fmt: skip


def as_it_is(tensor):
    return tensor


def memories(group):
    """Yield the memory of a rank for three calls of each size, with a copy; the second and third call are prepared."""
    for count in COUNTS:
        for turn in range(3):
            whole = noise(SIZE * count, torch.int32, seed=10 * group.rank() + turn)
            yield whole, whole.clone()


async def awaited(case, groups, prepare=as_it_is, name=""):
    for row in zip(*map(memories, groups), strict=True):
        for whole, _ in row:
            prepare(whole)
        await asyncio.gather(*(case(g, whole, as_it_is) for g, (whole, _) in zip(groups, row, strict=True)))
        await asyncio.gather(*(case(g, due, torch.clone) for g, (_, due) in zip(groups, row, strict=True)))
        for whole, due in row:
            assert torch.equal(whole, due), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
async def test_awaited(transport, name):
    async with world_of(SIZE, transport=transport) as groups:
        await awaited(CASES[name], groups)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("name", CASES)
def test_blocking(together, transport, name):
    def rank(group):
        for whole, due in memories(group):
            CASES[name](group, whole, as_it_is, background=False).result()
            CASES[name](group, due, torch.clone, background=False).result()
            assert torch.equal(whole, due)

    together(SIZE, rank, transport=transport)


@pytest.mark.exhaustive
@pytest.mark.skipif(unavailable() is not None, reason=f"no shared memory: {unavailable()}")
@pytest.mark.parametrize("name", CASES)
async def test_registered(name):
    """The other ranks read the inputs in place."""
    async with world_of(SIZE, transport="shm") as groups:
        await awaited(CASES[name], groups, register)


@pytest.mark.parametrize("hosts", ["aab", "abc"])
async def test_on_several_hosts(monkeypatch, hosts):
    monkeypatch.setattr(registry, "names", lambda: ["shm", "tcp"])
    async with world_of(SIZE, transport="auto", hosts=hosts) as groups:
        for name, case in CASES.items():
            await awaited(case, groups, name=name)


def test_only_overlapping_tensors_are_copied():
    memory, other = Memory(torch.arange(12)), Memory(torch.arange(4))
    blocks = TensorBlocks.split(memory, 3)
    assert copy_overlapping_inputs(blocks, [other], {}) is blocks
    assert copy_overlapping_inputs(blocks, [blocks[1]], {1: 0}) is blocks
    assert copy_overlapping_inputs([other], blocks, {}) == [other]
    read = copy_overlapping_inputs(blocks, [blocks[1]], {0: 0})
    assert [place is blocks[number] for number, place in enumerate(read)] == [True, False, True]
    assert torch.equal(read[1].tensor, blocks[1].tensor)
    read = copy_overlapping_inputs(blocks, [memory.slice(3, 5)], {0: 0, 1: 0})
    assert [place is blocks[number] for number, place in enumerate(read)] == [False, False, True]
    nothing = memory.slice(5, 5)
    assert copy_overlapping_inputs([nothing], [memory], {}) == [nothing]
    assert copy_overlapping_inputs(blocks, [nothing], {}) is blocks
