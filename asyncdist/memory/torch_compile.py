"""Exclude this package's methods, and all functions that they call, from `torch.compile`.

The public classes use the decorator. The compiler runs code that it cannot put into a graph as it is, and compiles the
functions that this code calls. The functions of this package handle threads, memory and other ranks, and must not be
compiled.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# The C++ interface, because `torch.compiler.disable` would import the whole compiler.
_frames: Any = torch._C._dynamo.eval_frame


def excluded_from_compile(owner: type[T]) -> type[T]:
    """Exclude a class's own methods from the compiler: it calls them, and neither compiles nor inlines them."""
    for member in vars(owner).values():
        if isinstance(member, FunctionType):
            _exclude(member)
    return owner


def _exclude(function: Any) -> None:
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True
