"""Translate `torch.distributed.ReduceOp` to `asyncdist.ReduceOp`. Called by `process_group`."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as torch_distributed

from asyncdist.base.ops import ReduceOp, Reduction, premul_sum

_Theirs: Any = torch_distributed.ReduceOp

# By hash, which is the operation's number: reading the name of torch's objects, or comparing them, takes a microsecond.
_OURS: dict[int, ReduceOp] = {
    hash(_Theirs(getattr(_Theirs, ours.name))): ours for ours in ReduceOp if ours is not ReduceOp.PREMUL_SUM
}


def reduction_of(theirs: Any) -> Reduction:
    """Return the reduction for one of torch's; an unknown one is returned unchanged, and the operation refuses it."""
    ours = _OURS.get(hash(theirs))
    if ours is not None:
        return ours
    kind, factor = theirs.__getstate__() if hasattr(theirs, "__getstate__") else (theirs, None)
    if kind == _Theirs.PREMUL_SUM and factor is not None:
        return premul_sum(float(factor))
    return cast(Reduction, theirs)
