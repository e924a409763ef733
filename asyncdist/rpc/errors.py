"""The errors of remote calls. `asyncdist.rpc` exports them; the other errors are in `asyncdist.errors`.

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

from collections.abc import Mapping, Sequence

from asyncdist.errors import AsyncdistError, PeerLostError


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
