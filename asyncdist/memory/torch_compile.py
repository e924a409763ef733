"""What `torch.compile` does not look into: the methods that programs call of ours, and all that they call.

What it cannot put into a graph it runs as it is, and then compiles the functions that come to be called meanwhile. Ours
would not do: they are about threads, memory and other ranks. Of a process group it knows a few members of C++'s alone.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# Of C++, as `torch.compiler.disable` would import the whole compiler, which few programs want.
_frames: Any = torch._C._dynamo.eval_frame


def excluded_from_compile(owner: type[T]) -> type[T]:
    """Keep the compiler from a class's own methods: they are called, and neither compiled nor inlined where they are."""
    for name, member in list(vars(owner).items()):
        if isinstance(member, FunctionType):
            setattr(owner, name, _left_alone(member))
    return owner


def _left_alone(function: Any) -> Any:
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
