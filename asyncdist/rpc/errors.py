"""The errors of remote calls, which `asyncdist.rpc` exports, and how a failed call is told to its caller.

The other errors are in `asyncdist.errors`.

AsyncdistError (RuntimeError)
├── CallError                            a remote call failed; has target, method, peer
│   ├── RemoteError                      the method raised an exception
│   ├── CallRefusedError                 the callee did not run the method
│   ├── ResultError                      the method has run, and its result cannot be carried
│   ├── CallTimeoutError (TimeoutError)
│   ├── OverloadedError                  too many calls wait
│   ├── CalleeLostError (PeerLostError)  the process of the object was lost
│   └── PartialError                     a call to many failed at some of them
└── NameNotFoundError (TimeoutError)     no process serves an object under a name
"""

from __future__ import annotations

import builtins
import functools
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from asyncdist.errors import AsyncdistError, PeerLostError
from asyncdist.rpc.wire import Failure


class CallError(AsyncdistError):
    """A remote call failed.

    Attributes:
        target: The object that was called: the name under which it is served, with its number if there are several.
        method: The method.
        peer: The process of the object.
        reason: The event, as a clause.
    """

    advice = ""

    def __init__(self, target: str, method: str, peer: str | int, reason: str) -> None:
        # A derived class has another base with a constructor of its own.
        self.args = (target, method, peer, reason)
        self.target, self.method, self.peer, self.reason = target, method, peer, reason

    def _text(self) -> str:
        return f"{self.target}.{self.method}() at {self.peer}: {self.reason}{'; ' + self.advice if self.advice else ''}"


class RemoteError(CallError):
    """The method raised an exception. If that is of a class of Python itself, such as ValueError, this error is one, too.

    Attributes:
        type_name: The full name of the exception's class.
        remote_message: The message of the exception.
        remote_traceback: The traceback at the callee as text.
    """

    def __init__(
        self, target: str, method: str, peer: str | int, type_name: str, remote_message: str, remote_traceback: str
    ) -> None:
        super().__init__(target, method, peer, f"it raised {type_name}: {remote_message}")
        self.args = (target, method, peer, type_name, remote_message, remote_traceback)
        self.type_name, self.remote_message, self.remote_traceback = type_name, remote_message, remote_traceback

    def _text(self) -> str:
        return f"{super()._text()}\n\n{self.remote_traceback}".rstrip()


class CallRefusedError(CallError):
    """The callee did not run the method: there is no such object or method, or it does not take these arguments."""


class ResultError(CallError):
    """The method has run, and its result cannot be carried to the caller."""

    advice = "return plain data and tensors"


class CallTimeoutError(CallError, TimeoutError):
    """The deadline of a call passed. The callee cancels the method; it may have run in part, or not at all.

    ``timeout`` is the timeout of the call in seconds.
    """

    advice = "pass a longer timeout=, or see at the callee what it does"

    def __init__(self, target: str, method: str, peer: str | int, timeout: float, reason: str = "") -> None:
        super().__init__(target, method, peer, reason or f"no result within {timeout:g} s")
        self.args = (target, method, peer, timeout, reason)
        self.timeout = timeout


class OverloadedError(CallError):
    """Too many calls wait. The method has not run."""

    advice = "make fewer calls at a time, or serve the object in more processes"


class CalleeLostError(CallError, PeerLostError):
    """The process of the object was lost. ``may_have_run`` says whether the method may have run, in part or as a whole."""

    advice = "read the log of that process"

    def __init__(self, target: str, method: str, peer: str | int, reason: str, may_have_run: bool) -> None:
        PeerLostError.__init__(self, peer, reason)
        CallError.__init__(self, target, method, peer, reason)
        self.args = (target, method, peer, reason, may_have_run)
        self.may_have_run = may_have_run

    def _text(self) -> str:
        ran = "the method may have run, and is not called again" if self.may_have_run else "the method has not run"
        event, advice = f"the process was lost ({self.reason})", self.advice
        if self.reason.startswith("this process"):
            event, advice = self.reason, "make calls inside the `async with` block of the session"
        return f"{self.target}.{self.method}() at {self.peer}: {event}; {ran}; {advice}"


class PartialError(CallError):
    """A call to many objects failed at some of them.

    Attributes:
        results: The result of each object, in their order; None for those that failed.
        failures: The errors, by the position of the object.
    """

    def __init__(self, target: str, method: str, results: Sequence[object], failures: Mapping[int, Exception]) -> None:
        few = "; ".join(str(getattr(error, "message", error)) for error in list(failures.values())[:3])
        more = f"; and {len(failures) - 3} more" if len(failures) > 3 else ""
        reason = f"{len(failures)} of {len(results)} failed: {few}{more}"
        super().__init__(target, method, f"{len(results)} objects", reason)
        self.args = (target, method, results, failures)
        self.results, self.failures = list(results), dict(failures)


class NameNotFoundError(AsyncdistError, TimeoutError):
    """No process serves an object under a name.

    Attributes:
        name: The name.
        timeout: Seconds for which this process waited.
    """

    def __init__(self, name: str, where: str, timeout: float, seen: str) -> None:
        super().__init__(name, where, timeout, seen)
        self.name, self.where, self.timeout, self.seen = name, where, timeout, seen

    def _text(self) -> str:
        return (
            f"after {self.timeout:g} s no process serves {self.name!r} in {self.where} ({self.seen}); check the name, "
            "and that the process that serves it was started with the same job and token"
        )


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
