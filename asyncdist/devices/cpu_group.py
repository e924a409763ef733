"""What the device layer needs of the CPU group whose members it serves.

`asyncdist.groups.group.Group` implements `CpuGroup`. The group makes its device groups, so this layer may not import it.
"""

from __future__ import annotations

from typing import Protocol

from asyncdist.collectives.data_movement import GroupContext
from asyncdist.engine.endpoint import Endpoint
from asyncdist.engine.operation import Channel, Plan
from asyncdist.engine.work import Work
from asyncdist.transport.host_group import HostGroup


class CpuGroup(HostGroup, Protocol):
    """A group on the host: its context for plans, its point-to-point channel, and the start of an operation."""

    timeout: float
    _who: GroupContext
    _messages: Channel

    @property
    def mesh(self) -> Endpoint: ...

    def _start(
        self, channel: Channel, name: str, number: int | None, plan: Plan, *, timeout: float | None = None
    ) -> Work: ...
