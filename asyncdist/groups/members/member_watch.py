"""The changes of a group's members as a stream, which a coroutine or a thread reads."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.kernel.engine.work import Work
from asyncdist.net.detector import Liveness


class MemberChange(NamedTuple):
    """A change of one member.

    Attributes:
        member: The id of the member; see `Group.member_ids`. For a process that waits, its id in the job; see `JobSession`.
        change: ``"lost"``, ``"suspected"`` (it has been silent for long), ``"recovered"`` (it was suspected), or
            ``"waiting"`` (the group belongs to a job, and a process waits to join it).
        reason: The event, as text.
    """

    member: int
    change: str
    reason: str


class MemberWatch:
    """A stream of `MemberChange`, made by `Group.watch_members`; read it with ``async for`` or, in a thread, with ``for``.

    It begins with the members that are lost and the processes that wait already. It ends when the group is destroyed or
    has regrouped.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._changes: deque[MemberChange] = deque()
        self._waiting: Work[None] | None = None
        self._ended = False

    def add(self, change: MemberChange) -> None:
        """Add a change. The caller holds the lock of the endpoint."""
        with self._lock:
            self._changes.append(change)
        self._wake()

    def end(self) -> None:
        """End the stream, after the changes that it holds. The caller holds the lock of the endpoint."""
        with self._lock:
            self._ended = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._endpoint.call_later(lambda: waiting.run_callbacks() if waiting.finish() else None)

    def _next(self) -> MemberChange | Work[None] | None:
        """Return the next change, or a work that completes when there is one; None at the end."""
        with self._lock:
            if self._changes:
                return self._changes.popleft()
            if not self._ended and self._waiting is None:
                self._waiting = Work(self._endpoint.progress)
            return None if self._ended else self._waiting

    def __aiter__(self) -> MemberWatch:
        return self

    async def __anext__(self) -> MemberChange:
        while (found := self._next()) is not None:
            if isinstance(found, MemberChange):
                return found
            await found
        raise StopAsyncIteration

    def __iter__(self) -> MemberWatch:
        return self

    def __next__(self) -> MemberChange:
        while (found := self._next()) is not None:
            if isinstance(found, MemberChange):
                return found
            found.wait()
        raise StopIteration


class MemberWatches:
    """The streams of one group, and who waits to join.

    Attributes:
        candidates: Returns the ids of the processes that wait to join the job of the group, if it belongs to one.
    """

    def __init__(self, endpoint: Endpoint, member_ids: Sequence[int]) -> None:
        self._endpoint, self._member_ids = endpoint, member_ids
        self.candidates: Callable[[], Iterable[int]] = tuple
        self._watches: weakref.WeakSet[MemberWatch] = weakref.WeakSet()
        self._has_ended = False

    def begin(self) -> MemberWatch:
        """Return a new stream. Any thread may call it."""
        watch = MemberWatch(self._endpoint)

        def begin() -> None:
            for member in self._member_ids:
                error = self._endpoint.lost_peers.get(member)
                if error is not None:
                    watch.add(MemberChange(member, Liveness.LOST.value, error.reason))
            for process in self.candidates():
                watch.add(_waiting(process))
            if self._has_ended:
                watch.end()
            elif self._on_change not in self._endpoint.failures.observers:
                self._endpoint.failures.observers.append(self._on_change)
            self._watches.add(watch)

        self._endpoint.progress.submit(begin)
        return watch

    def note_waiting(self, process: int) -> None:
        """Report a process that waits to join. Any thread may call it."""
        self._endpoint.progress.submit(lambda: self._add(_waiting(process)))

    def end(self) -> None:
        """End all streams. The caller holds the lock of the endpoint."""
        self._has_ended = True
        with contextlib.suppress(ValueError):
            self._endpoint.failures.observers.remove(self._on_change)
        for watch in list(self._watches):
            watch.end()

    def _on_change(self, peer: int, liveness: Liveness, reason: str) -> None:
        if peer in self._member_ids:
            self._add(MemberChange(peer, liveness.value, reason))

    def _add(self, change: MemberChange) -> None:
        for watch in list(self._watches):
            watch.add(change)


def _waiting(process: int) -> MemberChange:
    return MemberChange(process, "waiting", f"process {process} waits to join the job")
