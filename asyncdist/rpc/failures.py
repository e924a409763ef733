"""How a failed call is told to its caller: texts on the wire, and the errors that are made of them."""

from __future__ import annotations

import builtins
import functools
import traceback
from collections.abc import Sequence
from typing import Any

from asyncdist.errors import AsyncdistError
from asyncdist.rpc.errors import (
    CallError,
    CallRefusedError,
    CallTimeoutError,
    OverloadedError,
    RemoteError,
    ResultError,
)
from asyncdist.rpc.wire import Failure

_MOST_TEXT = 10_000
"""The most characters of a message or a traceback. The middle of a longer one is left out."""
_NAMED = (
    "ArithmeticError", "AssertionError", "AttributeError", "BufferError", "EOFError", "FloatingPointError", "IndexError",
    "KeyError", "LookupError", "MemoryError", "NameError", "NotImplementedError", "OverflowError", "RecursionError",
    "ReferenceError", "RuntimeError", "TypeError", "ValueError", "ZeroDivisionError",
)  # fmt: skip
"""The classes of Python as which a `RemoteError` can be caught. They have no fields other than their arguments."""


class RaisedByFunction(Exception):
    """Carries what a function has raised through futures and coroutines, which do not bear every exception.

    A future refuses StopIteration, a coroutine cannot raise it, and a task that raises KeyboardInterrupt ends its loop.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error


def describe(error: BaseException) -> list[str]:
    """Return the class, the message and the traceback of an exception as texts."""
    if isinstance(error, RaisedByFunction):
        error = error.error
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    message = error.summary if isinstance(error, AsyncdistError) else _text_of(error)
    lines = traceback.format_exception(kind, error, _beyond_this_package(error), limit=-30)
    return [_shortened(name), _shortened(message), _shortened("".join(lines))]


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"(its message raised {type(failure).__name__})"


def _beyond_this_package(error: BaseException) -> Any:
    """Return the traceback from the method on, without the frames that called it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None and _is_of_this_package(frame.tb_frame.f_globals):
        frame = frame.tb_next
    return frame


def _is_of_this_package(names: dict[str, Any]) -> bool:
    return f"{names.get('__package__')}.".startswith(f"{__package__}.")


def _shortened(text: str) -> str:
    text = text.encode(errors="replace").decode()
    if len(text) <= _MOST_TEXT:
        return text
    half = _MOST_TEXT // 2
    return f"{text[:half]}\n… {len(text) - _MOST_TEXT} characters …\n{text[-half:]}"


def failure_of(kind: int, texts: Sequence[Any], target: str, method: str, peer: str | int, timeout: float) -> CallError:
    words = [str(text) for text in texts]
    if kind == Failure.RAISED and len(words) == 3:
        return remote_error_class(words[0])(target, method, peer, *words)
    reason = words[0] if words else "the callee gives no reason"
    if kind == Failure.TIMED_OUT:
        # The callee's clock may pass the deadline first: the error tells the same limit as the caller's own.
        return CallTimeoutError(target, method, peer, timeout, f"no result within {timeout:g} s ({reason})")
    classes = {Failure.RESULT_NOT_CARRIED: ResultError, Failure.OVERLOADED: OverloadedError}
    return classes.get(Failure(kind), CallRefusedError)(target, method, peer, reason)


@functools.cache
def remote_error_class(type_name: str) -> type[RemoteError]:
    """Return `RemoteError`, or a class that is also the class of Python with this name."""
    if type_name not in _NAMED:
        return RemoteError
    named = getattr(builtins, type_name)
    return type("RemoteError", (RemoteError, named), {"__doc__": RemoteError.__doc__, "__module__": __name__})
