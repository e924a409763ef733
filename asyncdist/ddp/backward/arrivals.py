"""Records which gradients have arrived, without a Python function for each. Used by `reducer`.

autograd calls a hook for each parameter. A function in Python costs 2 to 3 microseconds a call, most of the bookkeeping of
a model with many small parameters. `Arrivals.record` is a method in C, so the call runs no Python code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from asyncdist.base.callables import Callback


class Arrivals:
    """The parameters that got a gradient, in that order; after too many, the first ones are forgotten.

    Args:
        parameters: All parameters, by number.

    Attributes:
        record: The hook of autograd: takes a parameter, and returns None.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        # A backward that gives no parameter two gradients records one each. With a limit, a program whose backwards are
        # never averaged does not fill the memory.
        self._recorded: deque[torch.Tensor] = deque(maxlen=len(parameters) + 1)
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self.record: Callable[[torch.Tensor], None] = self._recorded.append
        self.clear: Callback = self._recorded.clear

    def __bool__(self) -> bool:
        return bool(self._recorded)

    def take(self) -> list[int]:
        """Return the numbers of the recorded parameters, and forget them."""
        numbers = list(map(self._numbers.__getitem__, map(id, self._recorded)))
        self._recorded.clear()
        return numbers
