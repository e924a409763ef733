"""The Python stacks of this process: of its threads, and of the asyncio tasks of the loops in which worlds were opened.

Any thread may collect them, whatever the other threads do, unless one of them holds the interpreter. The stack of a task
that waits goes from its coroutine down to the innermost coroutine that awaits.
"""

from __future__ import annotations

import asyncio
import gc
import linecache
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from asyncdist.base.lifecycle import WeakRegistry

_MOST_FRAMES = 64
"""The frames of one stack, the innermost ones."""
_MOST_TASKS = 256
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_TRANSPORTS = f"{os.sep}asyncdist_transports{os.sep}"
_STANDARD = (threading.__file__, str(Path(asyncio.__file__).parent))
_WRAPPERS = ("coroutine_wrapper", "async_generator_asend", "async_generator_athrow")
"""Types of the interpreter that await a coroutine or generator without naming it."""
_loops: WeakRegistry[asyncio.AbstractEventLoop] = WeakRegistry()


class StackFrame(NamedTuple):
    """One function of a stack: its file, the number and the text of the line that it executes, and its qualified name."""

    file: str
    line: int
    function: str
    code: str


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of a thread or of a task.

    Attributes:
        kind: ``thread`` or ``task``.
        name: The name of the thread or task.
        frames: The outermost first, as in a traceback.
    """

    kind: str
    name: str
    frames: Sequence[StackFrame]

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Stack:
        """Return a stack of `collect`. Raises KeyError, TypeError or ValueError for other values."""
        frames = [
            StackFrame(str(file), int(line), str(name), str(code)) for file, line, name, code in content["frames"]
        ]
        return cls(str(content["kind"]), str(content["name"]), frames)

    @property
    def is_of_library(self) -> bool:
        """Whether it is a thread of asyncdist that runs no code of the program."""
        return self.name.startswith("asyncdist-") and not any(map(_is_of_program, self.frames))

    def lines(self) -> list[str]:
        """Return the stack as text, in the form of a traceback."""
        shown = [f"{self.kind} {self.name}:"]
        for frame in self.frames:
            shown.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
            if frame.code:
                shown.append(f"    {frame.code}")
        return shown


def watch_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Include the tasks of a loop from now on."""
    _loops.add(loop)


def collect() -> list[dict[str, Any]]:
    """Return the stacks of all threads, the main thread first, and of all tasks of the watched loops, as plain data."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    found = [_plain("thread", names.get(ident, f"thread {ident}"), _of_frame(frame)) for ident, frame in frames]
    for loop in _loops.living():
        if not loop.is_closed():
            tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
            found += [_plain("task", task.get_name(), _of_task(task)) for task in tasks[:_MOST_TASKS]]
    return found


def _plain(kind: str, name: str, frames: list[StackFrame]) -> dict[str, Any]:
    shown = _until_library(frames)[-_MOST_FRAMES:]
    return {"kind": kind, "name": name, "frames": [list(frame) for frame in shown]}


def _is_of_library(frame: StackFrame) -> bool:
    return frame.file.startswith(_PACKAGE) or _TRANSPORTS in frame.file


def _is_of_program(frame: StackFrame) -> bool:
    return not (_is_of_library(frame) or frame.file.startswith(_STANDARD))


def _until_library(frames: list[StackFrame]) -> list[StackFrame]:
    """Leave out what asyncdist does below the innermost line of the program; all of it, where no line is the program's."""
    last = max((place for place, frame in enumerate(frames) if _is_of_program(frame)), default=len(frames))
    return frames[: next((place for place in range(last, len(frames)) if _is_of_library(frames[place])), len(frames))]


def _of_frame(frame: FrameType | None) -> list[StackFrame]:
    frames = []
    while frame is not None:
        # The thread that collects the stacks is in this module.
        if frame.f_code.co_filename != __file__:
            frames.append(_described(frame))
        frame = frame.f_back
    return frames[::-1]


def _of_task(task: asyncio.Task[Any]) -> list[StackFrame]:
    frames: list[StackFrame] = []
    awaiting: Any = task.get_coro()
    while awaiting is not None and len(frames) < _MOST_FRAMES:
        if type(awaiting).__name__ in _WRAPPERS:
            awaiting = next((each for each in gc.get_referents(awaiting) if _kind(each)), None)
        kind = _kind(awaiting)
        frame = getattr(awaiting, f"{kind}_frame", None)
        if frame is None:
            break
        frames.append(_described(frame))
        awaiting = getattr(awaiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return frames


def _kind(awaited: object) -> str:
    """Return the prefix of the attributes of a coroutine or generator; empty for other objects, which have no frame."""
    return next((kind for kind in ("cr", "gi", "ag") if hasattr(awaited, f"{kind}_frame")), "")


def _described(frame: FrameType) -> StackFrame:
    code, line = frame.f_code, frame.f_lineno or 0
    text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    return StackFrame(code.co_filename, line, code.co_qualname, text)
