"""The arithmetic of dtypes for which torch lacks kernels on CUDA devices."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyncdist.base.ops import ReduceOp
from asyncdist.kernel.memory import reduce_kernels
from asyncdist.testing.arithmetic import noise, reduced, same

UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.name)
def test_unsigned_integers_are_compared_as_signed_ones_on_devices(dtype, op):
    first, second = noise(1000, dtype, 1), noise(1000, dtype, 2)
    wanted = reduced([first, second], op)
    for out in (torch.empty_like(first), first):
        reduce_kernels._compare_as_signed(op, first, second, out)
        assert same(out, wanted)


class NoUnsignedKernels(TorchDispatchMode):
    """Refuses to compute with unsigned integers of more than 8 bits, as torch does on CUDA devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        values = [*args, *(kwargs or {}).values()]
        unsigned = any(isinstance(each, torch.Tensor) and each.dtype in UNSIGNED for each in values)
        assert not unsigned or name in ("view", "detach", "empty", "as_strided"), f"{name} of unsigned integers"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR])
def test_unsigned_integers_are_combined_as_signed_ones(dtype, op):
    inputs = [noise(1000, dtype, seed) for seed in range(3)]
    out = torch.empty_like(inputs[0])
    with NoUnsignedKernels():
        reduce_kernels.arithmetic(op, dtype).reduce(inputs, out)
    assert same(out, reduced(inputs, op))
