"""Translates `torch.distributed.ReduceOp` to `asyncdist.ReduceOp`."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as torch_distributed

from asyncdist.base.ops import ReduceOp, Reduction, premul_sum

_TorchOp: Any = torch_distributed.ReduceOp

# By hash, which is the operation's number: reading the name of torch's objects, or comparing them, takes a microsecond.
_BY_HASH: dict[int, ReduceOp] = {
    hash(_TorchOp(getattr(_TorchOp, op.name))): op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM
}


def reduction_of(torch_op: Any) -> Reduction:
    """Return the reduction for one of torch's; an unknown one is returned unchanged, and the operation refuses it."""
    op = _BY_HASH.get(hash(torch_op))
    if op is not None:
        return op
    kind, factor = torch_op.__getstate__() if hasattr(torch_op, "__getstate__") else (torch_op, None)
    if kind == _TorchOp.PREMUL_SUM and factor is not None:
        return premul_sum(float(factor))
    return cast(Reduction, torch_op)
