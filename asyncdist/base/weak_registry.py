"""The living objects of one kind in a process, which any thread may add, remove and list."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """References to objects that do not keep them alive.

    Any thread may call any method at any time. A `weakref.WeakSet` raises RuntimeError if one thread adds an object while
    another iterates, also in ``list(set)``.
    """

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, item: T) -> None:
        """Add an object, until `discard` or until it is collected."""
        self._objects[id(item)] = item

    def discard(self, item: T) -> None:
        """Remove an object, if it was added."""
        self._objects.pop(id(item), None)

    def clear(self) -> None:
        """Remove all objects."""
        self._objects.clear()

    def living(self) -> list[T]:
        """Return the objects that have not been collected, in the order in which they were added."""
        return [item for reference in self._objects.valuerefs() if (item := reference()) is not None]
