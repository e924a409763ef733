"""The types of the tensors and reductions that public functions take: those of torch too, and arrays of numpy.

A function that returns a tensor or list that the caller has passed is generic in its type, so that type checkers know it:
``await all_reduce(parameter)`` has the type of ``parameter``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch

from asyncdist.base.ops import PremulSum, ReduceOp

TensorLike: TypeAlias = torch.Tensor | np.ndarray[Any, Any]
"""A tensor of torch or an array of numpy."""

TensorT = TypeVar("TensorT", bound=TensorLike)
"""The type of a tensor that a call returns as it was passed."""

TensorsT = TypeVar("TensorsT", bound=Sequence[TensorLike])
"""The type of a sequence of tensors that a call returns as it was passed."""

TensorListsT = TypeVar("TensorListsT", bound=Sequence[Sequence[TensorLike]])
"""The type of nested sequences of tensors that a call returns as they were passed."""

ReductionName: TypeAlias = Literal[
    "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR",
    "sum", "avg", "product", "min", "max", "band", "bor", "bxor",
]  # fmt: skip
"""The names of the reductions that need no factor."""

if TYPE_CHECKING:
    from torch.distributed import ReduceOp as _TorchReduceOp

    TorchReduction: TypeAlias = _TorchReduceOp.RedOpType
else:
    # torch may have been built without distributed.
    TorchReduction = Any

ReductionLike: TypeAlias = ReduceOp | PremulSum | TorchReduction | ReductionName
"""A reduction as calls accept it: a `ReduceOp`, a `premul_sum`, torch's ``ReduceOp.SUM`` and so on, or a name."""
