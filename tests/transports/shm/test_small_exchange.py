"""Small collectives: made anew from their plan, and repeated without one, on tensors of any layout side by side."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asyncdist.base.ops import premul_sum
from asyncdist.errors import MismatchError
from asyncdist.memory.reduce_kernels import Arithmetic
from asyncdist.testing.cluster import run_ranks, world_of
from asyncdist_transports.shm.collectives.slot_table import SLOTS
from asyncdist_transports.shm.collectives.small import MOST_NBYTES
from asyncdist_transports.shm.transport import ShmTransport

CALLS = 2 * SLOTS + 3


def plain(*shape):
    return torch.empty(*shape)


def strided(*shape):
    return torch.empty(*shape, 2)[..., 0]


def numbers(count, of):
    return torch.arange(float(count)) + 100 * of


def all_reduce(group, make, count, turn):
    tensor = make(count).copy_(numbers(count, group.rank() + turn))
    group.all_reduce(tensor, background=False).result()
    return torch.equal(tensor, sum(numbers(count, rank + turn) for rank in range(group.size())))


def reduce(group, make, count, turn):
    root = turn % group.size()
    tensor = make(count).copy_(numbers(count, group.rank() + turn))
    assert group.reduce(tensor, root, background=False).result() is tensor
    total = sum(numbers(count, rank + turn) for rank in range(group.size()))
    return torch.equal(tensor, total if group.rank() == root else numbers(count, group.rank() + turn))


def reduce_scatter(group, make, count, turn):
    blocks = [make(count).copy_(numbers(count, group.rank() + 10 * rank + turn)) for rank in range(group.size())]
    whole = make(group.size() * count).copy_(torch.cat(blocks))
    output, single = make(count), make(count)
    group.reduce_scatter(output, blocks, background=False).result()
    group.reduce_scatter_single(single, whole, background=False).result()
    expected = sum(numbers(count, rank + 10 * group.rank() + turn) for rank in range(group.size()))
    return torch.equal(output, expected) and torch.equal(single, expected)


def broadcast(group, make, count, turn):
    root = turn % group.size()
    tensor = make(count).copy_(numbers(count, group.rank() + turn))
    assert group.broadcast(tensor, root, background=False).result() is tensor
    return torch.equal(tensor, numbers(count, root + turn))


def all_gather(group, make, count, turn):
    own = make(count).copy_(numbers(count, group.rank() + turn))
    blocks, whole = [make(count) for _ in range(group.size())], make(group.size() * count)
    assert group.all_gather(blocks, own, background=False).result() is blocks
    group.all_gather_single(whole, own, background=False).result()
    expected = torch.cat([numbers(count, rank + turn) for rank in range(group.size())])
    return torch.equal(torch.cat(blocks), expected) and torch.equal(whole, expected)


def gather(group, make, count, turn):
    root = turn % group.size()
    own = make(count).copy_(numbers(count, group.rank() + turn))
    blocks = [make(count) for _ in range(group.size())] if group.rank() == root else None
    assert group.gather(own, blocks, root, background=False).result() is blocks
    return blocks is None or all(torch.equal(block, numbers(count, rank + turn)) for rank, block in enumerate(blocks))


def scatter(group, make, count, turn):
    root = turn % group.size()
    blocks = [make(count).copy_(numbers(count, rank + turn)) for rank in range(group.size())]
    own = make(count)
    assert group.scatter(own, blocks if group.rank() == root else None, root, background=False).result() is own
    return torch.equal(own, numbers(count, group.rank() + turn))


def all_to_all(group, make, count, turn):
    rank, size = group.rank(), group.size()
    outgoing = [make(count).copy_(numbers(count, 10 * rank + peer + turn)) for peer in range(size)]
    whole = make(size * count).copy_(torch.cat(outgoing))
    incoming, single = [make(count) for _ in range(size)], make(size * count)
    assert group.all_to_all(incoming, outgoing, background=False).result() is incoming
    assert group.all_to_all_single(single, whole, background=False).result() is single
    expected = torch.cat([numbers(count, 10 * peer + rank + turn) for peer in range(size)])
    return torch.equal(torch.cat(incoming), expected) and torch.equal(single, expected)


COLLECTIVES = [all_reduce, reduce, reduce_scatter, broadcast, all_gather, gather, scatter, all_to_all]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("size", [2, 3])
def test_repeated_call_matches_planned_call(size, collective):
    """In turn everybody's tensors lie in order, and one member's do not: it makes a plan for what the others repeat."""

    def program(group):
        odd = [group.rank() == turn % (size + 1) for turn in range(CALLS)]
        return [collective(group, strided if odd[turn] else plain, 5, turn) for turn in range(CALLS)]

    assert run_ranks(size, program, transport="shm") == [[True] * CALLS] * size


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_sizes_up_to_the_small_limit(collective):
    counts = [0, 1, 1000, *(MOST_NBYTES // 4 // blocks + more for blocks in (1, 2) for more in (0, 1))]

    def program(group):
        return [collective(group, plain, count, turn) for count in counts for turn in range(3)]

    assert run_ranks(2, program, transport="shm") == [[True] * 3 * len(counts)] * 2


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("count", [0, 5, 9000, MOST_NBYTES // 4 + 1])
@pytest.mark.parametrize("size", [2, 3])
def test_uniform_all_to_all_matches_nonuniform_one(size, count, registered):
    """What a rank sends itself is its own affair: its blocks may differ in size where all of the others' are alike."""

    def program(group):
        rank, right = group.rank(), []
        for turn in range(CALLS):
            odd = turn % (size + 1)
            counts = [count + 7 * (rank == peer == odd) for peer in range(size)]
            outgoing = torch.cat([numbers(own, 10 * rank + peer + turn) for peer, own in enumerate(counts)])
            incoming = torch.empty_like(outgoing)
            for tensor in (outgoing, incoming) if registered else ():
                group.register(tensor)
            group.all_to_all_single(incoming, outgoing, counts, counts, background=False).result()
            expected = torch.cat([numbers(own, 10 * peer + rank + turn) for peer, own in enumerate(counts)])
            right.append(torch.equal(incoming, expected))
        return right

    assert run_ranks(size, program, transport="shm") == [[True] * CALLS] * size


@pytest.mark.parametrize("counts", [(3, 4), (3, MOST_NBYTES)])
def test_all_to_all_size_mismatch_is_reported_on_both_ranks(counts):
    def program(group):
        tensor = torch.ones(2, counts[group.rank()])
        return type(group.all_to_all_single(tensor, tensor.clone(), background=False).exception())

    assert run_ranks(2, program, transport="shm") == [MismatchError] * 2


def test_conjugate_views_gradients_and_factors_are_not_confused():
    """Conjugate views, tensors that want gradients, factors: what differs although it looks alike is not repeated."""

    def program(group):
        rank = group.rank()
        value = torch.full((3,), complex(rank, 1))
        seen = []
        for own in (value, value.conj(), value):
            whole = torch.empty(6, dtype=value.dtype)
            group.all_gather_single(whole, own, background=False).result()
            seen.append(whole[::3].tolist())
        for factor in (2, 3):
            tensor = torch.ones(3)
            group.all_reduce(tensor, premul_sum(factor), background=False).result()
            seen.append(tensor[0].item())
        for wants in (False, True, False):
            tensor = torch.full((3,), float(rank), requires_grad=wants)
            group.broadcast(tensor, 1, background=False).result()
            seen.append(tensor[0].item())
        return seen

    expected = [[1j, 1 + 1j], [-1j, 1 - 1j], [1j, 1 + 1j], 4, 6, 1, 1, 1]
    assert run_ranks(2, program, transport="shm") == [expected] * 2


def test_different_calls_that_wait_for_each_other_are_reported():
    """The one reduces to itself, the other waits for a broadcast: neither stages anything."""

    def program(group):
        for _ in range(2):
            group.barrier(background=False).result()
        part, zero = group.world.new_group(None), group.rank() == 0
        tensor = torch.ones(3)
        work = part.reduce(tensor, 0, background=False) if zero else part.broadcast(tensor, 0, background=False)
        return type(work.exception())

    assert run_ranks(2, program, transport="shm") == [MismatchError] * 2


@pytest.mark.parametrize("count", [1, 5000, 16 << 10])
@pytest.mark.parametrize("crowded", [True, False])
async def test_oversubscribed_members_copy_the_first_result(crowded, count, monkeypatch):
    added, add = [], Arithmetic.reduce
    monkeypatch.setattr(Arithmetic, "reduce", lambda how, *areas: added.append(how) or add(how, *areas))
    monkeypatch.setattr(ShmTransport, "_oversubscribed", crowded)
    async with world_of(3, transport="shm") as groups:
        for turn in range(CALLS):
            tensors = [numbers(count, group.rank() + turn) for group in groups]
            await asyncio.gather(*(group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)))
            assert all(torch.equal(tensor, sum(numbers(count, rank + turn) for rank in range(3))) for tensor in tensors)
    assert len(added) == CALLS * (1 if crowded else 3)
