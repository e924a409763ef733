"""The CPU group that carries the control traffic of a device transport, as protocols.

`HostGroup` is the part of a process group that device transports use; `asyncdist.groups.group.Group` implements it. This
module imports no engine and no group, so that the contract for devices stays below both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from asyncdist.config import Config


class HostWork(Protocol):
    """The handle of an operation on the host: the part of `asyncdist.Work` that device transports use."""

    @property
    def is_driven(self) -> bool: ...

    def is_completed(self) -> bool: ...

    def result(self) -> Any: ...

    def wait(self, timeout: Any = None) -> bool: ...

    def exception(self) -> BaseException | None: ...

    def add_done_callback(self, callback: Callable[[Any], object]) -> None: ...


class HostEndpoint(Protocol):
    """The part of this rank's endpoint that device transports use: its settings, and errors for differing calls."""

    @property
    def config(self) -> Config: ...

    def difference(self, peer: int, own: int, other: int) -> Exception: ...


class HostGroup(Protocol):
    """The CPU group of a device group. Arguments are ranks in the group; ``ranks`` are global ranks.

    ``member_ids`` name the members in errors; they differ from ``ranks`` once the default group has regrouped.
    """

    @property
    def name(self) -> str: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def member_ids(self) -> tuple[int, ...]: ...

    @property
    def endpoint(self) -> HostEndpoint: ...

    @property
    def error(self) -> Exception | None: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0, *, timeout: float) -> HostWork: ...

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0, *, timeout: float) -> HostWork: ...

    def barrier(self, *, background: bool, timeout: float) -> HostWork: ...

    def all_gather_object(self, output: list[Any], value: Any, *, background: bool, timeout: float) -> HostWork: ...

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, *, background: bool, timeout: float
    ) -> HostWork: ...

    def all_reduce(self, *args: Any, **options: Any) -> HostWork: ...

    def reduce(self, *args: Any, **options: Any) -> HostWork: ...

    def broadcast(self, *args: Any, **options: Any) -> HostWork: ...

    def reduce_scatter(self, *args: Any, **options: Any) -> HostWork: ...

    def all_gather(self, *args: Any, **options: Any) -> HostWork: ...

    def gather(self, *args: Any, **options: Any) -> HostWork: ...

    def scatter(self, *args: Any, **options: Any) -> HostWork: ...

    def all_to_all(self, *args: Any, **options: Any) -> HostWork: ...

    def _sibling(self, purpose: str) -> HostGroup:
        """Return another group of the same ranks for control traffic: for one ``purpose`` the same group on every rank."""

    def abort(self, reason: str = ...) -> None: ...

    def close(self) -> None: ...
