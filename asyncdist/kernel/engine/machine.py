"""The contract between `asyncdist.kernel.engine.progress.Progress` and the endpoint that it drives."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, Protocol

from asyncdist.base.callables import Callback, Predicate
from asyncdist.kernel.transport.base import Sleep, Wait

READ, WRITE = select.POLLIN, select.POLLOUT


DoneCallback = Callable[..., object]
"""Is called with the work when it is complete."""


class Finishable(Protocol):
    """A `Work` or a condition (`Until`) that a driver waits for."""

    def is_completed(self) -> bool: ...

    def add_done_callback(self, callback: DoneCallback, /) -> None: ...

    def remove_done_callback(self, callback: DoneCallback, /) -> None: ...


class Until:
    """A condition that a driver waits for."""

    def __init__(self, true: Predicate) -> None:
        self.is_completed = true

    def add_done_callback(self, callback: DoneCallback, /) -> None:
        """Do nothing: a thread that stands by checks the condition again when the current driver stops."""

    def remove_done_callback(self, callback: DoneCallback, /) -> None:
        """Do nothing, as `add_done_callback` does."""


class ScheduleChannel(Protocol):
    """The channel of the group that a schedule belongs to. Written under the lock.

    Attributes:
        members: The ranks in the world of the group's members.
        error: The error of the failed or destroyed group; None while the group works.
        started: The number of collectives that have started.
        highest: The highest number of these.
    """

    @property
    def members(self) -> Sequence[int]: ...

    error: Any
    started: int
    highest: int


class Machine(Protocol):
    """The pending operations of one rank. Its `Progress` calls the methods under its lock.

    Attributes:
        finished: The callbacks that the next `take_finished` returns.
        timers: The timers that wait for `expire`. Any thread may ask whether there are any.
    """

    finished: list[Callback]

    @property
    def timers(self) -> Sized: ...

    @property
    def operations(self) -> Mapping[bytes, object]:
        """The pending operations, by key."""

    @property
    def acting(self) -> Mapping[bytes, object]:
        """The pending operations that do more than receive a message, by key."""

    def only_receives(self) -> bool:
        """Return whether nothing is pending but messages to receive, of which no callback is to learn."""

    def advance(self, ready: Iterable[int] | None) -> bool:
        """Make progress on the given descriptors, or on all; return whether anything moved."""

    def waits(self) -> list[Wait] | None:
        """Return the descriptors and poll events to sleep on, or None if something has moved.

        Until the next `advance`, peers signal new data on these descriptors.
        """

    def sleep(self, peer: int) -> Sleep | None:
        """Return how to sleep for what one peer does next, and for as little else as possible.

        None if nothing less than `waits` reports it.
        """

    def busy(self) -> bool:
        """Return whether anything is pending that needs a driver."""

    def next_deadline(self) -> float:
        """Return the monotonic time at which `expire` has something to do; infinity for never."""

    def expire(self, now: float) -> None:
        """Fail the operations whose deadline has passed, and run the timers that are due."""

    def interrupted(self, cause: BaseException) -> None:
        """Fail everything: ``cause`` interrupted a transfer after an unknown number of bytes, or the process is out of
        file descriptors."""

    def take_finished(self) -> list[Callback]:
        """Return and remove the callbacks of completed operations, which the caller runs without the lock."""
