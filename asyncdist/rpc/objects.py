"""The objects that a process serves, and how each of their methods runs."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from asyncdist.errors import UsageError

CALL_METHOD = "__call__"


class MethodKind(Enum):
    """How a method runs."""

    COROUTINE = "on the loop"
    STREAM = "on the loop, as an async generator"
    PLAIN = "in a thread"


class ServedMethod(NamedTuple):
    """A method of an object."""

    function: Callable[..., Any]
    kind: MethodKind


class NoSuchObject(Exception):
    """There is no such object or method; the message says what there is."""


class ServedObjects:
    """Objects by name and by the number of a reference.

    Args:
        objects: An object for each name; a list or tuple of several that share a name.

    Raises:
        UsageError: A name is not a text, or has no object.
    """

    def __init__(self, objects: dict[str, Any]) -> None:
        self._named: dict[str, Sequence[Any]] = {}
        for name, served in objects.items():
            if not isinstance(name, str) or not name:
                raise UsageError(f"objects are served under names that are texts, not {name!r}")
            several = served if isinstance(served, list | tuple) else [served]
            if not several:
                raise UsageError(f"no object is served under the name {name!r}")
            self._named[name] = several
        self._services: dict[str, Any] = {}
        self._referenced: dict[int, Any] = {}
        self._methods: dict[tuple[str | int, int, str], ServedMethod] = {}

    @property
    def counts(self) -> dict[str, int]:
        """The number of objects under each name."""
        return {name: len(several) for name, several in self._named.items()}

    def add_service(self, name: str, service: Any) -> None:
        """Serve an object of the session itself, which is not published."""
        self._services[name] = service

    def add_reference(self, number: int, target: Any) -> None:
        """Make an object reachable by the number of a reference."""
        self._referenced[number] = target

    def remove_reference(self, number: int) -> None:
        """Forget the object of a reference."""
        if self._referenced.pop(number, None) is not None:
            for key in [key for key in self._methods if key[0] == number]:
                del self._methods[key]

    def method(self, target: str | int, index: int, name: str) -> ServedMethod:
        """Return a method. Raises NoSuchObject."""
        key = (target, index, name)
        method = self._methods.get(key)
        if method is None:
            method = self._methods[key] = self._find(target, index, name)
        return method

    def object(self, target: str | int, index: int) -> Any:
        """Return an object. Raises NoSuchObject."""
        if isinstance(target, int):
            if target not in self._referenced:
                raise NoSuchObject("the object of this reference has been released")
            return self._referenced[target]
        if target in self._services:
            return self._services[target]
        several = self._named.get(target)
        if several is None:
            names = ", ".join(map(repr, self._named)) or "none"
            raise NoSuchObject(f"this process serves no object {target!r}; its names: {names}")
        if not 0 <= index < len(several):
            raise NoSuchObject(f"this process serves {len(several)} objects {target!r}, and none with number {index}")
        return several[index]

    def _find(self, target: str | int, index: int, name: str) -> ServedMethod:
        served = self.object(target, index)
        kind = type(served).__qualname__
        if name.startswith("_") and name != CALL_METHOD:
            raise NoSuchObject(f"{name!r} is private: it cannot be called remotely")
        function = served if name == CALL_METHOD and callable(served) else getattr(served, name, None)
        if not callable(function):
            if inspect.getattr_static(served, name, None) is not None:
                raise NoSuchObject(
                    f"{name!r} is an attribute of an object of type {kind}, not a method: serve a method that returns it"
                )
            names = [each for each in dir(served) if not each.startswith("_")]
            close = difflib.get_close_matches(name, names, 3)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise NoSuchObject(f"an object of type {kind} has no method {name!r}{hint}")
        return ServedMethod(function, kind_of(function))


def kind_of(function: Callable[..., Any]) -> MethodKind:
    """Return how a callable runs."""
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = type(function).__call__
    function = inspect.unwrap(function)
    if inspect.iscoroutinefunction(function):
        return MethodKind.COROUTINE
    return MethodKind.STREAM if inspect.isasyncgenfunction(function) else MethodKind.PLAIN
