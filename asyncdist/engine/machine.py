"""What `progress.Progress` drives: the contract between it and the mesh of one rank."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

READ, WRITE = select.POLLIN, select.POLLOUT
Wait = tuple[int, int]


class Finishable(Protocol):
    """What a driver drives for: a Work."""

    def is_completed(self) -> bool: ...

    def add_done_callback(self, callback: Callable[..., object], /) -> None: ...

    def remove_done_callback(self, callback: Callable[..., object], /) -> None: ...


class Until:
    """What a driver drives for where it is no work: that something is so."""

    def __init__(self, true: Callable[[], bool]) -> None:
        self.is_completed = true

    def add_done_callback(self, callback: Callable[..., object], /) -> None:
        """Nobody says when it is: who waits for another driver looks again when that one leaves."""

    remove_done_callback = add_done_callback


class Failing(Protocol):
    """What a schedule belongs to: a group's channel. Written under the lock."""

    error: Any
    """What it has failed with, or that it was destroyed; None while it works."""


class Machine(Protocol):
    """Everything that is pending for one rank; its methods are called under the lock of its `Progress`.

    Attributes:
        finished: The callbacks that the next `take_finished` returns.
    """

    finished: list[Callable[[], None]]

    @property
    def operations(self) -> Mapping[bytes, object]:
        """The pending operations, by key."""

    def advance(self, ready: Iterable[int] | None) -> bool:
        """Move what can be moved, of the given descriptors or of all that want to; return whether anything moved."""

    def waits(self) -> list[Wait] | None:
        """Return the descriptors and events to sleep on, and have peers ring there; None if something moved meanwhile."""

    def busy(self) -> bool:
        """Return whether anything is pending that needs a driver."""

    def next_deadline(self) -> float:
        """Return the monotonic time at which `expire` has something to do; infinity for never."""

    def expire(self, now: float) -> None:
        """Fail what has run out of time."""

    def interrupted(self, cause: BaseException) -> None:
        """Fail everything: ``cause`` struck in the middle of a move, and nobody knows what was moved."""

    def take_finished(self) -> list[Callable[[], None]]:
        """Return and forget what is to be called, without the lock, for operations that have ended."""
