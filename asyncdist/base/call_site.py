"""The line of the user's program that called this package, for messages about that call."""

from __future__ import annotations

import dis
import sys
from types import FrameType

from asyncdist.errors import UsageError

_INTERNAL = ("asyncdist", "asyncdist_transports", "torch._dynamo")
"""Packages whose frames stand between the user's line and the place that asks for it."""
_BLOCKING = (
    "asyncdist.sync", "asyncdist.groups.collectives_api", "asyncdist.groups.procedure", "asyncdist.kernel.engine.work",
    "asyncdist.weights.blocking", "asyncdist.rpc.blocking",
)  # fmt: skip
"""The modules of the blocking API. Methods of a `Group` that block return a work, which can be awaited."""
_AWAITS = {dis.opmap[name] for name in ("GET_AWAITABLE", "BEFORE_ASYNC_WITH", "GET_AITER") if name in dis.opmap}
"""The instructions of ``await``, ``async with`` and ``async for``, which take the result of the call before them."""
_CACHE = dis.opmap["CACHE"]


def calling_line() -> str:
    """Return the innermost line outside this package as ``file:line``."""
    file_name, line = call_site()
    return f"{file_name}:{line}"


def call_site() -> tuple[str, int]:
    """Return the file name and the line number of the innermost line outside this package."""
    frame, _ = _calling_frames()
    return frame.f_code.co_filename, frame.f_lineno


def refuse_await() -> None:
    """Raise UsageError if the user's line awaits the result of the call that it makes, and that call is one that blocks.

    Python's own error would come afterwards, and name neither: ``object NoneType can't be used in 'await' expression``.
    """
    frame, called = _calling_frames()
    module = called.f_globals.get("__name__") or ""
    if module.startswith(_BLOCKING) and _is_awaited(frame):
        name = called.f_code.co_name
        instead = (
            "await the work itself"
            if name == "wait"
            else "use asyncdist instead of asyncdist.sync: its calls can be awaited"
        )
        raise UsageError(
            f"{name} is called with await at {frame.f_code.co_filename}:{frame.f_lineno}, but this is the blocking API: "
            f"leave `await` out, or {instead}"
        )


def _calling_frames() -> tuple[FrameType, FrameType]:
    """Return the innermost frame outside this package, and the frame of the function of this package that it called."""
    frame = inner = sys._getframe(1)
    while (outer := frame.f_back) is not None and _is_internal(frame.f_globals.get("__name__") or ""):
        frame, inner = outer, frame
    return frame, inner


def _is_awaited(frame: FrameType) -> bool:
    """Return whether the instruction after the call that a frame makes awaits the result."""
    code, place = frame.f_code.co_code, frame.f_lasti + 2
    while place < len(code) and code[place] == _CACHE:
        place += 2
    return place < len(code) and code[place] in _AWAITS


def _is_internal(module: str) -> bool:
    return module in _INTERNAL or module.startswith(tuple(f"{package}." for package in _INTERNAL))
