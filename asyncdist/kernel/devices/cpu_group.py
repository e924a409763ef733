"""The CPU group that belongs to a device group, and lazily created ones with the same ranks for control traffic.

`asyncdist.groups.group.Group` implements `CpuGroup` and makes the device groups, so this layer must not import it.
"""

from __future__ import annotations

import threading
from typing import Protocol

from asyncdist.errors import NotInitializedError
from asyncdist.kernel.collectives.group_context import GroupContext
from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.kernel.engine.operation import Plan
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.tracing.hooks import GroupHooks
from asyncdist.kernel.transport.host_group import HostGroup


class CpuGroup(HostGroup, Protocol):
    """A group on the host: its context for plans, and the start of a planned message."""

    timeout: float
    context: GroupContext
    hooks: GroupHooks

    @property
    def endpoint(self) -> Endpoint: ...

    def _start_message(self, name: str, tag: int, plan: Plan, *, timeout: float) -> Work: ...


class SideGroup:
    """A sibling of ``host``, created on first use.

    One thread at a time may call `group`; any thread may call `abort` and `close`.

    Args:
        host: The CPU group whose ranks take part.
        purpose: Name that distinguishes this side group from others; the same on every rank.
    """

    def __init__(self, host: HostGroup, purpose: str) -> None:
        self._host, self._purpose = host, purpose
        self._group: HostGroup | None = None
        self._closed = False
        self._lock = threading.Lock()

    def group(self) -> HostGroup:
        """Return the group, and create it on the first call.

        Raises:
            NotInitializedError: The side group was closed.
        """
        if self._group is not None and not self._closed:
            return self._group
        with self._lock:
            if self._closed:
                raise NotInitializedError(f"group {self._host.name!r} was destroyed")
            self._group = group = self._host._sibling(self._purpose)
        return group

    @property
    def error(self) -> Exception | None:
        """The failure of the group; None while it works or does not exist yet."""
        return None if self._group is None else self._group.error

    def abort(self, reason: str) -> None:
        """Fail all pending operations of the group on every rank."""
        if self._group is not None:
            self._group.abort(reason)

    def rest(self) -> None:
        """Destroy the group on this rank until the next call of `group`: its pending operations fail. Reports are lost."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.close()

    def close(self) -> None:
        """Destroy the group on this rank and prevent its creation. Idempotent."""
        with self._lock:
            self._closed = True
        if self._group is not None:
            self._group.close()
