"""Checks of the kinds of arguments of public calls: a wrong kind raises UsageError before anything is done."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from asyncdist.errors import UsageError


def whole_number_of(name: str, value: object) -> int:
    """Return ``value`` as an int; raise UsageError if it is not a whole number, such as the text of a variable."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        advice = ": pass int(...) of that text" if isinstance(value, str) else ""
        raise UsageError(f"{name} is a whole number, not {value!r}{advice}") from None


def checked_text(name: str, value: object, example: str) -> None:
    """Raise UsageError if ``value`` is neither None nor a text; ``example`` shows a correct one."""
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{name} is a text such as {example}, not {value!r}")


def list_of(name: str, value: Any, of: str) -> list[Any]:
    """Return ``value`` as a list; raise UsageError if it is not a list or another iterable of ``of``, or is a text."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise UsageError(f"{name} is a list of {of}, not {value!r}")
    return list(value)
