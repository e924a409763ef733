"""The changes of a group's members as a stream, which a coroutine or a thread reads."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from asyncdist.engine.endpoint import Endpoint
from asyncdist.engine.work import Work
from asyncdist.membership.detector import Liveness


class MemberChange(NamedTuple):
    """A change of one member.

    Attributes:
        member: The id of the member; see `Group.member_ids`.
        change: ``"lost"``, ``"suspected"`` (it has been silent for long), or ``"recovered"`` (it was suspected).
        reason: What has happened, as text.
    """

    member: int
    change: str
    reason: str


class MemberWatch:
    """A stream of `MemberChange`, made by `Group.watch_members`; read it with ``async for`` or, in a thread, with ``for``.

    It begins with the members that are lost already, and ends when the group is destroyed or has regrouped.
    """

    def __init__(self, mesh: Endpoint) -> None:
        self._mesh = mesh
        self._lock = threading.Lock()
        self._changes: deque[MemberChange] = deque()
        self._waiting: Work[None] | None = None
        self._ended = False

    def add(self, member: int, liveness: Liveness, reason: str) -> None:
        """Add a change. The caller holds the lock of the endpoint."""
        with self._lock:
            self._changes.append(MemberChange(member, liveness.value, reason))
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
            self._mesh.call_later(lambda: waiting.run_callbacks() if waiting.finish() else None)

    def _next(self) -> MemberChange | Work[None] | None:
        """Return the next change, or a work that completes when there is one; None at the end."""
        with self._lock:
            if self._changes:
                return self._changes.popleft()
            if not self._ended and self._waiting is None:
                self._waiting = Work(self._mesh.progress)
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
