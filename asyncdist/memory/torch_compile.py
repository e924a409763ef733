"""Exclude this package's methods, and all functions that they call, from `torch.compile`.

The public classes use the decorator. The compiler runs code that it cannot put into a graph as it is, and compiles the
functions that this code calls. The functions of this package handle threads, memory and other ranks, and must not be
compiled.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# The C++ interface, because `torch.compiler.disable` would import the whole compiler.
_frames: Any = torch._C._dynamo.eval_frame


def excluded_from_compile(owner: type[T]) -> type[T]:
    """Exclude a class's own methods from the compiler: it calls them, and neither compiles nor inlines them."""
    for name, member in list(vars(owner).items()):
        if isinstance(member, FunctionType):
            setattr(owner, name, _excluded(member))
    return owner


def _excluded(function: Any) -> Any:
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    else:
        function = _apart(function)
        _frames.skip_code(function.__code__)
    function._torchdynamo_disable = True
    return function


def _apart(function: Any) -> Any:
    """Do the same in releases of torch (2.6) that can be told only of one function at a time, not of what it calls."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler = _frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _frames.set_eval_frame(compiler)

    return call
