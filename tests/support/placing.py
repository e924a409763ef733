"""Groups that move the tensors of each call to memory of the test's choice, such as registered memory."""

from collections.abc import Callable
from typing import Any

import torch


class Placing:
    """A group that first moves each tensor of a call, in place, to memory from ``allocate(count, dtype)``."""

    def __init__(self, group: Any, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._group = group
        self._allocate = allocate

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        if not callable(method):
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            self._place(arguments)
            return method(*arguments, **options)

        return call

    def _place(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value.data = self._allocate(value.numel(), value.dtype).view(value.shape).copy_(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._place(item)
