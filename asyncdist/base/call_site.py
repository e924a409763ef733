"""The line of the user's program that called this package, for messages about that call."""

from __future__ import annotations

import dis
import itertools
import sys
from types import FrameType
from typing import Any

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
_OF_ASYNCIO = {"wait_for", "shield", "gather", "create_task", "ensure_future", "run_coroutine_threadsafe"}
"""The functions of asyncio whose arguments are awaited."""


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
    while (outer := frame.f_back) is not None and is_internal(frame.f_globals.get("__name__") or ""):
        frame, inner = outer, frame
    return frame, inner


def _is_awaited(frame: FrameType) -> bool:
    """Return whether the instruction after the call that a frame makes awaits the result."""
    code, place = frame.f_code.co_code, frame.f_lasti + 2
    while place < len(code) and code[place] == _CACHE:
        place += 2
    return (place < len(code) and code[place] in _AWAITS) or _is_passed_to_asyncio(frame)


def _is_passed_to_asyncio(frame: FrameType) -> bool:
    """Return whether the call that a frame makes is an argument of a function of asyncio that awaits it."""
    if _OF_ASYNCIO.isdisjoint(frame.f_code.co_names):
        return False
    # Python can be told to keep no columns.
    placed = [
        (each, _range(each.positions)) for each in dis.get_instructions(frame.f_code) if _is_known(each.positions)
    ]
    # The last instruction may be a cache of the call.
    own = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if not _is_known(own):
        return False
    start, end = _range(own)
    around = [range_ for _, range_ in placed if range_[0] <= start and end <= range_[1] and range_ != (start, end)]
    if not around:
        return False
    # Ranges nest: the innermost one is that of the expression of which this call is an operand.
    innermost = max(around, key=lambda range_: (range_[0], [-each for each in range_[1]]))
    return any(
        each.argval in _OF_ASYNCIO and range_[0] == innermost[0] and range_[1] < start for each, range_ in placed
    )


def _is_known(place: Any) -> bool:
    return place is not None and None not in place


def _range(place: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the start and the end, in the source text, of an instruction at these positions."""
    line, end_line, column, end_column = place
    return (line, column), (end_line, end_column)


def is_internal(module: str) -> bool:
    """Return whether a module belongs to this package, or stands between it and the user's line."""
    return module in _INTERNAL or module.startswith(tuple(f"{package}." for package in _INTERNAL))
