"""The contract of the CPU group that belongs to a device group.

`asyncdist.groups.group.Group` implements `CpuGroup` and makes the device groups, so this layer must not import it.
"""

from __future__ import annotations

from typing import Protocol

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
