"""Exclude this package's methods, and all functions that they call, from `torch.compile`.

The public classes use the decorator. The compiler runs code that it cannot put into a graph as it is, and compiles the
functions that this code calls. The functions of this package handle threads, memory and other ranks, and must not be
compiled.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

from asyncdist.kernel.torch_private import FrameAction, FrameExecStrategy, compiled_frames

T = TypeVar("T")

_CONSTANTS = ("rank", "size")
_REASON = (
    "asyncdist communicates between graphs: leave fullgraph=True out, or use torch.distributed's functional collectives "
    "on the back end asyncdist"
)


def excluded_from_compile(owner: type[T]) -> type[T]:
    """Exclude a class's own methods from the compiler: it calls them, and neither compiles nor inlines them.

    The rank and the size of a group become constants of a graph, which is compiled again when they have changed.
    """
    skip = FrameAction.SKIP
    functions: list[Any] = [
        member for name, member in vars(owner).items() if isinstance(member, FunctionType) and name not in _CONSTANTS
    ]
    for function in functions:
        compiled_frames.set_code_exec_strategy(function.__code__, FrameExecStrategy(skip, skip))
        function._torchdynamo_disable, function._torchdynamo_disable_msg = True, _REASON
    return owner
