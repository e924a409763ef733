"""Which connection gives way when a port has too many of one kind.

A port that refuses the newest connection is shut by strangers that hold connections without the token. So the oldest one
is closed: it has had the most time to prove that it holds the token.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from time import monotonic
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class EvictingQueue(Generic[C]):
    """Connections in the order in which they were added, at most ``most``: a further one evicts the oldest.

    ``evict`` ends a connection, which is in the queue no more.
    """

    def __init__(self, most: int, evict: Callable[[C], object]) -> None:
        self._most, self._evict = most, evict
        self._added: dict[C, float] = {}

    def __len__(self) -> int:
        return len(self._added)

    def __iter__(self) -> Iterator[C]:
        return iter(self._added)

    def __contains__(self, connection: object) -> bool:
        return connection in self._added

    def add(self, connection: C) -> None:
        """Add a connection as the newest. One that is in the queue becomes the newest."""
        self._added.pop(connection, None)
        self._added[connection] = monotonic()
        if len(self._added) > self._most:
            self.evict_oldest()

    def discard(self, connection: C) -> None:
        """Remove a connection that has ended, or is of this kind no more. Idempotent."""
        self._added.pop(connection, None)

    def evict_oldest(self, older_than: float = 0.0) -> bool:
        """Evict the oldest connection, if it was added at least ``older_than`` seconds ago; return whether it was."""
        oldest = next(iter(self._added), None)
        if oldest is None or monotonic() - self._added[oldest] < older_than:
            return False
        del self._added[oldest]
        self._evict(oldest)
        return True
