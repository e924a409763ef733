"""Decorators for functions that workers run: torch's module ``torch.distributed.rpc.functions``."""

from __future__ import annotations

import functools
from typing import Any

from asyncdist.base.callables import AnyFunction
from asyncdist.rpc.blocking.workers import ASYNC_EXECUTION


def async_execution(function: AnyFunction) -> AnyFunction:
    """Mark a function that returns a future. The call ends with its result, and holds no thread until then.

    Args:
        function: Returns a `torch.futures.Future`, also one that ``then`` or `torch.futures.collect_all` has made.
            ``@staticmethod`` and ``@classmethod`` stand above this decorator.
    """

    @functools.wraps(function)
    def returns_a_future(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(returns_a_future, ASYNC_EXECUTION, function)
    return returns_a_future
