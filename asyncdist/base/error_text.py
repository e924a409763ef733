"""Short texts of exceptions, for use inside the sentence of another error or a log line."""

from __future__ import annotations


def describe_error(error: BaseException) -> str:
    """Return an exception in a few words: the system's text for its ``errno``, else its message, else its class name."""
    return str(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message. torch's network errors continue with C++ stack frames."""
    return (str(error).splitlines() or [type(error).__name__])[0]
