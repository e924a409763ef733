"""Spans of operations in torch's profiler, such as ``asyncdist:all_reduce``, from the call to its completion.

A profiler records operations that the profiled thread starts. The span of a background operation ends on another thread.
The profiler then treats the operation as asynchronous, like those of gloo, and nests no other operator in it.
"""

from __future__ import annotations

from asyncdist.kernel.torch_private import enter_span, exit_span


def begin(op: str) -> object:
    """Begin an operation's span; return the handle for `end`."""
    return enter_span(f"asyncdist:{op}", None)


def end(span: object) -> None:
    """End a span, on any thread, also after the profiler has stopped."""
    exit_span(span)
