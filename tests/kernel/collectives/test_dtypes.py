"""Every dtype with every valid reduction and copy; sums of narrow floats; equal bits."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

from asyncdist.base.ops import ReduceOp, premul_sum
from asyncdist.config import Config
from asyncdist.errors import UnsupportedError
from asyncdist.kernel.collectives.validation import reduction
from asyncdist.kernel.memory.buffers import DTYPES
from asyncdist.testing.arithmetic import UNREDUCED, reductions, same
from asyncdist.testing.cluster import world_of
from asyncdist.testing.collective_cases import moving, reducing
from tests.support.ranks import run_at_once

NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES.values()]
# Links carry bytes: a few dtypes of different sizes do for `make test`.
MOVED = [
    name if name in ("bool", "bfloat16", "float64", "complex128") else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in NAMES
]
REDUCED = [name for name in NAMES if getattr(torch, name) not in UNREDUCED]
SCHEDULES = {
    "doubling": Config(algorithm="all_reduce=doubling,reduce=tree"),
    "ring": Config(algorithm="all_reduce=ring,reduce=pairwise"),
    "halving": Config(algorithm="all_reduce=halving,reduce=tree"),
}
pytestmark = pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support is experimental:UserWarning")


def test_every_dtype_of_torch_has_a_number():
    """Quantized dtypes and the raw bits dtypes are excluded: a user cannot fill such tensors."""
    listed = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    without = {str(dtype).removeprefix("torch.") for dtype in listed - set(DTYPES.values())}
    assert {name for name in without if not name.startswith(("q", "bits", "int", "uint"))} == set()
    assert {name for name in without if name.startswith(("int", "uint"))} <= {
        f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", REDUCED)
async def test_every_reduction(name):
    dtype = getattr(torch, name)
    for size, schedule in itertools.product((2, 3), SCHEDULES):
        async with world_of(size, config=SCHEDULES[schedule]) as groups:
            for op in reductions(dtype):
                await run_at_once(groups, [case for count in (1, 7) for case in reducing(size, count, dtype, op)])


@pytest.mark.parametrize("name", MOVED)
async def test_every_dtype_is_moved_over_tcp(name):
    async with world_of(3, transport="tcp") as groups:
        await run_at_once(groups, [case for count in (0, 1, 7) for case in moving(3, count, getattr(torch, name))])


@pytest.mark.parametrize("name", NAMES)
async def test_every_dtype_in_shared_memory(name):
    """The native collectives have reductions of their own. The largest count takes several pieces."""
    dtype = getattr(torch, name)
    cases = [case for count in (0, 7, 9001) for case in moving(2, count, dtype)]
    for number, op in enumerate(reductions(dtype) if name in REDUCED else ()):
        cases += [case for count in ((7,) if number else (7, 9001)) for case in reducing(2, count, dtype, op)]
    async with world_of(2, transport="shm", config=Config(shm_area_nbytes=8192)) as groups:
        await run_at_once(groups, cases)


# -- combinations -----------------------------------------------------------------------------------


async def test_invalid_reductions_are_refused_before_sending():
    async with world_of(2) as groups:
        for name, op, message in [
            ("float32", ReduceOp.BAND, "BAND works on integers and booleans"),
            ("complex64", ReduceOp.BXOR, "integers"),
            ("complex64", ReduceOp.MAX, "needs an order"),
            ("bool", ReduceOp.AVG, "AVG works on numbers"),
            ("int32", premul_sum(2), "PREMUL_SUM works on floating-point"),
            ("uint8", premul_sum(2), "PREMUL_SUM works on floating-point"),
        ]:
            tensor = torch.ones(4).to(getattr(torch, name))
            for call in (
                lambda g, t, op: g.all_reduce(t, op),
                lambda g, t, op: g.reduce(t, 0, op),
                lambda g, t, op: g.reduce_scatter(t, [t, t], op),
                lambda g, t, op: g.reduce_scatter_single(t[:2], t, op),
                lambda g, t, op: g.all_reduce_coalesced([t], op),
            ):
                for group in groups:
                    with pytest.raises(UnsupportedError, match=message):
                        call(group, tensor, op)
        await asyncio.gather(*(group.barrier() for group in groups))


def test_reductions_are_accepted_by_every_name():
    torch_ops = torch.distributed.ReduceOp
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        assert reduction(ReduceOp[name]) is ReduceOp[name]
        assert reduction(name.lower()) is ReduceOp[name]
        assert reduction(getattr(torch_ops, name)) is ReduceOp[name]
    for wrong, message in ((ReduceOp.PREMUL_SUM, "factor"), ("mean", "use one of SUM, AVG"), (None, "reduction")):
        with pytest.raises(ValueError, match=message):
            reduction(wrong)


async def test_torchs_reductions_with_and_without_a_factor():
    torch_ops, scaled = torch.distributed.ReduceOp, torch.distributed._make_nccl_premul_sum
    # Their objects are equal, so a call must not use what was prepared for another.
    assert len({scaled(0.5), scaled(4.0)}) == 1
    cases = [
        (scaled(0.5), 1.5),
        (scaled(4.0), 12.0),
        (scaled(torch.tensor([2.0])), 6.0),
        (torch_ops(torch_ops.MAX), 2.0),
    ]
    async with world_of(2) as groups:
        for op, expected in cases:
            given = [torch.tensor([rank + 1.0]) for rank in range(2)]
            await asyncio.gather(*(group.all_reduce(each, op) for group, each in zip(groups, given, strict=True)))
            assert [each.item() for each in given] == [expected] * 2
            whole = [torch.full((2,), rank + 1.0) for rank in range(2)]
            outputs = [torch.zeros(1), torch.zeros(1)]
            await asyncio.gather(
                *(
                    group.reduce_scatter_single(output, each, op)
                    for group, output, each in zip(groups, outputs, whole, strict=True)
                )
            )
            assert [each.item() for each in outputs] == [expected] * 2


@pytest.mark.parametrize("transport", ["inproc", "shm"])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
async def test_average_of_two_is_rounded_once_and_does_not_overflow(name, transport):
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(3000, generator=generator).to(dtype) for _ in range(2)]
    if name == "float16":
        for each in inputs:
            each[7] = torch.finfo(dtype).max
    expected = (inputs[0].double() + inputs[1].double()).div(2).to(dtype)
    async with world_of(2, transport=transport) as groups:
        await asyncio.gather(*(group.all_reduce(inputs[group.rank()], ReduceOp.AVG) for group in groups))
    assert torch.equal(inputs[0], expected)
    assert torch.equal(inputs[1], expected)


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


async def test_average_of_integers_wraps_like_the_sum_and_truncates_towards_zero(transport):
    """As NCCL: the quotient of -7 by 3 is -2, and not -3."""
    async with world_of(3, transport=transport) as groups:
        for dtype in (getattr(torch, name) for name in INTEGERS):
            lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            rows = [[-1, 1, highest, highest - 1, 0], [-3, 3, highest, 1, 0], [-3, 4, highest, 0, 2]]
            rows = [[max(lowest, value) for value in row] for row in rows]
            columns = [sum(column) for column in zip(*rows, strict=True)]
            sums = [(total - lowest) % (highest - lowest + 1) + lowest for total in columns]
            expected = [abs(total) // 3 * (1 if total > 0 else -1) for total in sums]
            tensors = [torch.tensor(row, dtype=dtype) for row in rows]
            outputs = [torch.zeros(1, dtype=dtype) for _ in rows]
            blocks = [[tensor[at : at + 1].clone() for at in range(3)] for tensor in tensors]
            await asyncio.gather(*(g.reduce_scatter(outputs[g.rank()], blocks[g.rank()], ReduceOp.AVG) for g in groups))
            await asyncio.gather(*(g.all_reduce(tensors[g.rank()], ReduceOp.AVG) for g in groups))
            assert [tensor.tolist() for tensor in tensors] == [expected] * 3, dtype
            assert [output.tolist() for output in outputs] == [[value] for value in expected[:3]], dtype


async def test_ranks_may_scale_by_different_factors():
    async with world_of(3) as groups:
        tensors = [torch.tensor([1.0, -2.0]) for _ in groups]
        await asyncio.gather(*(g.all_reduce(tensors[g.rank()], premul_sum(g.rank() + 1)) for g in groups))
        for tensor in tensors:
            assert tensor.tolist() == [6.0, -12.0]
        await asyncio.gather(*(g.reduce(tensors[g.rank()], 1, premul_sum(0.5 * g.rank())) for g in groups))
        assert [tensor.tolist() for tensor in tensors] == [[6.0, -12.0], [9.0, -18.0], [6.0, -12.0]]


# -- narrow sums ------------------------------------------------------------------------------------

# Rank 0 has this number and seven ranks have ones. A sum in the narrow dtype loses every one of them.
STEPS = {"bfloat16": 256, "float16": 2048, "float8_e4m3fn": 16, "float8_e5m2": 8, "complex32": 2048, "bcomplex32": 256}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [name for name in STEPS if hasattr(torch, name)])
async def test_narrow_sums_are_accumulated_in_float32(name, schedule):
    dtype, count = getattr(torch, name), 50
    parts = [torch.full((count,), float(STEPS[name] if rank == 0 else 1)).to(dtype) for rank in range(8)]
    narrow = parts[0]
    for part in parts[1:]:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        narrow = (narrow.to(wide) + part.to(wide)).to(dtype)
    exact = torch.full((count,), float(STEPS[name] + 7)).to(dtype)
    assert not same(narrow, exact)
    async with world_of(8, config=SCHEDULES[schedule]) as groups:
        tensors = [part.clone() for part in parts]
        await asyncio.gather(*(g.all_reduce(tensors[g.rank()]) for g in groups))
        assert all(same(tensor, exact) for tensor in tensors)
        tensors = [part.clone() for part in parts]
        await asyncio.gather(*(g.reduce(tensors[g.rank()], 3) for g in groups))
        assert same(tensors[3], exact)
        outputs = [torch.zeros(count).to(dtype) for _ in groups]
        await asyncio.gather(*(g.reduce_scatter(outputs[g.rank()], [parts[g.rank()]] * 8) for g in groups))
        assert all(same(output, exact) for output in outputs)


# -- the same bits ----------------------------------------------------------------------------------


def _rough(rank, count, dtype):
    """Numbers of all sizes and signs, with zeros of both signs, infinities and NaNs among them."""
    random = torch.Generator().manual_seed(rank)
    real = torch.randn(count, generator=random, dtype=torch.float64) * 10.0 ** torch.randint(
        -3, 4, (count,), generator=random
    )
    at = torch.randint(0, 12, (count,), generator=random)
    for place, special in enumerate((0.0, -0.0, float("inf"), float("-inf"), float("nan"))):
        real[at == place] = special
    return torch.complex(real, real.flip(0)).to(dtype) if dtype.is_complex else real.to(dtype)


@pytest.mark.parametrize("schedule", [*SCHEDULES, ""])
@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (2, 5, 8))])
async def test_all_ranks_get_the_same_bits(size, schedule):
    config = SCHEDULES.get(schedule, Config()).with_(piece_nbytes=64)
    async with world_of(size, config=config) as groups:
        for name in ("float32", "float64", "bfloat16", "float16", "complex64"):
            dtype = getattr(torch, name)
            for op, count in itertools.product(reductions(dtype), (1, 37, 1000)):
                tensors = [_rough(rank, count, dtype) for rank in range(size)]
                await asyncio.gather(*(g.all_reduce(tensors[g.rank()], op) for g in groups))
                assert all(same(tensor, tensors[0]) for tensor in tensors), (name, op, count)
