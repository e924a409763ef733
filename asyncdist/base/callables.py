"""The types of functions that modules of every folder take. A function with a role of its own has a type in its module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

Callback = Callable[[], object]
"""Is called once or more; the result is ignored."""
Predicate = Callable[[], bool]
"""Says whether something holds at present."""
AnyFunction = Callable[..., Any]
"""A function of the user, with the arguments that the user passes."""
Supplier = Callable[[], T]
"""Is called once for what it returns."""
Closure = Callable[[], float]
"""Evaluates the model again and returns the loss, as the steps of torch's optimizers take it."""
