"""Short texts of exceptions, for use inside the sentence of another error or a log line."""

from __future__ import annotations

from asyncdist.errors import AsyncdistError


def describe_error(error: BaseException) -> str:
    """Return an exception in a few words: the system's text for its ``errno``, else its message, else its class name."""
    message = error.summary if isinstance(error, AsyncdistError) else str(error)
    return str(getattr(error, "strerror", None) or message or type(error).__name__)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message. torch's network errors continue with C++ stack frames."""
    return (str(error).splitlines() or [type(error).__name__])[0]
