"""Operations in torch's profiler: ``asyncdist:all_reduce``, from the call to its completion, on whichever thread that is.

A profiler sees what the thread does that it was started in. One that goes on by itself ends on another thread; the
profiler takes it for asynchronous, as gloo's, and counts no other operator as its part.
"""

from __future__ import annotations

import torch

_enter = torch.ops.profiler._record_function_enter_new
_exit = torch.ops.profiler._record_function_exit._RecordFunction


def begin(op: str) -> object:
    """Begin an operation's span; return the handle for `end`."""
    return _enter(f"asyncdist:{op}", None)


def end(span: object) -> None:
    """End a span, on any thread, also after the profiler has stopped."""
    _exit(span)
