"""Small collectives in shared memory: first and repeated calls, with tensors of several layouts and sizes."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only

from asyncdist.base.ops import premul_sum
from asyncdist.errors import MismatchError
from asyncdist.kernel.memory.reduce_kernels import Arithmetic
from asyncdist.testing.cluster import run_ranks, world_of
from asyncdist.testing.collective_cases import moving, reducing
from asyncdist_transports.shm.collectives.slot_table import SLOTS
from asyncdist_transports.shm.collectives.small import MOST_NBYTES
from asyncdist_transports.shm.transport import ShmTransport
from tests.support.pairs import each_pair
from tests.support.ranks import run_cases

CALLS = 2 * SLOTS + 3


def numbers(count, of):
    return torch.arange(float(count)) + 100 * of


class Strided:
    """A group that gets strided copies of all tensors; their values are copied back after the call."""

    def __init__(self, group):
        self._group = group

    def __getattr__(self, name):
        def call(*arguments, **options):
            copies = []

            def strided(tensor):
                copy = torch.empty((*tensor.shape, 2), dtype=tensor.dtype)[..., 0].copy_(tensor)
                copies.append((tensor, copy))
                return copy

            work = getattr(self._group, name)(*tree_map_only(torch.Tensor, strided, arguments), **options)
            work.result()
            for tensor, copy in copies:
                tensor.copy_(copy)
            return work

        return call

    def rank(self):
        return self._group.rank()


def cases(size, count):
    return [*reducing(size, count, torch.float32), *moving(size, count, torch.float32)]


@pytest.mark.parametrize("size", [2, 3])
def test_repeated_calls_match_calls_with_strided_tensors(size):
    """In each turn the tensors of at most one member are strided. Its call is not a repeated one."""
    turns = [cases(size, 5) for _ in range(CALLS)]

    def program(group):
        for turn, each in enumerate(turns):
            for case in each:
                caller = Strided(group) if group.rank() == turn % (size + 1) else group
                for work in case.start(caller, background=False):
                    work.result()

    run_ranks(size, program, transport="shm")
    for case in itertools.chain(*turns):
        case.check()


async def test_sizes_up_to_the_small_limit():
    async with world_of(2, transport="shm") as groups:
        for count in (0, 1, 1000, *(MOST_NBYTES // 4 // blocks + more for blocks in (1, 2) for more in (0, 1))):
            await run_cases(groups, cases(2, count))


@each_pair(count=[0, 5, 9000, MOST_NBYTES // 4 + 1], size=[2, 3], registered=[False, True])
def test_uniform_all_to_all_matches_nonuniform_one(size, count, registered):
    """The block that a rank sends to itself may differ in size from all other blocks."""

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
        for requires_grad in (False, True, False):
            tensor = torch.full((3,), float(rank), requires_grad=requires_grad)
            group.broadcast(tensor, 1, background=False).result()
            seen.append(tensor[0].item())
        return seen

    expected = [[1j, 1 + 1j], [-1j, 1 - 1j], [1j, 1 + 1j], 4, 6, 1, 1, 1]
    assert run_ranks(2, program, transport="shm") == [expected] * 2


@pytest.mark.parametrize("count", [1, 300, 4000])
def test_sums_follow_ieee_whatever_numpy_does_after_an_overflow(count):
    def program(group):
        largest = torch.full((count,), torch.finfo(torch.float32).max)
        bits = torch.full((count,), 0x7FC00001 + group.rank(), dtype=torch.int32)
        with np.errstate(all="raise"):
            group.all_reduce(largest, background=False).result()
            group.all_reduce(bits.view(torch.float32), background=False).result()
        assert largest.isinf().all()
        return bits.tolist()

    first, second = run_ranks(2, program, transport="shm")
    assert first == second


def test_tensors_that_follow_one_another_at_an_address_keep_their_values():
    def program(group):
        for value in range(CALLS):
            tensor = torch.full((3,), float(value))
            group.all_reduce(tensor, background=False).result()
            assert tensor.tolist() == [2.0 * value] * 3
            del tensor

    run_ranks(2, program, transport="shm")


def test_different_calls_that_wait_for_each_other_are_reported():
    """Rank 0 reduces to itself, and rank 1 waits for rank 0's broadcast: neither stages data."""

    def program(group):
        for _ in range(2):
            group.barrier(background=False).result()
        part, zero = group.world.new_group(None), group.rank() == 0
        tensor = torch.ones(3)
        work = part.reduce(tensor, 0, background=False) if zero else part.broadcast(tensor, 0, background=False)
        return type(work.exception())

    assert run_ranks(2, program, transport="shm") == [MismatchError] * 2


@pytest.mark.parametrize(
    ("oversubscribed", "count"), [(True, 1), (True, 5000), (True, 16 << 10), (False, 1), (False, 16 << 10)]
)
async def test_oversubscribed_members_copy_the_first_result(oversubscribed, count, monkeypatch):
    reductions, reduce = [], Arithmetic.reduce
    monkeypatch.setattr(
        Arithmetic, "reduce", lambda arithmetic, *areas: reductions.append(arithmetic) or reduce(arithmetic, *areas)
    )
    monkeypatch.setattr(ShmTransport, "_oversubscribed", oversubscribed)
    async with world_of(3, transport="shm") as groups:
        for turn in range(CALLS):
            tensors = [numbers(count, group.rank() + turn) for group in groups]
            await asyncio.gather(*(group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)))
            assert all(torch.equal(tensor, sum(numbers(count, rank + turn) for rank in range(3))) for tensor in tensors)
    assert len(reductions) == CALLS * (1 if oversubscribed else 3)


async def test_different_calls_before_the_end_of_a_group_are_logged(caplog):
    """Each rank is a root, which waits for no other, and no later call compares them."""
    async with world_of(2, transport="shm") as groups:
        among = [group.world.new_group(None) for group in groups]
        for group in among:
            await group.broadcast(torch.ones(4), group.rank())
        for group in among:
            group.close()
        assert "calls before the end of the group had wrong results: " in caplog.text
        assert "broadcast(4 x float32, root 0" in caplog.text
        assert "broadcast(4 x float32, root 1" in caplog.text
