"""The objects that a process serves, and how each of their methods runs."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping, Sequence
from enum import Enum
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from asyncdist.base.callables import AnyFunction
from asyncdist.errors import UsageError

CALL_METHOD = "__call__"


class MethodKind(Enum):
    """How a method runs: on the loop, there as an async generator, or in a thread. The values are flags of its code."""

    COROUTINE = inspect.CO_COROUTINE
    STREAM = inspect.CO_ASYNC_GENERATOR
    PLAIN = 0


class ServedMethod(NamedTuple):
    function: AnyFunction
    kind: MethodKind


class NoSuchObject(Exception):
    """There is no such object or method; the message says what there is."""


class ServedObjects:
    """Objects by name, of which several may share one, and by the number of a reference.

    Raises:
        UsageError: It is no mapping, a name is not a text, or has no object.
    """

    def __init__(self, objects: object) -> None:
        if not isinstance(objects, Mapping):
            kind = type(objects).__qualname__
            raise UsageError(
                f"objects are served under names, and {kind} is not a dict of objects: pass {{'name': object}}"
            )
        self._named: dict[str | int, Sequence[Any]] = {}
        for name, served in objects.items():
            if not isinstance(name, str) or not name:
                raise UsageError(f"objects are served under names that are texts, not {name!r}")
            several = served if isinstance(served, list | tuple) else [served]
            if not several:
                raise UsageError(f"no object is served under the name {name!r}")
            self._named[name] = several
        self.unpublished: dict[str | int, Any] = {}
        """Services of the session itself by name, and the objects of references by number."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of objects under each name."""
        return {str(name): len(several) for name, several in self._named.items()}

    def method(self, name_or_number: str | int, index: int, name: str) -> ServedMethod:
        """Return a method, as the object has it now. Raises NoSuchObject."""
        served = self.object(name_or_number, index)
        if name.startswith("_") and name != CALL_METHOD:
            raise NoSuchObject(f"{name!r} is private: it cannot be called remotely")
        if isinstance(served, torch.Tensor) and isinstance(name_or_number, int):
            raise NoSuchObject("a reference to a tensor has no methods: use read(), read_into() and write()")
        try:
            function = served if name == CALL_METHOD and callable(served) else getattr(served, name, None)
        # A property of the program may raise anything.
        except Exception as error:
            raise NoSuchObject(
                f"{name!r} of an object of type {type(served).__qualname__} cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not callable(function):
            raise NoSuchObject(_why_not_callable(served, name))
        return ServedMethod(function, kind_of(function))

    def object(self, name_or_number: str | int, index: int) -> Any:
        """Return an object. Raises NoSuchObject."""
        several = self._named.get(name_or_number)
        if several is not None:
            if 0 <= index < len(several):
                return several[index]
            raise NoSuchObject(
                f"this process serves {len(several)} objects {name_or_number!r}, and none with number {index}"
            )
        if name_or_number in self.unpublished:
            return self.unpublished[name_or_number]
        if isinstance(name_or_number, int):
            raise NoSuchObject("the object of this reference has been released")
        names = ", ".join(map(repr, self._named)) or "none"
        raise NoSuchObject(f"this process serves no object {name_or_number!r}; its names: {names}")


def _why_not_callable(served: Any, name: str) -> str:
    kind = type(served).__qualname__
    if inspect.getattr_static(served, name, None) is not None:
        return f"{name!r} is an attribute of an object of type {kind}, not a method: serve a method that returns it"
    names = [each for each in dir(served) if not each.startswith("_")]
    close = difflib.get_close_matches(name, names, 3)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"an object of type {kind} has no method {name!r}{hint}"


_KINDS = {kind.value: kind for kind in MethodKind}
_FLAGS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def kind_of(function: AnyFunction) -> MethodKind:
    """Return how a callable runs."""
    if isinstance(function, MethodType):
        function = function.__func__
    # Each call asks for this. A function without attributes wraps no other one.
    if isinstance(function, FunctionType) and not function.__dict__:
        return _KINDS[function.__code__.co_flags & _FLAGS]
    if isinstance(function, functools.partial):
        return kind_of(function.func)
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        return kind_of(type(function).__call__)
    function = inspect.unwrap(function)
    if inspect.iscoroutinefunction(function):
        return MethodKind.COROUTINE
    return MethodKind.STREAM if inspect.isasyncgenfunction(function) else MethodKind.PLAIN
