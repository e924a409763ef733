"""What `torch.compile` does not look into: our methods, and all that they call.

What it cannot put into a graph it runs as it is, and then compiles the functions that come to be called meanwhile. Ours
would not do: it knows a process group as an object with a few members of C++'s, and fails over every other.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import torch

from asyncdist.torch_backend.process_group import ProcessGroup
from asyncdist.torch_backend.work import HeldWork, Work

# Of C++, as `torch.compiler.disable` would import the whole compiler, which few programs want.
_frames: Any = torch._C._dynamo.eval_frame


def register() -> None:
    """Keep the compiler from what torch's Python code calls of ours. Idempotent."""
    for owner in (ProcessGroup, Work, HeldWork):
        for name, member in list(vars(owner).items()):
            if isinstance(member, FunctionType) and not hasattr(member, "_torchdynamo_disable"):
                setattr(owner, name, _left_alone(member))


def _left_alone(function: Any) -> Any:
    """Return a function that is called, and neither compiled nor inlined where it is."""
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
