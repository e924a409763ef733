"""Expected results of reductions, computed by torch without communication, and inputs for which every order is exact.

Used by `collective_cases` and tests.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from asyncdist.base.callables import AnyFunction
from asyncdist.base.ops import PremulSum, ReduceOp, Reduction, premul_sum

UNREDUCED = frozenset((torch.float4_e2m1fn_x2, torch.float8_e8m0fnu))
"""Dtypes that can be copied but not reduced: they have no arithmetic, or no zero."""

_UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def numbers(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return ``count`` elements to reduce: floating and complex ones are 1 or 2, integers and bools are random."""
    random = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randint(1, 3, (count,), generator=random).to(torch.float32).to(dtype)
    return noise(count, dtype, seed)


def noise(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return ``count`` elements of random bits (valid ones for bool) to copy."""
    random = torch.Generator().manual_seed(seed)
    bound = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, bound, (count * dtype.itemsize,), generator=random, dtype=torch.uint8)
    return raw.view(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits: -0.0 differs from 0.0, a NaN equals itself."""
    if actual.shape != expected.shape or actual.dtype is not expected.dtype:
        return False
    return actual.numel() == 0 or torch.equal(_bytes(actual), _bytes(expected))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def reduced(inputs: Sequence[torch.Tensor], op: Reduction) -> torch.Tensor:
    """Return the reduction of the tensors of all ranks. Floats are computed in float64 and rounded once."""
    dtype = inputs[0].dtype
    if dtype.is_floating_point or dtype.is_complex:
        return _reduced_floats(inputs, op).to(dtype)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        kernel = np.minimum if op is ReduceOp.MIN else np.maximum
        return torch.from_numpy(functools.reduce(kernel, [tensor.numpy() for tensor in inputs]).copy())
    if op is ReduceOp.AVG:
        return _averaged(inputs)
    signed = _UNSIGNED.get(dtype, dtype)
    folded = functools.reduce(_WHOLE[cast(ReduceOp, op)], [tensor.view(signed) for tensor in inputs])
    return folded.view(dtype)


def _averaged(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of integers in their own dtype, divided by the number of ranks with truncation."""
    total = reduced(inputs, ReduceOp.SUM)
    size = len(inputs)
    quotients = [abs(number) // size * (1 if number > 0 else -1) for number in total.tolist()]
    return torch.from_numpy(np.array(quotients, dtype=total.numpy().dtype))


def _reduced_floats(inputs: Sequence[torch.Tensor], op: Reduction) -> torch.Tensor:
    dtype = inputs[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    wides = [tensor.to(torch.float32).to(wide) if dtype.itemsize == 1 else tensor.to(wide) for tensor in inputs]
    if op is ReduceOp.AVG:
        total = cast(torch.Tensor, sum(wides))
        # A complex division rounds twice, a division of both parts rounds once.
        if dtype.is_complex:
            return torch.view_as_complex(torch.view_as_real(total) / len(wides))
        return total / len(wides)
    if isinstance(op, PremulSum):
        return cast(torch.Tensor, sum(wides)) * op.factor
    return functools.reduce(_FLOATING[cast(ReduceOp, op)], wides)


_FLOATING: dict[ReduceOp, AnyFunction] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}
_WHOLE: dict[ReduceOp, AnyFunction] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}


def reductions(dtype: torch.dtype) -> list[Reduction]:
    """Return the reductions that are defined for a dtype."""
    if dtype.is_complex:
        return [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, premul_sum(0.5)]
    if dtype.is_floating_point:
        return [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, premul_sum(0.5)]
    averages = [] if dtype is torch.bool else [ReduceOp.AVG]
    return [
        ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, *averages,
    ]  # fmt: skip
