"""The arithmetic of reductions: one kernel per operation, also for dtypes without torch kernels.

Sums of float16, bfloat16 and float8 are accumulated in float32 (`accumulator`). torch has few kernels for unsigned integers
of more than 8 bits, and fewer on CUDA devices. Such integers are combined as signed integers of the same width, which gives
the same bits. They are compared with numpy's kernels on the host, and on devices as signed integers whose first bit is
flipped.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch

from asyncdist.base.callables import AnyFunction
from asyncdist.base.ops import PremulSum, ReduceOp, Reduction
from asyncdist.errors import UnsupportedError

Fold = Callable[[torch.Tensor, torch.Tensor, bool], None]
"""``fold(into, other, swapped)``: into = into ∘ other, or other ∘ into if swapped; both are flat and of one length."""

Combine = Callable[..., object]
"""``combine(first, second, out=out)``: out = first ∘ second, all of one shape and dtype; out may be one of the others."""

_TORCH: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_NUMPY: dict[ReduceOp, AnyFunction] = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}
_OF_ARRAYS: dict[ReduceOp, AnyFunction] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,  # who reduces without the division makes it later
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
    # numpy has deprecated their third argument by position.
    ReduceOp.MIN: lambda lower, higher, out: np.minimum(lower, higher, out=out),
    ReduceOp.MAX: lambda lower, higher, out: np.maximum(lower, higher, out=out),
}
# Those in which numpy computes as torch does: complex products round differently, and float16 takes long.
_ARRAY_DTYPES: dict[torch.dtype, type[np.generic]] = {
    getattr(torch, name): getattr(np, name) for name in "float32 float64 uint8 int8 int16 int32 int64".split()
}
# Older releases keep by thread what they do after an overflow.
_KEEPS_ERRORS_BY_CONTEXT = int(np.__version__.partition(".")[0]) >= 2
MOST_ARRAY_NBYTES = 64 << 10
"""Most bytes that are reduced as arrays of numpy: it takes 1.5 µs for 64 KiB where torch takes 2. More gain nothing."""
COPIED_ARRAY_NBYTES = 4 << 10
"""Most bytes whose result is written elsewhere first: numpy changes one element in place in four times the time."""
_ORDERED = frozenset(_NUMPY)
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_BITWISE = frozenset((ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR))
_NARROW_NAMES = "float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split()
_NARROW = frozenset(getattr(torch, name) for name in _NARROW_NAMES)
# torch 2.13 has no bcomplex32.
_NARROW_COMPLEX = frozenset(getattr(torch, name) for name in ("complex32", "bcomplex32") if hasattr(torch, name))


def kernel_of(op: Reduction) -> ReduceOp:
    """Return the plain reduction that an operation's kernel computes: averages and scaled sums are sums."""
    if isinstance(op, PremulSum) or op is ReduceOp.AVG:
        return ReduceOp.SUM
    return op


def check(op: Reduction, dtype: torch.dtype) -> None:
    """Raise UnsupportedError if the reduction is not defined for the dtype."""
    kernel = kernel_of(op)
    floating = dtype.is_floating_point or dtype.is_complex
    if kernel in _BITWISE and floating:
        raise UnsupportedError(f"{op.name} works on integers and booleans, not on {dtype}")
    if kernel in _ORDERED and dtype.is_complex:
        raise UnsupportedError(f"{op.name} needs an order, and {dtype} has none")
    if isinstance(op, PremulSum) and not floating:
        raise UnsupportedError(f"{op.name} works on floating-point and complex tensors, not on {dtype}: use SUM")
    if op is ReduceOp.AVG and dtype is torch.bool:
        raise UnsupportedError(f"AVG works on numbers, not on {dtype}: use BOR or BAND, or average tensor.float()")
    if dtype is torch.float4_e2m1fn_x2:
        raise UnsupportedError(f"{dtype} can be moved but not reduced")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to accumulate: float32 for narrow floats, complex64 for their pairs, else the same."""
    if dtype in _NARROW:
        return torch.float32
    return torch.complex64 if dtype in _NARROW_COMPLEX else dtype


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Return whether torch computes in a floating-point or complex dtype; into float8 and bcomplex32 it only converts."""
    return dtype.itemsize > 1 and dtype is not getattr(torch, "bcomplex32", None)


@cache
def _combine_of(kernel: ReduceOp, dtype: torch.dtype) -> Combine:
    if dtype not in _SIGNED:
        return _TORCH[kernel]
    if kernel in _ORDERED:
        on_host, on_device = _NUMPY[kernel], partial(_compare_as_signed, kernel)
        return lambda first, second, out: (
            on_host(first.numpy(), second.numpy(), out=out.numpy()) if out.is_cpu else on_device(first, second, out)
        )
    combine, signed = _TORCH[kernel], _SIGNED[dtype]
    return lambda first, second, out: combine(first.view(signed), second.view(signed), out=out.view(signed))


def _compare_as_signed(kernel: ReduceOp, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
    """Set ``out`` to the minima or maxima of unsigned integers: flipping their first bit keeps the order as signed ones."""
    signed = _SIGNED[out.dtype]
    first_bit = torch.iinfo(signed).min
    _TORCH[kernel](first.view(signed) ^ first_bit, second.view(signed) ^ first_bit, out=out.view(signed))
    out.view(signed).bitwise_xor_(first_bit)


@cache
def _fold_of(kernel: ReduceOp, dtype: torch.dtype) -> Fold:
    """Return the fold of elements, which may be narrower, into elements of ``dtype``."""
    combine = _combine_of(kernel, dtype)

    def fold(into: torch.Tensor, other: torch.Tensor, swapped: bool) -> None:
        if other.dtype is not into.dtype:
            other = other.to(into.dtype)
        if swapped:
            combine(other, into, out=into)
        else:
            combine(into, other, out=into)

    return fold


class Arithmetic(NamedTuple):
    """How to reduce tensors of one dtype.

    Attributes:
        fold: Kernel that folds one tensor into another.
        combine: Kernel that combines two tensors into a third.
        accumulator: The dtype of partial results.
        widens: Whether the accumulator differs from the dtype of the tensors.
        averages: Whether the sum is divided by the number of inputs.
        rounds_once: Whether the dtype's own kernel rounds two operands as the accumulator does.
        op: The reduction of scaled inputs (PREMUL_SUM becomes SUM).
    """

    fold: Fold
    combine: Combine
    accumulator: torch.dtype
    widens: bool
    averages: bool
    rounds_once: bool
    op: ReduceOp

    @property
    def of_two(self) -> Combine | None:
        """A kernel that equals `reduce` of two inputs; None if one kernel is not enough."""
        return None if self.averages or (self.widens and not self.rounds_once) else self.combine

    def reduce(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Set ``out`` to the reduction of the inputs, in their order; ``out`` may be the first or the second input."""
        if self.widens and not (self.rounds_once and len(inputs) == 2):
            wide = inputs[0].to(self.accumulator, copy=True)
            for other in inputs[1:]:
                self.fold(wide, other, False)
            if self.averages:
                divide(wide, len(inputs))
            out.copy_(wide)
            return
        if len(inputs) == 1:
            out.copy_(inputs[0])
        else:
            self.combine(inputs[0], inputs[1], out=out)
            for other in inputs[2:]:
                self.combine(out, other, out=out)
        if self.averages:
            divide(out, len(inputs))


@lru_cache(maxsize=1024)
def arithmetic(op: Reduction, dtype: torch.dtype) -> Arithmetic:
    """Return how to reduce tensors of a dtype. Raises UnsupportedError if the reduction is not defined for it.

    Narrow floats are widened if rounding errors would accumulate (sums, products) or no narrow kernel exists.
    """
    check(op, dtype)
    kernel, wide = kernel_of(op), accumulator(dtype)
    widens = wide is not dtype and (kernel in (ReduceOp.SUM, ReduceOp.PRODUCT) or dtype.itemsize == 1)
    wide = wide if widens else dtype
    averages = op is ReduceOp.AVG
    # The sum of two float16 may overflow although their mean does not.
    rounds_once = dtype is torch.bfloat16 or (dtype is torch.float16 and not averages)
    return Arithmetic(
        _fold_of(kernel, wide),
        _combine_of(kernel, dtype),
        wide,
        widens,
        averages,
        rounds_once,
        ReduceOp.AVG if averages else kernel,
    )


def on_arrays(arithmetic: Arithmetic, dtype: torch.dtype) -> tuple[Arithmetic, type[np.generic]] | None:
    """Return the arithmetic for arrays of numpy, and their dtype; None if numpy does not compute the same.

    Reducing two arrays of few elements takes a third of the time of two tensors. One thread at a time may do it. The
    program's handling of floating-point errors (`numpy.seterr`) does not apply, as it does not to tensors.
    """
    if dtype not in _ARRAY_DTYPES or arithmetic.averages or not _KEEPS_ERRORS_BY_CONTEXT:
        return None
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    combine = partial(context.run, _OF_ARRAYS[arithmetic.op])
    return arithmetic._replace(combine=combine), _ARRAY_DTYPES[dtype]


def divide(tensor: torch.Tensor, by: int) -> None:
    """Divide in place: complex numbers by component, integers with truncation towards zero, as NCCL does."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        _divide_integers(tensor, by)
        return
    # A complex division would round twice.
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if by & (by - 1):
        parts.div_(by)
    # For powers of two a multiplication is exact too, and several times as fast.
    else:
        parts.mul_(1 / by)


def _divide_integers(tensor: torch.Tensor, by: int) -> None:
    if tensor.dtype is torch.uint64:
        _divide_uint64(tensor.view(torch.int64), by)
    elif tensor.dtype in _SIGNED:
        tensor.copy_(tensor.to(torch.int64).div_(by, rounding_mode="trunc"))
    else:
        tensor.div_(by, rounding_mode="trunc")


def _divide_uint64(bits: torch.Tensor, by: int) -> None:
    """Divide unsigned integers, given as int64 of the same bits, by signed divisions of their halves.

    Source: H. S. Warren, "Hacker's Delight", 2nd edition, section 9-3.
    """
    half = (bits >> 1) & torch.iinfo(torch.int64).max
    quotient = half.div_(by, rounding_mode="trunc") << 1
    bits.sub_(quotient * by)
    torch.add(quotient, bits >= by, out=bits)
