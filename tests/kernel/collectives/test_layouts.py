"""Tensors of every layout: a call leaves the elements around a view alone, and writes copied outputs back."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.testing.cluster import world_of


def base_of(rank, shape, dtype=torch.float32):
    count = int(torch.Size(shape).numel())
    return (torch.arange(count) % 50 + rank + 1).to(dtype).view(shape)


# Functions of a base tensor of 4 x 6 x 8 elements that return a view of it.
VIEWS = {
    "whole": lambda base: base,
    "flat slice in the middle": lambda base: base.view(-1)[7:90],
    "rows in the middle": lambda base: base[1:3],
    "columns": lambda base: base[:, :, 3],
    "inner columns": lambda base: base[:, 1:4, 2:5],
    "every second": lambda base: base.view(-1)[::2],
    "transposed": lambda base: base.transpose(0, 2),
    "permuted slice": lambda base: base.permute(2, 0, 1)[3:5],
    "diagonal": lambda base: base[0].diagonal(),
    "one element": lambda base: base[2, 3, 4],
    "one element as a row": lambda base: base[2, 3, 4:5],
    "no element": lambda base: base[2:2],
    "no element, not contiguous": lambda base: base[:, 3:3, ::2],
    "strides that are no multiples of each other": lambda base: base.as_strided((3, 2), (2, 3)),
    "ones of dimension one": lambda base: base[:, None, :1, None],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", VIEWS)
async def test_all_reduce_of_views_leaves_the_rest_alone(transport, name):
    async with world_of(3, transport=transport) as groups:
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            bases = [base_of(rank, (4, 6, 8), dtype) for rank in range(3)]
            expected = [base.clone() for base in bases]
            total = sum(VIEWS[name](base).to(torch.float64) for base in bases).to(dtype)
            for base in expected:
                VIEWS[name](base).copy_(total)
            results = await asyncio.gather(*(g.all_reduce(VIEWS[name](bases[g.rank()])) for g in groups))
            for base, wanted, result in zip(bases, expected, results, strict=True):
                assert torch.equal(base, wanted)
                assert torch.equal(result, total)


def movements(zero, one, source, target, shape):
    """Return pairs of calls of two ranks that copy ``source`` to ``target``, by name."""
    room, ones = torch.empty(shape), torch.ones(shape)
    return {
        "broadcast": (lambda: zero.broadcast(source, 0), lambda: one.broadcast(target, 0)),
        "send": (lambda: zero.send(source, 1), lambda: one.recv(target, 0)),
        "scatter": (lambda: zero.scatter(room, [ones, source], 0), lambda: one.scatter(target, None, 0)),
        "gather": (lambda: zero.gather(ones, [room, target], 0), lambda: one.gather(source, None, 0)),
        "all_gather": (
            lambda: zero.all_gather([room, target], ones),
            lambda: one.all_gather([torch.empty(shape), torch.empty(shape)], source),
        ),
        "all_to_all": (
            lambda: zero.all_to_all([room, torch.empty(shape)], [ones, source]),
            lambda: one.all_to_all([target, torch.empty(shape)], [ones, ones]),
        ),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", VIEWS)
async def test_data_movement_into_views_leaves_the_rest_alone(transport, name):
    view, base, source = VIEWS[name], base_of(9, (4, 6, 8)), base_of(0, (4, 6, 8))
    expected = base.clone()
    view(expected).copy_(view(source))
    async with world_of(2, transport=transport) as (zero, one):
        target = base.clone()
        for calls in movements(zero, one, view(source), view(target), view(source).shape).values():
            target.copy_(base)
            await asyncio.gather(*(call() for call in calls))
            assert torch.equal(target, expected)


async def test_reduce_scatter_reads_and_writes_views(transport):
    async with world_of(2, transport=transport) as groups:
        bases = [base_of(rank, (4, 6, 8)) for rank in range(2)]
        kept = [base.clone() for base in bases]
        targets = [torch.full((5, 6, 2), 7.0) for _ in range(2)]
        rows = [[base[:, :, 1], base[:, :, 2]] for base in bases]
        await asyncio.gather(*(g.reduce_scatter(targets[g.rank()][:4, :, 1], rows[g.rank()]) for g in groups))
        for rank in range(2):
            assert torch.equal(targets[rank][:4, :, 1], kept[0][:, :, rank + 1] + kept[1][:, :, rank + 1])
            assert targets[rank][:, :, 0].eq(7).all()
            assert targets[rank][4].eq(7).all()
            assert torch.equal(bases[rank], kept[rank])


async def test_rows_of_a_transposed_matrix_are_exchanged(transport):
    async with world_of(3, transport=transport) as groups:
        inputs = [base_of(10 * rank, (4, 6)).t() for rank in range(3)]
        outputs = [torch.zeros(4, 6).t() for _ in range(3)]
        await asyncio.gather(*(g.all_to_all_single(outputs[g.rank()], inputs[g.rank()]) for g in groups))
        for rank in range(3):
            assert torch.equal(outputs[rank], torch.cat([one[2 * rank : 2 * rank + 2] for one in inputs]))


async def test_own_block_of_the_output_may_be_the_input(transport):
    """FSDP calls collectives in this form."""
    async with world_of(3, transport=transport) as groups:
        whole = [torch.zeros(3, 5) for _ in range(3)]
        for rank in range(3):
            whole[rank][rank] = rank + 1.0
        await asyncio.gather(*(g.all_gather_single(whole[g.rank()], whole[g.rank()][g.rank()]) for g in groups))
        for one in whole:
            assert torch.equal(one, torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 5))
        for one in whole:
            one.copy_(torch.arange(15.0).view(3, 5))
        await asyncio.gather(*(g.reduce_scatter_single(whole[g.rank()][g.rank()], whole[g.rank()]) for g in groups))
        for rank, one in enumerate(whole):
            expected = torch.arange(15.0).view(3, 5)
            expected[rank] *= 3
            assert torch.equal(one, expected)
        chunks = [list(one.unbind()) for one in whole]
        await asyncio.gather(*(g.all_gather(chunks[g.rank()], chunks[g.rank()][g.rank()]) for g in groups))
        for one in whole:
            assert torch.equal(one, torch.arange(15.0).view(3, 5) * 3)


async def test_channels_last_and_other_dense_orders(transport):
    async with world_of(2, transport=transport) as groups:
        tensors = [base_of(rank, (2, 3, 4, 5)).contiguous(memory_format=torch.channels_last) for rank in range(2)]
        plain = base_of(0, (2, 3, 4, 5)) + base_of(1, (2, 3, 4, 5))
        await asyncio.gather(*(g.all_reduce(tensors[g.rank()]) for g in groups))
        for tensor in tensors:
            assert torch.equal(tensor, plain)
            assert tensor.is_contiguous(memory_format=torch.channels_last)


async def test_ranks_may_differ_in_layout(transport):
    async with world_of(2, transport=transport) as (zero, one):
        rows, columns = base_of(0, (6, 4)), base_of(1, (4, 6)).t()
        total = rows + columns
        await asyncio.gather(zero.all_reduce(rows), one.all_reduce(columns))
        assert torch.equal(rows, total)
        assert torch.equal(columns, total)


# -- gradients, conjugates, inference mode ----------------------------------------------------------


async def test_tensors_that_require_gradients(transport):
    async with world_of(2, transport=transport) as groups:
        parameters = [torch.nn.Parameter(torch.full((3, 4), rank + 1.0)) for rank in range(2)]
        results = await asyncio.gather(*(g.all_reduce(parameters[g.rank()]) for g in groups))
        for parameter, result in zip(parameters, results, strict=True):
            assert result is parameter
            assert parameter.requires_grad
            assert parameter.is_leaf
            assert parameter.grad is None
            assert parameter.eq(3).all()
        inner = [parameter * 2 for parameter in parameters]
        await asyncio.gather(*(g.broadcast(inner[g.rank()], 0) for g in groups))
        await asyncio.gather(*(g.all_reduce(inner[g.rank()].t()[1:]) for g in groups))
        for tensor in inner:
            assert tensor[:, 0].eq(6).all()
            assert tensor[:, 1:].eq(12).all()


async def test_conjugate_and_negative_views(transport):
    async with world_of(2, transport=transport) as groups:
        values = [torch.tensor([1 + 2j, 3 - 4j]) * (rank + 1) for rank in range(2)]
        expected = sum(value.conj() for value in values).resolve_conj()
        for view in (lambda t: t.conj(), lambda t: t[:1].conj()):
            bases = [value.clone() for value in values]
            await asyncio.gather(*(g.all_reduce(view(bases[g.rank()])) for g in groups))
            for base in bases:
                assert torch.equal(view(base).resolve_conj(), view(expected.conj()).resolve_conj())
        for view in (lambda t: t.conj().imag, lambda t: t[:1].conj().imag):
            bases = [value.clone() for value in values]
            total = sum(view(base) for base in bases).clone()
            await asyncio.gather(*(g.all_reduce(view(bases[g.rank()])) for g in groups))
            for base, value in zip(bases, values, strict=True):
                assert torch.equal(view(base).resolve_neg(), total)
                assert torch.equal(base.real, value.real)
        sent, got = values[0].conj(), torch.zeros(2, dtype=torch.complex64)
        await asyncio.gather(groups[0].send(sent, 1), groups[1].recv(got, 0))
        assert torch.equal(got, sent.resolve_conj())


@pytest.mark.parametrize("inside", [True, False], ids=["called inside", "called outside"])
async def test_tensors_made_in_inference_mode(transport, inside):
    """Only inference mode can write such a tensor, and the driver of the operation may be in another mode."""
    async with world_of(2, transport=transport) as groups:
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex128):
            for count in (0, 3, 100_000):
                with torch.inference_mode():
                    tensors = [torch.ones(count, dtype=torch.float32).to(dtype) for _ in groups]
                    columns = [torch.ones(count, 2).to(dtype)[:, 1] for _ in groups]
                with torch.inference_mode(inside):
                    works = [g.all_reduce(tensors[g.rank()], ReduceOp.AVG) for g in groups]
                    works += [g.all_reduce(columns[g.rank()]) for g in groups]
                await asyncio.gather(*works)
                for tensor in tensors:
                    assert tensor.to(torch.complex64).eq(1).all()
                for column in columns:
                    assert column.to(torch.complex64).eq(2).all()


SINGLE = {
    "a vector": lambda: torch.ones(4)[:1:2].as_strided((1,), (2,)),
    "a matrix": lambda: torch.ones(3, 2)[:1].t()[:, :1][:1],
    "nothing": lambda: torch.ones(4)[::2][:0],
}


@pytest.mark.parametrize("name", SINGLE)
async def test_single_element_made_in_inference_mode_whose_stride_is_not_one(transport, name):
    """torch calls it contiguous, but can view it as bytes only with stride 1."""
    async with world_of(2, transport=transport) as groups:
        with torch.inference_mode():
            tensors = [SINGLE[name]() for _ in groups]
            rooms = [[SINGLE[name]() for _ in groups] for _ in groups]
        assert all(tensor.is_contiguous() and tensor.stride(-1) == 2 for tensor in tensors)
        await asyncio.gather(*(g.all_reduce(tensors[g.rank()]) for g in groups))
        await asyncio.gather(*(g.all_gather(rooms[g.rank()], tensors[g.rank()]) for g in groups))
        for tensor in (*tensors, *rooms[0], *rooms[1]):
            assert tensor.eq(2).all()


def test_blocking_calls_in_inference_mode(together, transport):
    def rank(group):
        with torch.inference_mode(group.rank() == 0):
            tensor = torch.ones(70_000, dtype=torch.bfloat16)
            group.all_reduce(tensor, background=False).result()
            work = group.all_reduce(tensor)
            work.wait()
            return float(tensor.float().sum())

    assert together(2, rank, transport=transport) == [280_000.0, 280_000.0]


# -- numpy ------------------------------------------------------------------------------------------

ARRAYS = {
    "plain": lambda: np.arange(12, dtype=np.float32).reshape(3, 4),
    "Fortran": lambda: np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
    "strided": lambda: np.arange(24, dtype=np.int32)[::2],
    "scalar": lambda: np.array(3.5),
    "empty": lambda: np.zeros((0, 4), dtype=np.int16),
    "unsigned": lambda: np.arange(5, dtype=np.uint16),
    "complex": lambda: np.arange(5, dtype=np.complex128),
    "half": lambda: np.arange(5, dtype=np.float16),
    "bool": lambda: np.array([True, False]),
}


@pytest.mark.parametrize("name", ARRAYS)
async def test_arrays_are_reduced_in_place(transport, name):
    async with world_of(2, transport=transport) as groups:
        arrays = [ARRAYS[name]() for _ in groups]
        expected = ARRAYS[name]() | ARRAYS[name]() if name == "bool" else ARRAYS[name]() + ARRAYS[name]()
        results = await asyncio.gather(*(g.all_reduce(arrays[g.rank()]) for g in groups))
        for array, result in zip(arrays, results, strict=True):
            np.testing.assert_array_equal(array, expected)
            assert result is array


async def test_ranks_may_mix_arrays_and_tensors(transport):
    async with world_of(2, transport=transport) as (zero, one):
        array, tensor = np.ones((2, 3), dtype=np.float32), torch.ones(2, 3)
        await asyncio.gather(zero.all_reduce(array), one.all_reduce(tensor))
        assert (array == 2).all()
        assert tensor.eq(2).all()
        received = np.zeros(3, dtype=np.int64)
        await asyncio.gather(zero.recv(received, 1), one.send(torch.arange(3), 0))
        assert received.tolist() == [0, 1, 2]


async def test_read_only_arrays_may_be_inputs_only(transport):
    async with world_of(2, transport=transport) as (zero, one):
        array = np.ones(3, dtype=np.float32)
        array.setflags(write=False)
        with pytest.raises(ValueError, match="read-only"):
            zero.all_reduce(array)
        with pytest.raises(ValueError, match="read-only"):
            zero.recv(array, 1)
        got = torch.zeros(3)
        await asyncio.gather(zero.send(array, 1), one.recv(got, 0))
        assert got.eq(1).all()
        outputs = [[torch.zeros(3), torch.zeros(3)] for _ in range(2)]
        await asyncio.gather(zero.all_gather(outputs[0], array), one.all_gather(outputs[1], array))
        assert all(output.eq(1).all() for row in outputs for output in row)
