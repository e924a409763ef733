"""torch.distributed's reductions as ours."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as torch_distributed

from asyncdist.base.ops import ReduceOp, Reduction, premul_sum

_Theirs: Any = torch_distributed.ReduceOp

# By hash, which is an operation's number: asking torch's objects for their name, or comparing them, costs a microsecond.
_OURS: dict[int, ReduceOp] = {
    hash(_Theirs(getattr(_Theirs, ours.name))): ours for ours in ReduceOp if ours is not ReduceOp.PREMUL_SUM
}


def reduction_of(theirs: Any) -> Reduction:
    """Return our reduction for one of torch's; one that we do not know as it is, for our operations to refuse."""
    ours = _OURS.get(hash(theirs))
    if ours is not None:
        return ours
    kind, factor = theirs.__getstate__() if hasattr(theirs, "__getstate__") else (theirs, None)
    if kind == _Theirs.PREMUL_SUM and factor is not None:
        return premul_sum(float(factor))
    return cast(Reduction, theirs)
