"""The contract between `asyncdist.engine.progress.Progress` and the endpoint that it drives."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

READ, WRITE = select.POLLIN, select.POLLOUT
Wait = tuple[int, int]


class Finishable(Protocol):
    """What a driver waits for: a `Work`, or a condition (`Until`)."""

    def is_completed(self) -> bool: ...

    def add_done_callback(self, callback: Callable[..., object], /) -> None: ...

    def remove_done_callback(self, callback: Callable[..., object], /) -> None: ...


class Until:
    """A condition that a driver waits for."""

    def __init__(self, true: Callable[[], bool]) -> None:
        self.is_completed = true

    def add_done_callback(self, callback: Callable[..., object], /) -> None:
        """Do nothing: a thread that stands by checks the condition again when the current driver stops."""

    def remove_done_callback(self, callback: Callable[..., object], /) -> None:
        """Do nothing, as `add_done_callback` does."""


class Failing(Protocol):
    """The channel of the group that a schedule belongs to. Written under the lock."""

    error: Any
    """The error of the failed or destroyed group; None while the group works."""


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
        """Return the descriptors and poll events to sleep on; peers signal them from now on. None if something has
        moved."""

    def busy(self) -> bool:
        """Return whether anything is pending that needs a driver."""

    def next_deadline(self) -> float:
        """Return the monotonic time at which `expire` has something to do; infinity for never."""

    def expire(self, now: float) -> None:
        """Fail what has run out of time."""

    def interrupted(self, cause: BaseException) -> None:
        """Fail everything: ``cause`` interrupted a transfer after an unknown number of bytes, or the process is out of
        file descriptors."""

    def take_finished(self) -> list[Callable[[], None]]:
        """Return and remove the callbacks of completed operations, which the caller runs without the lock."""
