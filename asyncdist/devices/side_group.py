"""A group of the host's, of the same ranks, for what these have to say beside their calls: made when it is first needed."""

from __future__ import annotations

import threading

from asyncdist.errors import NotInitializedError
from asyncdist.transport.host_group import HostGroup


class SideGroup:
    """A group beside ``host``; ``what`` tells it from others. One thread at a time asks for it, any may end it."""

    def __init__(self, host: HostGroup, purpose: str) -> None:
        self._host, self._purpose = host, purpose
        self._group: HostGroup | None = None
        self._closed = False
        self._lock = threading.Lock()

    def group(self) -> HostGroup:
        """Return the group; raises NotInitializedError once it is closed."""
        if self._group is not None and not self._closed:
            return self._group
        group = self._host.sibling(self._purpose)  # without the lock: callbacks may be called here, and close us
        with self._lock:
            if not self._closed:
                self._group = group
                return group
        group.close()
        raise NotInitializedError(f"group {self._host.name!r} was destroyed")

    @property
    def error(self) -> Exception | None:
        """What it failed with; None while it works, or was never needed."""
        return None if self._group is None else self._group.error

    def abort(self, reason: str) -> None:
        """Fail what is pending there, on every rank."""
        if self._group is not None:
            self._group.abort(reason)

    def close(self) -> None:
        """Destroy it on this rank; nobody makes it again. Idempotent."""
        with self._lock:
            self._closed = True
        if self._group is not None:
            self._group.close()
