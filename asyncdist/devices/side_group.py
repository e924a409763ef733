"""A group of the host's, of the same ranks, for what these have to say beside their calls: made when it is first needed."""

from __future__ import annotations

import threading

from asyncdist.errors import NotInitializedError
from asyncdist.transport.host_group import HostGroup


class SideGroup:
    """A group beside ``host``; ``what`` tells it from others. One thread at a time asks for it, any may end it."""

    def __init__(self, host: HostGroup, what: str) -> None:
        self._host, self._what = host, what
        self._made: HostGroup | None = None
        self._closed = False
        self._changing = threading.Lock()

    def group(self) -> HostGroup:
        """Return the group; raises NotInitializedError once it is closed."""
        if self._made is not None and not self._closed:
            return self._made
        group = self._host.sibling(self._what)  # without the lock: callbacks may be called here, and close us
        with self._changing:
            if not self._closed:
                self._made = group
                return group
        group.close()
        raise NotInitializedError(f"group {self._host.name!r} was destroyed")

    @property
    def error(self) -> Exception | None:
        """What it failed with; None while it works, or was never needed."""
        return None if self._made is None else self._made.error

    def abort(self, reason: str) -> None:
        """Fail what is pending there, on every rank."""
        if self._made is not None:
            self._made.abort(reason)

    def close(self) -> None:
        """Destroy it on this rank; nobody makes it again. Idempotent."""
        with self._changing:
            self._closed = True
        if self._made is not None:
            self._made.close()
