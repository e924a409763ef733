"""What Python prints when Ctrl-C ends a program inside a call of this package: the program's own lines.

The exception itself keeps its whole traceback, for handlers of the program and for ``pdb.pm()``.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterable, Iterator
from types import TracebackType

from asyncdist.base.call_site import is_internal
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError

_LOOPS = ("asyncio", "uvloop")
_LEFT_OUT = "frames of asyncdist and asyncio are left out: ASYNCDIST_DEBUG=1 shows them"

hook_before = sys.excepthook
is_installed = False


def shorten_interrupts() -> None:
    """Let Python print an unhandled KeyboardInterrupt of a call of this package without the frames of this package."""
    global hook_before, is_installed
    # Once for each process: a hook of the program that was installed later may call this one.
    if not is_installed:
        hook_before, is_installed, sys.excepthook = sys.excepthook, True, print_error


def print_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print an unhandled exception, as `sys.excepthook` does."""
    if kind is not KeyboardInterrupt:
        hook_before(kind, error, traceback)
        return
    with _undisturbed():
        if not _shows_all():
            error = _shortened(error)
        hook_before(kind, error, error.__traceback__)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore SIGINT, which torchrun sends to its workers again when the terminal has sent it to all."""
    try:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if handler is None else handler)


def _shows_all() -> bool:
    try:
        return Config.from_environment().debug
    except AsyncdistError:
        return True


def _shortened(error: BaseException) -> BaseException:
    """Return what to print instead of a KeyboardInterrupt: the same if it was raised outside this package."""
    entries, context = [*_entries(error)], error.__context__
    while context is not None and (first := next(_entries(context), None)) is not None:
        # `asyncio.run` cancels its coroutine and then raises the KeyboardInterrupt: the user's line is in the context.
        if isinstance(context, (asyncio.CancelledError, KeyboardInterrupt)) and (_is_own(first) or _is_of_loop(first)):
            entries += _entries(context)
        # This package handles, for example, a TimeoutError of each wait.
        elif not _is_own(first):
            break
        context = context.__context__
    if not any(map(_is_own, entries)):
        return error
    shown: TracebackType | None = None
    for entry in reversed([*_of_program(entries)]):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    short = KeyboardInterrupt(*error.args).with_traceback(shown)
    short.__context__ = _shortened(context) if type(context) is KeyboardInterrupt else context
    short.add_note(_LEFT_OUT)
    return short


def _of_program(entries: Iterable[TracebackType]) -> Iterator[TracebackType]:
    hidden = False
    for entry in entries:
        # A function of the standard library is left out where this package calls it.
        hidden = _is_own(entry) or _is_of_loop(entry) or (hidden and _package(entry) in sys.stdlib_module_names)
        if not hidden:
            yield entry


def _entries(error: BaseException) -> Iterator[TracebackType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_own(entry: TracebackType) -> bool:
    return is_internal(entry.tb_frame.f_globals.get("__name__") or "")


def _is_of_loop(entry: TracebackType) -> bool:
    return _package(entry) in _LOOPS


def _package(entry: TracebackType) -> str:
    return (entry.tb_frame.f_globals.get("__name__") or "").partition(".")[0]
