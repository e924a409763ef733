"""All-reduces of sparse tensors, whose numbers of elements differ between ranks."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.errors import MismatchError
from asyncdist.testing.cluster import world_of

SHAPE = (5, 4, 2)


def sparse(places, sparse_dims=2, dtype=torch.float32):
    """Return a sparse tensor with values at the places, which may repeat."""
    indices = torch.tensor(places, dtype=torch.int64).view(-1, sparse_dims).T
    values = torch.arange(1, 1 + len(places) * torch.Size(SHAPE[sparse_dims:]).numel(), dtype=torch.float32)
    values = values.view(-1, *SHAPE[sparse_dims:]).to(dtype)
    return torch.sparse_coo_tensor(indices, values, SHAPE, check_invariants=True)


PLACES = ([(0, 0), (4, 3)], [], [(4, 3), (1, 2), (4, 3)])


async def reduced(groups, tensors, op):
    await asyncio.gather(*[group.all_reduce(tensor, op) for group, tensor in zip(groups, tensors, strict=True)])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
async def test_sums_and_averages_are_those_of_dense_tensors(transport, size, op):
    async with world_of(size, transport=transport) as groups:
        tensors = [sparse(PLACES[rank]) for rank in range(size)]
        total = sum(tensor.to_dense() for tensor in tensors) / (size if op is ReduceOp.AVG else 1)
        await reduced(groups, tensors, op)
        for tensor in tensors:
            assert tensor.is_coalesced()
            assert torch.equal(tensor.to_dense(), total)
            assert torch.equal(tensor.values(), tensors[0].values())


@pytest.mark.parametrize("op", ["sum", torch.distributed.ReduceOp.SUM], ids=["name", "torch"])
async def test_reduction_is_accepted_by_name_and_from_torch(op):
    async with world_of(2) as groups:
        tensors = [sparse(PLACES[0]) for _ in groups]
        total = tensors[0].to_dense() * 2
        await reduced(groups, tensors, op)
        assert all(torch.equal(tensor.to_dense(), total) for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.complex64])
async def test_every_kind_of_number(transport, dtype):
    async with world_of(2, transport=transport) as groups:
        tensors = [sparse(PLACES[rank * 2], dtype=dtype) for rank in range(2)]
        total = tensors[0].to_dense() + tensors[1].to_dense()
        await reduced(groups, tensors, ReduceOp.SUM)
        assert all(torch.equal(tensor.to_dense(), total) for tensor in tensors)


async def test_averages_of_integers_are_truncated_towards_zero(transport):
    async with world_of(2, transport=transport) as groups:
        rows = [[-3, 4], [-4, 3]]
        tensors = [torch.sparse_coo_tensor([[0, 2]], row, (3,), check_invariants=True) for row in rows]
        await reduced(groups, tensors, ReduceOp.AVG)
        assert [tensor.to_dense().tolist() for tensor in tensors] == [[-3, 0, 3]] * 2


async def test_scalar_values_and_empty_tensors(transport):
    async with world_of(2, transport=transport) as groups:
        scalars = [torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (3,), check_invariants=True) for rank in range(2)]
        await reduced(groups, scalars, ReduceOp.SUM)
        assert [tensor.to_dense().tolist() for tensor in scalars] == [[1.0, 1.0, 4.0]] * 2
        nothing = [sparse([]) for _ in range(2)]
        await reduced(groups, nothing, ReduceOp.SUM)
        assert [tensor.to_dense().abs().sum().item() for tensor in nothing] == [0.0, 0.0]


@pytest.mark.parametrize("inside", [True, False], ids=["called inside", "called outside"])
@pytest.mark.parametrize("made_inside", [True, False], ids=["made inside", "made outside"])
async def test_inference_mode(transport, made_inside, inside):
    """A tensor made in inference mode can be written in that mode only, and another tensor must not hold such values."""
    async with world_of(2, transport=transport) as groups:
        with torch.inference_mode(made_inside):
            tensors = [sparse(PLACES[rank * 2]) for rank in range(2)]
        total = tensors[0].to_dense() + tensors[1].to_dense()
        with torch.inference_mode(inside):
            works = [group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)]
        await asyncio.gather(*works)
        for tensor in tensors:
            assert torch.equal(tensor.to_dense(), total)
            assert tensor.is_inference() == tensor.values().is_inference() == made_inside


def test_blocking_call_in_inference_mode_keeps_an_ordinary_tensor(together, transport):
    def rank(group):
        tensor = sparse(PLACES[group.rank()])
        with torch.inference_mode():
            group.all_reduce(tensor, background=False).result()
        return tensor.is_inference(), tensor.values().is_inference()

    assert together(2, rank, transport=transport) == [(False, False)] * 2


async def test_other_shapes_are_a_mismatch(transport):
    async with world_of(2, transport=transport) as groups:
        tensors = [torch.zeros(3 + rank).to_sparse() for rank in range(2)]
        works = [group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)]
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        assert all(isinstance(outcome, MismatchError) for outcome in outcomes), outcomes
