"""The types of the tensors that public functions take: those of torch, and arrays of numpy.

A function that returns a tensor or list that the caller has passed is generic in its type, so that type checkers know it:
``await all_reduce(parameter)`` has the type of ``parameter``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

TensorLike: TypeAlias = torch.Tensor | np.ndarray[Any, Any]
"""A tensor of torch or an array of numpy."""

TensorT = TypeVar("TensorT", bound=TensorLike)
"""The type of a tensor that a call returns as it was passed."""

TensorsT = TypeVar("TensorsT", bound=Sequence[TensorLike])
"""The type of a sequence of tensors that a call returns as it was passed."""

TensorListsT = TypeVar("TensorListsT", bound=Sequence[Sequence[TensorLike]])
"""The type of nested sequences of tensors that a call returns as they were passed."""
