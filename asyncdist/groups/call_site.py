"""The line of the user's program that called this package, for messages about that call."""

from __future__ import annotations

import sys

_INTERNAL = ("asyncdist", "asyncdist_transports", "torch._dynamo")
"""Packages whose frames stand between the user's line and the place that asks for it."""


def calling_line() -> str:
    """Return the innermost line outside this package as ``file:line``."""
    file_name, line = call_site()
    return f"{file_name}:{line}"


def call_site() -> tuple[str, int]:
    """Return the file name and the line number of the innermost line outside this package."""
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None and _is_internal(frame.f_globals.get("__name__") or ""):
        frame = outer
    return frame.f_code.co_filename, frame.f_lineno


def _is_internal(module: str) -> bool:
    return module in _INTERNAL or module.startswith(tuple(f"{package}." for package in _INTERNAL))
