"""What is to be done at a time unless something happens before; touched only under the lock of its owner."""

from __future__ import annotations

import math
from collections.abc import Callable


class TimerTable:
    """Actions by what they are about, each with its monotonic time. False while there is none."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: dict[object, tuple[float, Callable[[], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(self, about: object, at: float, action: Callable[[], None]) -> None:
        """Have ``action`` done at a time, unless there is a reminder about the same thing already."""
        self._due.setdefault(about, (at, action))

    def forget(self, about: object) -> None:
        """Drop the reminder about something, if there is one."""
        self._due.pop(about, None)

    def next(self) -> float:
        """Return the time of the first; infinity if there is none."""
        return min((at for at, _ in self._due.values()), default=math.inf)

    def run(self, now: float) -> None:
        """Do what is due."""
        for about, (at, action) in list(self._due.items()):
            if at <= now and about in self._due:
                del self._due[about]
                action()
